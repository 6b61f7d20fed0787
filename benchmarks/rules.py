"""What the server's rules cost: CPU seconds of one core to merge the answers of one round.

Ten clients with a ResNet-18 unless told otherwise:

    python benchmarks/rules.py [--smoke] [--clients 10] [--encoder resnet18]
"""

from __future__ import annotations

from functools import partial
from typing import Any, get_args, get_type_hints

import torch
from measuring import medians, parse, parser

from furlong.core.aggregation import Ruling, ServerSettings
from furlong.core.weights import snapshot
from furlong.methods.base import Model
from furlong.nn.encoders import build_encoder


def main() -> None:
    """Print a table of medians."""
    words = parser(__doc__)
    words.add_argument("--clients", type=int, default=10)
    words.add_argument("--encoder", default="resnet18")
    words.add_argument("--repeats", type=int, default=3)
    options = parse(words, clients=2, encoder="small", repeats=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    current = Model(snapshot(build_encoder(options.encoder)))
    answers = [moved(current) for _ in range(options.clients)]
    rules = get_args(get_type_hints(ServerSettings)["rule"])
    works = {rule: partial(merge, ServerSettings(rule=rule), current, answers) for rule in rules}
    for rule, milliseconds in medians(works, options.repeats, warm=0).items():
        print(f"{rule:18} {milliseconds / 1e3:6.2f} s")


def moved(model: Model) -> Model:
    """A client's answer: the weights with a little noise, counters as they are."""
    return Model(
        {
            name: t + 0.01 * torch.randn_like(t) if t.is_floating_point() else t
            for name, t in model.weights.items()
        }
    )


def merge(settings: ServerSettings, current: Model, answers: list[Model]) -> Any:
    """As a server does: one answer after the other."""
    combined = Ruling(settings, {}, "train", print)("average")
    for answer in answers:
        combined.add(answer, 100)
    return combined.onto(current)


if __name__ == "__main__":
    main()
