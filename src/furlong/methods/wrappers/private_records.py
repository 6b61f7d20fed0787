"""A budget of records: nobody can tell from what a client sends whether it had an image.

Abadi et al., CCS 2016: a client's step is, with U a Poisson sample of its units,

    g = ( Σ_{u ∈ U} g_u·min(1, C/‖g_u‖) + N(0, (σC)²) ) / E|U|,    P(u ∈ U) = q = B/n

A unit is a record, or a group of records that the method contrasts with each other; groups are
drawn anew for every step. g_u is the gradient of the loss of this unit alone, computed alone: no
other unit can have a part in it. If one record is taken away its group is not whole and gives
nothing, so the sum moves by at most C; if the record is replaced, by at most 2C. Sample, groups and
noise come from a secret of the client, and so do views and all else that is drawn at random: which
of a stream's numbers an image's view gets depends on how many images are before it, so with numbers
that all know one record less would be other views of every image behind it, which no clip bounds.
All that a client sends is made of weights after such steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor, nn

from furlong.core.context import (
    Batch,
    ClientContext,
    Optimiser,
    ServerContext,
    Setup,
    Shard,
)
from furlong.core.method import Local, Report
from furlong.core.noise import Noise, arithmetic, digest, repeatable
from furlong.core.privacy import Ledger, PrivacySettings, Release, noise_for
from furlong.errors import FurlongError
from furlong.methods.wrappers.private import Forecast, Private, cut
from furlong.seeding import with_seed
from furlong.words import plural


@dataclass(frozen=True)
class PrivateRecords(Private):
    """Nobody, the server included, can tell from what a client sends whether it had an image."""

    unit = "each single image of each client"

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, group = self.inner.decomposes, self.privacy.group
        if kind == "no":
            raise FurlongError(
                "privacy.level = record needs a loss that is a sum over images, or over small "
                "groups of them, and nothing else that leaves; the loss of this method, or what it "
                "sends, mixes all images of a batch or of the client, so one image can change it "
                "without bound. Use fedae, fedmae, fedrot, fedbyol, fedu, fedema, fedsimsiam with "
                "--method.predictor-steps 0, fedsimclr with --privacy.group, or level client."
            )
        if kind == "groups" and group < 2:
            raise FurlongError(
                f"privacy.group = {group}: this method contrasts images with each other. Over a "
                "whole batch one image changes the gradient of every other, which no clip of "
                "single gradients bounds. Give the size of groups that are contrasted by "
                "themselves: --privacy.group 8."
            )
        if kind == "records" and group > 1:
            raise FurlongError(
                f"privacy.group = {group} is for methods that contrast images with each other; "
                "the loss of this one is a sum over single images. Leave it out."
            )

    def units(self, setup: Setup) -> int:
        """The images."""
        return sum(setup.sizes.values())

    def places(self, setup: Setup, client: int) -> int:
        """The units of a client; images that make no whole group sit out a step."""
        groups = setup.sizes[client] // self.privacy.group
        if not groups:
            raise FurlongError(
                f"client {client} has {plural(setup.sizes[client], 'image')}: not one group of "
                f"privacy.group = {self.privacy.group}. Give a smaller group."
            )
        return groups

    def sampling(self, setup: Setup, client: int) -> float:
        """The q at which the expected number of images in a step is the batch size."""
        return min(1.0, setup.batch_size / (self.places(setup, client) * self.privacy.group))

    def release(self, setup: Setup, client: int) -> Release:
        """The steps of a round, each on a Poisson sample; every client has the noise it needs."""
        q, steps = self.sampling(setup, client), setup.steps(client)
        if self.privacy.noise is not None:
            return Release(q, self.privacy.noise, steps)
        assert self.privacy.epsilon is not None
        count = steps * max(1, self.visits(setup)[client])
        return Release(q, noise_for(self.privacy.epsilon, q, count, self.delta(setup)), steps)

    def repeats(self, setup: Setup) -> bool:
        """Not on an accelerator, which may round otherwise: noise is new there every time."""
        return self.privacy.noise_from == "seed" or repeatable(setup.device)

    def ratio(self, setup: Setup, cohort: list[int], parameters: int) -> float:
        """Of the mean of the clients' steps by images: √(Σ (w_k σ_k √d / E|U_k|)²)."""
        images = sum(setup.sizes[client] for client in cohort)
        squares = 0.0
        for client in cohort:
            release = self.release(setup, client)
            expected = release.sampling * self.places(setup, client)
            weight = setup.sizes[client] / images
            squares += parameters * (weight * release.noise / expected) ** 2
        return math.sqrt(squares)

    def warning(self, setup: Setup, forecast: Forecast) -> str:  # noqa: ARG002
        """How long the noise is, and what it is not for."""
        return (
            "A step's mean gradient is at most 1 clip long, the noise on the mean of the clients' "
            f"steps about {forecast.ratio:,.3g} clips. Several images of one person are several "
            "records: their ε adds up."
        )

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        """As the method does, with noisy steps; no metrics, for they are not covered."""
        release = self.release(ctx.setup, ctx.client)
        started = digest((down, state, tuple(ctx.moments)))
        # the same noise with another σ, clip or rate would fall out of the two results
        machine = arithmetic(ctx.setup.device) if self.repeats(ctx.setup) else token_hex()
        how = (release, self.privacy, ctx.setup.optimiser, ctx.learning_rate, machine)
        stream = self._stream("steps", ctx.client, ctx.exchange.index, started, how)
        places = self.places(ctx.setup, ctx.client)
        known = {f.name: getattr(ctx, f.name) for f in fields(ctx)}
        noisy = _NoisyContext(
            **known, release=release, privacy=self.privacy, places=places, stream=stream
        )
        views = self._stream("views", ctx.client, ctx.exchange.index, started, how)
        with with_seed(views.seed(), ctx.setup.device):
            local = self.inner.local_update(state, down, noisy)
        # what is expected, and not how many were drawn
        ctx.images_seen = round(release.count * release.sampling * places * self.privacy.group)
        return Local(local.state, local.upload, {})

    def aggregate(self, server: Any, reports: Iterable[Report[Any]], ctx: ServerContext) -> Any:
        """As the method does, by any rule: what clients sent needs no more protection."""
        asked = self.cohort_of(ctx.setup, ctx.exchange)
        ledger = Ledger(ctx.workspace())
        # an answer that was lost on its way, or refused, may have been seen by somebody
        marks = dict.fromkeys(asked, "" if self.repeats(ctx.setup) else token_hex())

        def marked() -> Iterator[Report[Any]]:
            for report in reports:
                if report.client in marks:
                    marks[report.client] = digest(report.upload)
                else:  # the mean of all, opened under masks
                    marks.update(dict.fromkeys(marks, digest(report.upload)))
                yield report

        state = self.inner.aggregate(server, marked(), ctx)
        ledger.add(
            ctx.exchange.index,
            ((client, mark, self.release(ctx.setup, client)) for client, mark in marks.items()),
        )
        ctx.metrics["epsilon"] = ledger.epsilon(self.delta(ctx.setup))
        return state


