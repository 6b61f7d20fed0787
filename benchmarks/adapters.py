"""What averaging adapters costs in exactness: A and B apart, their products, or B alone.

An encoder is learnt on drawn figures, then goes on with adapters (lora:RANK) on other figures of
clients with two classes each. Per way of averaging: how far the server's B·A is from the mean of
the clients' B·A (relative, mean over rounds and layers), the accuracy, the bytes of an upload.

    python benchmarks/adapters.py [--smoke] [--rank 4] [--rounds 20] [--images 2000]
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from measuring import parse, parser
from torch import Tensor

from furlong.core.method import Report
from furlong.core.payload import flatten
from furlong.evaluation.protocol import Images
from furlong.nn.lora import A, B, product
from furlong.runs import config, loop
from furlong.runs.encoders import encoders
from furlong.runs.prepare import Prepared, prepare
from furlong.runs.results import final_rows


def main() -> None:
    """Print a table."""
    words = parser(__doc__)
    words.add_argument("--rank", type=int, default=4)
    words.add_argument("--rounds", type=int, default=20)
    words.add_argument("--images", type=int, default=2000)
    options = parse(words, rank=1, rounds=1, images=80)
    common = {
        "method": "fedsimclr",
        "rounds": options.rounds,
        "data.images": options.images,
        "data.test_images": options.images // 4,
    }
    with tempfile.TemporaryDirectory() as folder:
        begun = {**common, "partition": "iid", "seed": 100, "out": f"{folder}/begun"}
        loop.run(config.load(None, {**begun, "evaluate.probe": "none"}))
        common |= {"seed": 101, "init": f"{folder}/begun"}
        adapted = {**common, "model.adapter": f"lora:{options.rank}"}
        runs: dict[str, dict[str, Any]] = {
            "initial weights": {**common, "rounds": 1},
            "all weights": common,
            **{
                f"lora:{options.rank}, {way}": {**adapted, "model.adapter_average": way}
                for way in ("factors", "products", "freeze_a")
            },
        }
        print(f"{'':24} {'error of B·A':>12} {'kNN %':>6} {'linear %':>8} {'upload':>12}")
        for name, settings in runs.items():
            error, accuracies, size = measure(
                prepare(config.load(None, settings)), train=name != "initial weights"
            )
            numbers = " ".join(f"{100 * value:7.1f}" for value in accuracies)
            print(f"{name:24} {error:12.2g} {numbers} {size:10,d} B", flush=True)


def measure(prepared: Prepared, train: bool) -> tuple[float, list[float], int]:
    """The mean error of the merged products, accuracies of kNN and probe, bytes of an upload."""
    server, uploads, errors = prepared.server, list[Report[Any]](), list[float]()
    server.watch = lambda _, report: uploads.append(report)
    state, size = server.init(), 0
    with prepared.engine() as engine:
        for result in server.run(engine, state) if train else ():
            state = result.server
            size = result.up.params // len(uploads)
            errors += distances(prepared, state, uploads)
            uploads.clear()
    images = Images(prepared.train, prepared.test, prepared.setup.augment, prepared.setup.seed)
    rows = final_rows(prepared.config.evaluate, images, encoders(prepared, state), {})
    mean = sum(errors) / len(errors) if errors else 0.0
    return mean, [row["accuracy"] for row in rows], size


def distances(prepared: Prepared, state: Any, uploads: list[Report[Any]]) -> list[float]:
    """‖B·A - mean of B_k·A_k‖ / ‖mean‖ of every layer."""
    found, total = [], sum(report.examples for report in uploads)
    merged = products(prepared, flatten(state)[0])
    sent = [(r.examples / total, products(prepared, flatten(r.upload)[0])) for r in uploads]
    for name, value in merged.items():
        mean = torch.stack([weight * each[name] for weight, each in sent]).sum(0)
        found.append(float((value - mean).norm() / mean.norm()))
    return found


def products(prepared: Prepared, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """B·A by layer; an A that is fixed is not among ``tensors``, but everybody has the same."""
    given = prepared.setup.given
    if given is None or given.adapter == "none":
        return {}
    fixed = prepared.server.networks.get(
        "adapters", lambda: prepared.server.context(prepared.server.exchanges()[0]).encoder(),
        prepared.setup.device,
    )  # fmt: skip
    found = {}
    for name, b in tensors.items():
        if name.endswith(B):
            layer = name.removesuffix(f".{B}").rpartition("backbone.")[2]
            a = tensors.get(name.removesuffix(B) + A)
            if a is None:
                a = fixed.get_submodule(f"{layer}.lora_A").get_buffer("weight")
            found[layer] = product(a.double(), b.double())
    return found


if __name__ == "__main__":
    main()
