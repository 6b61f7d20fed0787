"""Configurations: strict about names, types and ranges; what is written can be read again."""

from __future__ import annotations

import datetime
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.cli.run import run
from furlong.core.context import OptimiserSettings
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.methods.fedsimclr import FedSimCLR
from furlong.runs import config
from furlong.runs.config import Config, coerce, from_tree, load


def options(**overrides: Any) -> Config:
    """A configuration from overrides; ``__`` stands for a dot."""
    return from_tree({}, {k.replace("__", "."): v for k, v in overrides.items()}, "test")


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("tree", "overrides", "words"),
    [
        ({"trian": {"rounds": 3}}, {}, ["mine.toml", "unknown section [trian]", "'train'"]),
        ({"train": {"round": 3}}, {}, ["mine.toml", "unknown key train.round", "'rounds'"]),
        ({"method": {"temprature": 3}}, {}, ["unknown key method.temprature", "'temperature'"]),
        ({"rounds": 3}, {}, ["unknown section [rounds]"]),
        ({"train": 3}, {}, ["train must be a table", "[train]"]),
        ({}, {"clinets": 3}, ["unknown option --clinets", "'clients'"]),
        ({}, {"batchsize": 3}, ["unknown option --batchsize", "'batch-size'"]),
        ({}, {"optimizer.lr": 3}, ["unknown option --optimizer.lr", "'optimiser'"]),
        ({}, {"optimiser.lrr": 3}, ["unknown key optimiser.lrr", "'lr'"]),
        ({}, {"optimiser.": 3}, ["unknown key optimiser."]),
        ({}, {"": 3}, ["unknown option --", "Valid:"]),
        ({}, {"method": "fedemma"}, ["unknown method 'fedemma'", "'fedema'"]),
        ({}, {"method": "fedsimclr", "method.threshold": 1}, ["method.threshold", "temperature"]),
    ],
)
def test_unknown_names_are_errors_with_the_nearest_valid_one(
    tree: Any, overrides: Any, words: list[str]
) -> None:
    with pytest.raises(FurlongError) as caught:
        from_tree(tree, overrides, "mine.toml")
    for word in words:
        assert word in str(caught.value)


def test_short_options_are_those_of_the_command() -> None:
    assert set(config.SHORT) < set(inspect.signature(run).parameters)
    given = {"strict": "yes", "engine": "inprocess", "bound": "single", "insecure": "yes"}
    given |= {"method": "fedema", "secure": "yes"}
    for short, dotted in config.SHORT.items():
        value = given.get(short, "2" if short != "fraction" else "0.5")
        more = {"run.engine": "flower"} if short == "superlink" else {}
        ours, theirs = {short: value, **more}, {dotted: value, **more}
        assert from_tree({}, ours, "x") == from_tree({}, theirs, "x")


def test_dashes_and_underscores_are_the_same() -> None:
    wanted = options(batch_size=16, optimiser__weight_decay=0.5)
    assert from_tree({}, {"batch-size": 16, "optimiser.weight-decay": 0.5}, "x") == wanted
    assert wanted.train.batch_size == 16


def test_options_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[train]\nrounds = 7\nepochs = 3\n[method]\nname = "fedema"\ntau = 0.5\n')
    found = load(path, {"rounds": "9", "method.tau": "0.25"})
    assert (found.train.rounds, found.train.epochs) == (9, 3)
    assert (found.method["name"], found.method["tau"]) == ("fedema", 0.25)


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, 3, 3),
        (int, "3", 3),
        (int, "-3", -3),
        (int, 3.0, 3),
        (float, 3, 3.0),
        (float, "3", 3.0),
        (float, "1e-3", 1e-3),
        (float, "inf", math.inf),
        (float, math.inf, math.inf),
        (bool, True, True),
        (bool, "Yes", True),
        (bool, "on", True),
        (bool, "1", True),
        (bool, "off", False),
        (bool, "FALSE", False),
        (bool, 0, False),
        (str, "3", "3"),
        (str, Path("a/b"), "a/b"),
        (str | None, "None", None),
        (str | None, None, None),
        (str | None, "x", "x"),
        (int | None, "none", None),
        (int | None, "3", 3),
        (int | str, "3", 3),
        (int | str, "three", "three"),
        (Literal["sgd", "adam"], "adam", "adam"),
        (Literal[1, 2], "2", 2),
        (tuple[int, ...], "1,2", (1, 2)),
        (tuple[float, ...], [1, 2.5], (1.0, 2.5)),
    ],
)
def test_coerce(hint: Any, value: Any, expected: Any) -> None:
    found = coerce(hint, value, "a.b")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value", "words"),
    [
        (int, 3.5, "whole number"),
        (int, "3.5", "whole number"),
        (int, "three", "whole number"),
        (int, True, "whole number"),
        (int, math.nan, "whole number"),
        (int, math.inf, "whole number"),
        (int, None, "whole number"),
        (int, [3], "whole number"),
        (float, "fast", "a number"),
        (float, True, "a number"),
        (float, None, "a number"),
        (float, 10**400, "a number"),
        (bool, "maybe", "true or false"),
        (bool, 2, "true or false"),
        (bool, None, "true or false"),
        (str, 3, "not str"),
        (str, None, "not str"),
        (int | None, "many", "whole number"),
        (Literal["sgd", "adam"], "adams", "Did you mean 'adam'"),
        (Literal["sgd", "adam"], None, "Valid: adam, sgd"),
        (tuple[int, ...], "1,x", "whole number"),
        (tuple[int, ...], 1, "not"),
    ],
)
def test_coerce_refuses(hint: Any, value: Any, words: str) -> None:
    with pytest.raises(FurlongError) as caught:
        coerce(hint, value, "train.thing")
    assert "train.thing" in str(caught.value)
    assert words in str(caught.value)