@dataclass(frozen=True)
class _Sample(Batch):
    """A step's sample: its views are drawn once for all, and given out by unit."""

    size: int  # images per unit
    drawn: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    taken: list[bool] = field(default_factory=list)  # whether a step was made on it

    def views(self, n: int = 2) -> tuple[Tensor, ...]:
        """The same ``n`` views, each b×C×S×S, whenever they are asked for."""
        if n not in self.drawn:
            self.drawn[n] = self.augment.views(self.pixels, n)
        return self.drawn[n]

    def units(self) -> Iterator[Batch]:
        """The units one by one."""
        for start in range(0, len(self.pixels), self.size):
            rows = slice(start, start + self.size)
            labels = None if self.labels is None else self.labels[rows]
            yield _Unit(self.pixels[rows], self.index[rows], labels, self.augment, self, rows)


@dataclass(frozen=True)
class _Unit(Batch):
    """One record, or one group, of a sample."""

    sample: _Sample
    rows: slice

    def views(self, n: int = 2) -> tuple[Tensor, ...]:
        """Its rows of the sample's views."""
        return tuple(view[self.rows] for view in self.sample.views(n))


@dataclass(kw_only=True)
class _NoisyContext(ClientContext):
    """A client's side whose batches are Poisson samples and whose optimiser adds noise."""

    release: Release
    privacy: PrivacySettings
    places: int
    stream: Noise
    drawn: int = 0  # samples so far: no more than are accounted for

    def batches(
        self, epochs: int | None = None, *, shuffle: bool = True, counted: bool = True
    ) -> Iterator[Batch]:
        """The samples of a round's steps; some may be empty."""
        if epochs is not None or not shuffle or not counted:
            raise FurlongError("privacy.level = record: the method looks at its images elsewhere.")
        size, device = self.privacy.group, self.setup.device
        for _ in range(self.release.count):
            if self.drawn == self.release.count:
                raise FurlongError(
                    "privacy.level = record: the method goes through the client's images more "
                    f"often than the budget counts, in {plural(self.drawn, 'step')}."
                )
            self.drawn += 1
            count = len(self.data)
            order = torch.arange(count) if size == 1 else self.stream.order(count)
            chosen = self.stream.uniform(self.places) < self.release.sampling
            index = order[: self.places * size].view(-1, size)[chosen].flatten()
            labels = self.data.labels(index)
            yield _Sample(
                self.data.pixels(index).to(device),
                index,
                None if labels is None else labels.to(device),
                self.setup.augment,
                size,
            )

    def batches_of(self, data: Shard, *arguments: Any, **options: Any) -> Iterator[Batch]:
        """Not of the client's own images."""
        if data is self.data:
            raise FurlongError("privacy.level = record: the method looks at its images elsewhere.")
        return super().batches_of(data, *arguments, **options)

    def optimiser(self, *modules: nn.Module) -> Optimiser:
        """Refuses modules that keep anything of the images beside their parameters."""
        for module in modules:
            kept = module.state_dict().keys() - dict(module.named_parameters()).keys()
            if kept:
                raise FurlongError(
                    f"privacy.level = record: {sorted(kept)[0]} of the network is no parameter, so "
                    "no noise covers what it keeps of the images (BatchNorm does that). Use "
                    "--model.early-norm all_gn, or another encoder."
                )
        return super().optimiser(*modules)

    def new_optimiser(
        self, parameters: list[nn.Parameter], features: list[Tensor] | None
    ) -> Optimiser:
        """One that adds noise."""
        if features is not None:
            raise FurlongError(
                "privacy.level = record: optimiser.decorrelation is a number of the whole batch, "
                "which one image can change without bound. Set it to 0."
            )
        return NoisyOptimiser(self, parameters)


