"""The table of fields, the nearest key, and what changed between two configurations."""

from typing import Literal

import pytest

from conf.schema import NO_DEFAULT, Difference, accepts, complete, differences, fields, nearest, paths, plain
from conf.typed import config, setting
from tests.conf.sections import Alibi, Model, Optim, Root, Source


def test_every_field_is_in_the_table_with_its_type_default_and_rule() -> None:
    rows = [(f.path, f.type, f.default, f.on_resume, f.variant) for f in fields(Root)]
    assert rows == [
        ("name", "str", "run", "free", None),
        ("model.width", "int", 64, "must_equal", None),
        ("model.tied", "bool", True, "must_equal", None),
        ("model.window", "int | null", None, "must_equal", None),
        ("model.position.kind", "rope | alibi", "rope", "must_equal", None),
        ("model.position.base", "float", 10000.0, "must_equal", "kind=rope"),
        ("model.position.scale", "float", 1.0, "free", "kind=rope"),
        ("model.position.slope", "float", 8.0, "must_equal", "kind=alibi"),
        ("model.position.scale", "float", 2.0, "free", "kind=alibi"),
        ("optim.lr", "float", 3e-4, "needs_override", None),
        ("optim.betas", "list[float]", [0.9, 0.95], "free", None),
        ("optim.precision", "fp32 | bf16 | null", None, "needs_override", None),
        ("mixture", "dict[str, Source]", {}, "needs_override", None),
        ("mixture.*.path", "str", NO_DEFAULT, "must_equal", None),
        ("mixture.*.weight", "float", 1.0, "needs_override", None),
        ("stages", "list[Source]", [], "free", None),
        ("stages.*.path", "str", NO_DEFAULT, "must_equal", None),
        ("stages.*.weight", "float", 1.0, "needs_override", None),
    ]  # fmt: skip


@config
class Shared:
    scale: float = setting(1.0, on_resume="free", help="scale")


@config
class First(Shared):
    kind: Literal["first", "one"] = setting("first", on_resume="must_equal", help="which")


@config
class Second(Shared):
    kind: Literal["second"] = setting("second", on_resume="must_equal", help="which")


@config
class Both:
    choice: First | Second = setting(factory=Second, on_resume="free", help="choice")


def test_what_all_variants_share_is_one_row() -> None:
    assert [(f.path, f.type, f.default, f.variant) for f in fields(Both)] == [
        ("choice.kind", "first | one | second", "second", None),
        ("choice.scale", "float", 1.0, None),
    ]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("optim.lrr", "optim.lr"),
        ("lr", "optim.lr"),
        ("model.lr", "optim.lr"),
        ("otpim.lr", "optim.lr"),
        ("model.positoin.base", "model.position.base"),
        ("model.base", "model.position.base"),
        ("stages.0.weigth", "stages.*.weight"),
        ("qqqq", None),
    ],
)
def test_the_nearest_key(path: str, meant: str | None) -> None:
    assert nearest(path, paths(Root)) == meant


@pytest.mark.parametrize(
    "path", ["model", "model.position.slope", "mixture.any.weight", "mixture.any", "stages.0.path"]
)
def test_paths_that_exist(path: str) -> None:
    assert accepts(Root, path)


@pytest.mark.parametrize("path", ["modle", "model.slope", "mixture.any.wieght", "optim.lr.x", "name.x"])
def test_paths_that_do_not_exist(path: str) -> None:
    assert not accepts(Root, path)


def test_completing_fills_defaults_and_keeps_what_is_unknown() -> None:
    full = complete(Root, {"model": {"position": {"kind": "alibi"}, "x": 1}})
    assert full["model"] == {
        "width": 128,
        "tied": True,
        "window": None,
        "position": {"kind": "alibi", "slope": 8.0, "scale": 2.0},
        "x": 1,
    }
    assert full["optim"]["betas"] == [0.9, 0.95]


def test_equal_trees_do_not_differ() -> None:
    assert differences(Root(), Root()) == []
    assert differences(plain(Root()), Root()) == []


def test_each_changed_value_is_named_with_its_rule() -> None:
    old = Root(mixture={"a": Source(path="x"), "b": Source(path="y")})
    new = Root(
        name="y",
        model=Model(width=64),
        optim=Optim(lr=1e-3),
        mixture={"a": Source(path="x", weight=3.0), "c": Source(path="z")},
    )
    assert differences(old, new) == [
        Difference("name", "run", "y", "free"),
        Difference("model.width", 128, 64, "must_equal"),
        Difference("optim.lr", 3e-4, 1e-3, "needs_override"),
        Difference("mixture.a.weight", 1.0, 3.0, "needs_override"),
        Difference("mixture.c", None, {"path": "z", "weight": 1.0}, "needs_override"),
        Difference("mixture.b", {"path": "y", "weight": 1.0}, None, "needs_override"),
    ]


def test_another_variant_is_its_kind_and_what_both_have() -> None:
    old, new = Root(), Root(model=Model(width=128, position=Alibi(slope=3.0, scale=1.0)))
    assert differences(old, new) == [Difference("model.position.kind", "rope", "alibi", "must_equal")]
    other = Root(model=Model(width=128, position=Alibi(scale=4.0)))
    assert differences(old, other)[1:] == [Difference("model.position.scale", 1.0, 4.0, "free")]


def test_a_setting_that_is_newer_than_the_saved_configuration_had_its_default() -> None:
    saved = plain(Root())
    del saved["optim"]["lr"]
    assert differences(saved, Root()) == []
    assert differences(saved, Root(optim=Optim(lr=1.0))) == [
        Difference("optim.lr", 3e-4, 1.0, "needs_override")
    ]


def test_a_setting_that_is_gone_needs_an_override() -> None:
    saved = plain(Root())
    saved["optim"]["momentum"] = 0.9
    assert differences(saved, Root()) == [Difference("optim.momentum", 0.9, None, "needs_override")]