def test_nan_stays_nan_where_a_number_is_asked() -> None:
    assert math.isnan(coerce(float, "nan", "a.b"))


HINTS = [
    int,
    float,
    bool,
    str,
    int | None,
    float | None,
    str | None,
    int | str,
    Literal["a", "b"],
    Literal["a", "b"] | None,
    tuple[int, ...],
    tuple[str, ...] | None,
]
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["none", "true", "1", "1.0", "nan", "inf", "1e999", "1_0", "a", "a,b"])
    | st.dates()
    | st.datetimes()
    | st.binary(max_size=4)
)
values = st.recursive(
    leaves,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=5,
)


def fits(hint: Any, value: Any) -> bool:
    """Whether ``value`` has the annotated type."""
    if hint in (int, float, bool, str):
        return type(value) is hint
    if hint is type(None):
        return value is None
    inner = hint.__args__
    if getattr(hint, "__origin__", None) is Literal:
        return value in inner
    if getattr(hint, "__origin__", None) is tuple:
        return isinstance(value, tuple) and all(fits(inner[0], v) for v in value)
    return any(fits(each, value) for each in inner)


@settings(max_examples=200, deadline=None)
@given(hint=st.sampled_from(HINTS), value=values)
def test_coerce_gives_the_type_or_a_furlong_error(hint: Any, value: Any) -> None:
    try:
        found = coerce(hint, value, "a.b")
    except FurlongError as error:
        assert "a.b" in str(error)  # noqa: PT017
    else:
        assert fits(hint, found)


names = st.sampled_from(
    [*config.SHORT, "optimiser.lr", "evaluate.k", "method.decay", "a", "a.b", "data.x", "data."]
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, values.filter(lambda v: not (isinstance(v, str) and ":" in v))))
def test_any_overrides_give_a_configuration_or_a_furlong_error(overrides: dict[str, Any]) -> None:
    try:
        found = from_tree({}, overrides, "test")
    except FurlongError as error:
        assert str(error)  # noqa: PT017
    else:
        assert isinstance(found, Config)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["train", "data", "method", "x"]), values))
def test_any_tree_gives_a_configuration_or_a_furlong_error(tree: dict[str, Any]) -> None:
    try:
        from_tree(tree, {}, "test")
    except FurlongError as error:
        assert str(error)  # noqa: PT017


# ---------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("rounds", 0, 1),
        ("epochs", 0, 1),
        ("batch_size", 1, 2),
        ("clients", 0, 1),
        ("workers", -1, 0),
        ("run.save_every", 0, 1),
        ("run.deadline", -1, 0),
        ("run.deadline", math.nan, 0.5),
        ("run.deadline", math.inf, 1e9),
        ("train.min_clients", -1, 0),
        ("evaluate.k", -1, 0),
        ("evaluate.knn_every", -1, 0),
        ("evaluate.monitor_images", 0, 1),
        ("fraction", 0, 1),
        ("fraction", 1.01, 0.01),
        ("fraction", math.nan, 0.5),
        ("optimiser.lr", 0, 1e-9),
        ("optimiser.lr", -0.1, 0.1),
        ("optimiser.lr", math.nan, 0.1),
        ("optimiser.momentum", 2, 0),
        ("optimiser.momentum", 1, 0.999),
        ("optimiser.momentum", -0.1, 0.9),
        ("optimiser.momentum", math.nan, 0.9),
        ("optimiser.weight_decay", -1, 0),
        ("optimiser.weight_decay", math.nan, 0.1),
        ("optimiser.weight_decay", math.inf, 0.1),
    ],
)
def test_ranges(name: str, bad: float, good: float) -> None:
    with pytest.raises(FurlongError, match=f"{name.split('.')[-1]} is .*; it must be"):
        from_tree({}, {name: bad}, "test")
    from_tree({}, {name: good}, "test")