class NoisyOptimiser(Optimiser):
    """Steps on clipped gradients of single units, with noise on their sum."""

    def __init__(self, ctx: _NoisyContext, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, ctx.setup.optimiser, ctx.learning_rate)
        self._trained = [p for p in parameters if p.requires_grad]
        self._clip, self._stream = ctx.privacy.clip, ctx.stream
        self._noise = ctx.release.noise * self._clip
        self._expected = ctx.release.sampling * ctx.places

    def step(self, loss: Tensor) -> None:  # noqa: ARG002
        """Refused: a loss of the whole batch has no gradients of single images."""
        raise FurlongError(
            "privacy.level = record: the method steps on the loss of a whole batch. It must call "
            "optimiser.descend(loss_of, batch)."
        )

    def descend(self, loss_of: Callable[[Batch], Tensor], batch: Batch) -> None:
        """A step on the noisy mean of the units' clipped gradients."""
        if not isinstance(batch, _Sample) or batch.taken:
            raise FurlongError("privacy.level = record: a step needs a sample of its own.")
        batch.taken.append(True)
        sums = clipped_sum(loss_of, batch.units(), self._trained, self._clip)
        for parameter, total in zip(self._trained, sums, strict=True):
            noise = self._noise * self._stream.normal(total.shape).to(total.device)
            # fused kernels pair elements by memory offset: a gradient needs its weight's layout
            parameter.grad = torch.empty_like(parameter).copy_((total + noise) / self._expected)
        self.torch.step()
        self.torch.zero_grad(set_to_none=True)  # as large as the weights

    def metrics(self) -> dict[str, float]:
        """None: a mean loss is not covered."""
        return {}


def clipped_sum(
    loss_of: Callable[[Batch], Tensor],
    units: Iterable[Batch],
    parameters: list[nn.Parameter],
    clip: float,
) -> list[Tensor]:
    """Σ over units of their gradient, each cut to the length ``clip``; float64, by parameter.

    One unit after the other: on a CPU that is as fast as torch.func.vmap, and no operation of a
    method, nor a norm of its network, can mix two units. A gradient with NaN or infinity counts as
    zero.
    """
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for unit in units:
        found = torch.autograd.grad(loss_of(unit), parameters, allow_unused=True)
        gradients = [(s, g) for s, g in zip(sums, found, strict=True) if g is not None]
        lengths = [torch.linalg.vector_norm(g, dtype=torch.float64) for _, g in gradients]
        scale = cut(float(torch.stack(lengths).norm()), clip) if lengths else 0.0
        if scale:
            for total, gradient in gradients:
                total.add_(gradient, alpha=scale)
    return sums
