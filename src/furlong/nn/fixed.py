"""Parts of an encoder that stay as they are.

A fixed tensor is a buffer outside of the state dict. So whatever goes through state dicts and
parameters (what is sent, kept, averaged, trained, moved towards an average) passes it by, and
nobody has to know of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from furlong.errors import FurlongError

_FIXED = "fixed_tensors"  # of a part: own name -> whether it was a parameter


def stages(encoder: nn.Module) -> list[list[str]]:
    """The beginnings of tensors' names from input to output: the stem's, then each stage's.

    Stages are the encoder's containers (``layer1`` to ``layer4`` of a ResNet), the members of its
    only container (the blocks of a transformer), or where it has none its layers one by one. What
    is before them is the stem, what comes after the last belongs to none.
    """
    parts = {name: part for name, part in encoder.named_children() if part.state_dict()}
    lists = {n: p for n, p in parts.items() if isinstance(p, nn.Sequential | nn.ModuleList)}
    if not lists:
        layers: list[list[str]] = []
        for name, part in parts.items():
            if not layers or any(p.dim() > 1 for p in part.parameters()):
                layers.append([])  # a norm belongs to the layer before it
            layers[-1].append(f"{name}.")
        return layers
    stem = [name for name, _ in encoder.named_parameters(recurse=False)]
    for name in parts:
        if name in lists:
            break
        stem.append(f"{name}.")
    if len(lists) > 1:
        return [stem, *([f"{name}."] for name in lists)]
    ((only, members),) = lists.items()
    return [stem, *([f"{only}.{name}."] for name, part in members.named_children())]


def frozen(encoder: nn.Module, freeze: str) -> list[str]:
    """The tensors that ``model.freeze`` names: none, stem, the first k stages, or all."""
    every = list(encoder.state_dict())
    if freeze in ("none", "all"):
        return every if freeze == "all" else []
    found = stages(encoder)
    most = len(found) - 1
    if freeze != "stem" and not (freeze.isdecimal() and int(freeze) <= most):
        raise FurlongError(
            f"model.freeze is {freeze!r}; it must be none, stem, a number of stages or blocks from "
            f"the input on (this {type(encoder).__name__} has {most}), or all."
        )
    count = 1 if freeze == "stem" else 1 + int(freeze)
    starts = tuple(start for stage in found[:count] for start in stage)
    return [name for name in every if name.startswith(starts)]


def fix(module: nn.Module, names: Iterable[str]) -> None:
    """Take the tensors ``names`` out of the state dict; parts that are fixed stay in eval mode.

    So a BatchNorm there uses its running statistics and never changes them.
    """
    touched: set[nn.Module] = set()
    for name in names:
        owner, _, own = name.rpartition(".")
        part = module.get_submodule(owner)
        tensor: Tensor = getattr(part, own)
        vars(part).setdefault(_FIXED, {})[own] = isinstance(tensor, nn.Parameter)
        delattr(part, own)
        part.register_buffer(own, tensor.detach(), persistent=False)
        touched.add(part)
    for part in module.modules():
        if not touched.isdisjoint(part.modules()) and not part.state_dict():
            part.eval()
            part.train = lambda mode=True, part=part: part  # type: ignore[method-assign, misc]  # noqa: ARG005


def keeps_statistics(part: nn.Module) -> bool:
    """Whether ``part`` has been fixed as a whole, so that nobody may estimate its statistics."""
    return "train" in vars(part)


def released(module: nn.Module) -> nn.Module:
    """``module`` itself as it was before :func:`fix`: a plain network with a whole state dict."""
    for part in module.modules():
        vars(part).pop("train", None)
        for own, parameter in vars(part).pop(_FIXED, {}).items():
            tensor: Tensor = getattr(part, own)
            delattr(part, own)
            if parameter:
                part.register_parameter(own, nn.Parameter(tensor))
            else:
                part.register_buffer(own, tensor)
    return module.train(module.training)