@pytest.mark.parametrize(
    ("name", "bad"),
    [("evaluate.temperature", 0), ("evaluate.temperature", -1), ("optimiser.lr", math.inf)],
)
def test_values_that_would_only_give_nonsense_are_refused(name: str, bad: float) -> None:
    with pytest.raises(FurlongError, match=name.split(".")[-1]):
        from_tree({}, {name: bad}, "test")


def test_an_unknown_probe_is_refused_before_training() -> None:
    """Otherwise a run of a week ends with it."""
    with pytest.raises(FurlongError, match="nope"):
        options(evaluate__probe="nope")


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("encoder", ["small", "resnet18"])
@pytest.mark.parametrize("name", METHODS)
def test_toml_round_trip(tmp_path: Path, name: str, encoder: str) -> None:
    path = tmp_path / "config.toml"
    first = options(
        method=name,
        encoder=encoder,
        data="folder:/data/a b/ü\\\"'\n",
        data__images="1000",
        optimiser__lr="1e-7",
        out="runs/größe",
    )
    path.write_text(first.toml(), encoding="utf-8")
    again = load(path)
    assert again == first
    assert again.toml() == first.toml()
    assert again.make_method() == first.make_method()


def test_round_trip_keeps_infinity_and_leaves_none_out(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    first = options(method="fedu", method__threshold="inf")
    path.write_text(first.toml())
    assert load(path) == first
    assert load(path).method["threshold"] == math.inf
    left = re.sub(r'(bound|freeze|adapter|level) = "none"', "", first.toml().lower())
    assert "none" not in left


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[train\nrounds = 3", "not a TOML file"),
        (b"train: {rounds: 3}", "not a TOML file"),
        (b"\xff\xfe\x00", "not a TOML file"),
        (b"[train]\nrounds = 3\nrounds = 4", "not a TOML file"),
        (b"[train]\nrounds = 1979-05-27", "whole number"),
        (b"[train]\nrounds = 2.5", "whole number"),
        (b'[data]\nstrict = "perhaps"', "true or false"),
        (b"[method]\nname = 3", "unknown method '3'"),
        (b"[[train]]\nrounds = 3", "must be a table"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(FurlongError, match=words):
        load(path)


def test_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "no.toml", tmp_path):
        with pytest.raises(FurlongError, match="cannot read"):
            load(path)


def test_dates_are_no_values() -> None:
    with pytest.raises(FurlongError, match="not str"):
        from_tree({"data": {"name": datetime.date(2024, 1, 1)}}, {}, "x")


# ---------------------------------------------------------------- methods


def test_a_small_encoder_gets_small_heads_unless_they_are_given() -> None:
    small, large = (options(method="fedu", encoder=name) for name in ("small", "resnet18"))
    assert small.method["projection_head"] == "mlp:256:128:bn"
    assert small.method["prediction_head"] == "mlp:256:128"
    assert large.method["projection_head"] == "easyfl_proj"
    mine = options(method="fedu", encoder="small", method__projection_head="easyfl_proj")
    assert mine.method["projection_head"] == "easyfl_proj"
    assert mine.method["prediction_head"] == "mlp:256:128"
    assert mine.make_method().projection_head == "easyfl_proj"  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", METHODS)
def test_usual_settings_give_way_to_files_and_options(method: str) -> None:
    """Every setting that a class calls usual exists, is taken, and can be changed."""
    row = METHODS[method]
    small = {f"method.{key}": value for key, value in row.cls.usual_small.items()}
    usual = {**row.cls.usual, **small} | {f"method.{k}": v for k, v in row.fields.items()}
    found = asdict(options(method=method))
    assert {name: found[name.split(".")[0]][name.split(".")[1]] for name in usual} == usual
    tree = {"method": {"name": method}, "optimiser": {"lr": 0.5}, "train": {"batch_size": 7}}
    file = from_tree(tree, {}, "file")
    assert (file.optimiser.lr, file.train.batch_size) == (0.5, 7)
    assert file.optimiser.name == row.cls.usual["optimiser.name"]
    assert options(method=method, optimiser__lr="0.25").optimiser.lr == 0.25


def test_the_rate_of_another_optimiser_is_not_the_usual_one() -> None:
    sgd, decoupled = options(optimiser__name="lars"), options(optimiser__name="adamw")
    assert sgd.optimiser == OptimiserSettings(name="lars")
    method = options().method["name"]
    usual = METHODS[method].cls.usual
    if usual["optimiser.name"] == "adam":
        assert decoupled.optimiser.lr == usual["optimiser.lr"]


def test_own_heads_beside_the_small_encoder_stay(own: Callable[[str], str]) -> None:
    """A class of a user's own that says nothing of the small encoder keeps its heads."""
    found = options(
        method=own(PLAIN.replace("    kind:", "    usual_small = {}\n    kind:")), encoder="small"
    )
    assert found.method["projection_head"] == "proj_128"


def test_every_field_is_written_out_in_order() -> None:
    """The order of a set would change with every process."""
    method = options(method="fedbyol").method
    assert next(iter(method)) == "name"
    assert method["predictor"] == "global"
    assert list(method)[1:] == [f.name for f in fields(METHODS["fedbyol"].cls)]


PLAIN = """
from dataclasses import dataclass
from typing import Literal
from furlong.methods.fedsimclr import FedSimCLR

Kind = Literal["a", "b"]

@dataclass(frozen=True)
class Mine(FedSimCLR):
    kind: Kind = "a"
    amount: int | None = None

def function(): ...
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Write a file of the user's; forgotten afterwards."""

    def write(text: str) -> str:
        (tmp_path / "own_method.py").write_text(text)
        return f"{tmp_path / 'own_method.py'}:Mine"

    yield write
    sys.modules.pop("own_method", None)


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_a_users_method(own: Callable[[str], str], future: str, tmp_path: Path) -> None:
    name = own(future + PLAIN)
    found = options(method=name, method__kind="b", method__amount="3", method__temperature="0.2")
    method: Any = found.make_method()
    assert isinstance(method, FedSimCLR)
    assert (method.kind, method.amount, method.temperature) == ("b", 3, 0.2)
    assert found.method["projection_head"] == "mlp:256:128:bn"
    with pytest.raises(FurlongError, match="Valid: a, b"):
        options(method=name, method__kind="c")
    with pytest.raises(FurlongError, match="'amount'"):
        options(method=name, method__amuont="1")
    path = tmp_path / "config.toml"
    path.write_text(found.toml())
    assert load(path) == found


def test_what_is_not_a_method_is_refused(own: Callable[[str], str], tmp_path: Path) -> None:
    own(PLAIN)
    here = tmp_path / "own_method.py"
    for name, words in (
        (f"{here}:Nine", "'Mine'"),
        (f"{here}:function", "not a subclass of furlong.Method"),
        (f"{tmp_path / 'other.py'}:Mine", "cannot import"),
        ("no_such_module:Mine", "cannot import"),
        ("pathlib:Path", "not a subclass of furlong.Method"),
        (":Mine", "cannot import"),
    ):
        with pytest.raises(FurlongError, match=words):
            options(method=name)


def test_a_file_with_a_syntax_error_is_named(own: Callable[[str], str]) -> None:
    with pytest.raises(FurlongError, match=r"own_method\.py"):
        options(method=own("class Mine(:\n"))


def test_another_method_drops_the_files_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[method]\nname = "fedu"\nthreshold = 0.2\n')
    assert load(path, {"method": "fedu"}).method["threshold"] == 0.2
    assert "threshold" not in load(path, {"method": "fedsimclr"}).method


def test_an_earlier_run_keeps_what_its_method_did_then() -> None:
    """A field that is newer than the run has the class's default, not what is usual now."""
    tree = {"method": {"name": "fedsimsiam"}}
    assert from_tree(tree, {}, "file").make_method().predictor_steps == 10
    then = from_tree(tree, {"train.rounds": 3}, "run", whole=True)
    assert then.make_method().predictor_steps == 0
    assert then.optimiser.name == "sgd"
    other = from_tree(tree, {"method": "fedmoco"}, "run", whole=True)
    assert other.optimiser.name == "adam"
