"""The settings of a run as options of a command, made from the facts at their fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

from cyclopts import Group, Parameter

from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.runs.config import SHORT, all_facts, full_name, sections
from furlong.settings import Fact, facts

Command = Callable[..., None]
Choice = Callable[[str, Fact], bool]
FIELDS = "method__"  # the argument with a method's own fields


def in_sections(*names: str) -> Choice:
    """The settings of some sections, or single ones."""
    return lambda name, _: name in names or name.split(".")[0] in names


def with_settings(shown: Choice = lambda *_: True) -> Callable[[Command], Command]:
    """Let a command take settings as options; it gets those that were given as ``settings``.

    Its help shows the settings that are ``shown``; the others have no effect there and are refused.
    Values stay as they were typed: they are read by ``config.from_tree``, as those of a file are.
    """

    def decorate(command: Command) -> Command:
        own = dict(inspect.signature(command, eval_str=True).parameters)
        own.pop("settings")

        @functools.wraps(command, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        def call(*arguments: Any, **options: Any) -> None:
            given = {name: value for name, value in options.items() if name in own}
            settings = {
                name.replace("__", "."): value
                for name, value in options.items()
                if name not in own and name != FIELDS and value is not None
            }
            fields = {f"method.{key}": v for key, v in (options.get(FIELDS) or {}).items()}
            _refuse({**settings, **fields}, shown, command.__name__)
            command(*arguments, **given, settings={**settings, **fields})

        taken = (option for option in _options(shown) if option.name not in own)
        call.__signature__ = inspect.Signature([*own.values(), *taken])  # type: ignore[attr-defined]
        return call

    return decorate


def _refuse(given: Iterable[str], shown: Choice, command: str) -> None:
    """A setting that would be passed over is an error: somebody relies on it."""
    for option in given:
        name = full_name(option)
        fact = all_facts().get(name, all_facts()["method.name"])  # a method's own field
        if not shown(name, fact):
            words = option.replace("_", "-")
            raise FurlongError(f"--{words} cannot be given to furlong {command}: see its --help.")


def _options(shown: Choice) -> Iterator[inspect.Parameter]:
    """Short options, then every key of every section, then methods' own fields."""
    known = all_facts()
    for short, name in SHORT.items():
        fact = known[name]
        kind = bool if fact.kind is bool else str  # --strict CONFIG: the file is no value of it
        show, metavar = shown(name, fact), _metavar(fact)
        yield _option(short, kind, short, help=fact.help, show=show, metavar=metavar)
    for place, (section, cls) in enumerate(sections().items(), 1):
        group = Group(section, help=cls.__doc__ or "", sort_key=place)
        for fact in facts(cls):
            name = f"{section}.{fact.name}"
            yield _option(
                name.replace(".", "__"),
                str | bool if fact.kind is bool else str,  # bool: may stand without a value
                name,
                help=f"{fact.help} [{fact.values}]" if fact.choices else fact.help,
                group=group,
                show=shown(name, fact),
                show_default=lambda _, usual=fact.usual: usual,
                metavar=_metavar(fact),
            )
    for key in sorted(
        {f.name for row in METHODS.values() for f in facts(row.cls) if f.kind is bool}
    ):
        yield _option(f"method__{key}", str | bool, f"method.{key}", show=False)
    yield _option(FIELDS, dict[str, str], "method", show=False)


def _option(identifier: str, kind: Any, name: str, **more: Any) -> inspect.Parameter:
    about = Parameter(
        name=f"--{name.replace('_', '-')}",
        negative=(),
        allow_repeating=True,
        **{"show_default": False, **more},
    )
    return inspect.Parameter(
        identifier,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, about],
    )


def _metavar(fact: Fact) -> str:
    """What stands for the value in a help text."""
    return "WORD" if fact.choices else fact.values.removesuffix(" | none").upper()
