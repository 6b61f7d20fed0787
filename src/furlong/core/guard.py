"""What a server accepts. Every report passes this one gate before any aggregation."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from furlong.core.context import Exchange
from furlong.core.layout import packed_order
from furlong.core.method import Report
from furlong.core.outliers import Start
from furlong.core.payload import Traffic, flatten, joined, traffic

_METRIC = re.compile(r"[A-Za-z0-9_./-]{1,64}")


class Expected:
    """What an upload must look like, taken apart once for all clients that must send the same."""

    def __init__(self, upload: Any) -> None:
        self.upload = upload
        self.tensors, self.tree = flatten(upload)
        self.order = packed_order(self.tensors)
        self.variances = [name for name in self.order if name.endswith("running_var")]

    @cached_property
    def traffic(self) -> Traffic:
        """The bytes of an upload that looks like this."""
        return traffic(self.upload)

    @cached_property
    def start(self) -> Start:
        """What the size of an update is counted from."""
        return Start(self.upload)


@dataclass(frozen=True)
class Guard:
    """Limits of one run; ``check`` gives the reason for a refusal, or ``None``."""

    max_examples: int = 1_000_000_000
    max_metrics: int = 64
    max_metric: float = 1e12  # sums and means of such numbers are still of use
    max_passes: int = 10_000  # over a client's images in one exchange
    max_stretch: float = 1e-2  # by which a unit row may be longer or shorter
    max_value: float = 1e10  # squares of such numbers are still finite
    max_count: int = 2**53  # the largest integer wins and counts on: far from an overflow
    sizes: Mapping[int, int] = field(default_factory=dict)  # what clients are known to hold
    # see ``outliers``: the c above which an update is left out; 0: told; none: nobody looks
    outlier: float | None = None

    def check(
        self,
        report: Any,
        expected: Expected,
        exchange: Exchange,
        client: int,
        unit_rows: Collection[str] = (),
    ) -> str | None:
        """Whether ``report`` answers ``exchange`` for ``client`` and looks like ``expected``.

        ``unit_rows``: fields of the upload whose rows must have length 1.
        """
        if not isinstance(report, Report):
            return f"not a report but {type(report).__name__}"
        if type(report.client) is not int or report.client != client:
            return f"signed by client {report.client!r}"
        if type(report.exchange) is not int or report.exchange != exchange.index:
            return f"answers exchange {report.exchange!r}, not {exchange.index}"
        most = min(self.max_examples, self.sizes.get(client, self.max_examples))
        if type(report.examples) is not int or not 0 <= report.examples <= most:
            return f"claims {report.examples!r} examples (allowed: 0 to {most})"
        return (
            self._metrics(report.metrics, report.examples)
            or self._upload(report.upload, expected)
            or self._rows(report.upload, unit_rows)
        )

    def _metrics(self, metrics: Any, examples: int) -> str | None:
        if not isinstance(metrics, dict) or len(metrics) > self.max_metrics:
            return f"metrics are not a dict of at most {self.max_metrics} numbers"
        for name, value in metrics.items():
            if not isinstance(name, str) or not _METRIC.fullmatch(name):
                return "a metric's name is not a short word"
            if type(value) not in (int, float):
                return f"metric {name!r} is not a number"
            if not -self.max_metric <= value <= self.max_metric:
                return f"metric {name!r} is beyond ±{self.max_metric:g}"
        seen, most = metrics.get("images", 0), self.max_passes * examples
        return None if 0 <= seen <= most else f"claims to have trained on {seen:g} images"

    def _rows(self, upload: Any, names: Collection[str]) -> str | None:
        """Rows that others take as they are: a long one would drown all others."""
        tensors = flatten(upload)[0] if names else {}
        for name in (name for name in names if name in tensors):
            lengths = torch.linalg.vector_norm(tensors[name], dim=1)
            if lengths.numel() and float((lengths - 1).abs().max()) > self.max_stretch:
                return f"{name} holds rows that are no unit vectors"
        return None

    def _harmless(self, tensor: Tensor) -> bool:
        """Whether no number is too large or none: quick, and in doubt not."""
        if tensor.dtype != torch.float32:
            return self._values("", tensor) is None
        flat = tensor.detach().flatten()
        # each number's square is at most the sum, which is NaN or infinite if one of them is
        return float(torch.dot(flat, flat)) < self.max_value**2 / 2

    def _values(self, name: str, tensor: Tensor) -> str | None:
        if not tensor.numel():
            return None
        low, high = (v.item() for v in torch.aminmax(tensor.detach()))  # NaN goes through
        if not tensor.is_floating_point():
            good = 0 <= low <= high <= self.max_count
            return None if good else f"{name} holds a count beyond 0 to {self.max_count}"
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"{name} holds NaN or infinity"
        if max(-low, high) > self.max_value:
            return f"{name} holds a value beyond ±{self.max_value:g}"
        if name.endswith("running_var") and low < 0:
            return f"{name} holds a negative variance"
        return None

    def _upload(self, upload: Any, expected: Expected) -> str | None:
        got, got_tree = flatten(upload)
        want = expected.tensors
        if got.keys() != want.keys():
            missing, extra = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
            return f"wrong tensors: {len(missing)} missing {missing[:3]}, {len(extra)} unknown " + (
                str(extra[:3])
            )
        for name, tensor in got.items():
            if tensor.shape != want[name].shape:
                return f"{name} has shape {tuple(tensor.shape)}, not {tuple(want[name].shape)}"
            if tensor.dtype != want[name].dtype:
                return f"{name} has dtype {tensor.dtype}, not {want[name].dtype}"
        pieces = joined(got[name] for name in expected.order)
        variances = [got[name].flatten() for name in expected.variances]
        negative = bool(variances) and bool((torch.cat(variances) < 0).any())
        if negative or not all(map(self._harmless, pieces)):
            reasons = (self._values(name, tensor) for name, tensor in got.items())
            reason = next((reason for reason in reasons if reason), None)
            if reason is not None:
                return reason
        return _differs(got_tree, expected.tree)


def _differs(got: Any, want: Any) -> str | None:
    """Structures must agree; numbers must be finite and of the same kind."""
    if type(got) is not type(want):
        return f"a {type(got).__name__} stands where a {type(want).__name__} belongs"
    if isinstance(want, dict):
        if got.keys() != want.keys():
            return f"fields {sorted(map(str, got))[:4]} instead of {sorted(map(str, want))[:4]}"
        if "float" in want:
            return f"a number is {got['float']}"
        return next((r for key in want if (r := _differs(got[key], want[key]))), None)
    if isinstance(want, list):
        if len(got) != len(want):
            return f"{len(got)} entries instead of {len(want)}"
        return next((r for g, w in zip(got, want, strict=True) if (r := _differs(g, w))), None)
    if isinstance(want, str) and got != want:
        return f"{got[:60]!r} stands where {want[:60]!r} belongs"
    return None
