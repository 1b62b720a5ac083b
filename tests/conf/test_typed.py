"""The door: what is accepted, as what, and how what is wrong is told."""

import dataclasses
from typing import Any

import pytest

from conf.schema import plain
from conf.typed import InvalidConfiguration, parse
from tests.conf.sections import Alibi, Model, Optim, Root, Rope, Source


def refused(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidConfiguration) as caught:
        parse(Root, raw)
    return [str(problem) for problem in caught.value.problems]


def test_nothing_given_is_the_defaults_of_the_sections() -> None:
    assert parse(Root, {}) == Root()
    assert parse(Root, {}).model.width == 128


def test_what_the_field_has_as_default_stays_when_a_part_is_given() -> None:
    assert parse(Root, {"model": {"tied": False}}).model == Model(width=128, tied=False)


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", ".0001", 1e-4])
def test_one_float_in_every_spelling(text: Any) -> None:
    assert parse(Root, {"optim": {"lr": text}}).optim.lr == 0.0001


def test_a_member_of_a_union_is_chosen_by_kind() -> None:
    tree = parse(Root, {"model": {"position": {"kind": "alibi", "slope": 4}}})
    assert tree.model.position == Alibi(slope=4.0, scale=2.0)
    assert isinstance(tree.model.position.slope, float)
    assert parse(Root, {"model": {"position": {"base": 5e5}}}).model.position == Rope(base=500000.0)


def test_sections_in_lists_and_dictionaries() -> None:
    tree = parse(Root, {"mixture": {"a": {"path": "x", "weight": 2}}, "stages": [{"path": "y"}]})
    assert tree.mixture == {"a": Source(path="x", weight=2.0)}
    assert tree.stages == [Source(path="y")]


@pytest.mark.parametrize("value", [1e9, 1000000000, "1000000000"])
def test_a_whole_number_in_every_spelling(value: Any) -> None:
    width = parse(Root, {"model": {"width": value}}).model.width
    assert width == 1000000000 and isinstance(width, int)


def test_a_number_may_be_a_name() -> None:
    assert parse(Root, {"name": 7}).name == "7"


def test_the_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse(Root, {}).model.width = 3  # type: ignore[misc]


def test_plain_values_come_back_as_the_same_tree() -> None:
    tree = Root(
        name="x",
        model=Model(width=6, tied=False, window=3, position=Alibi(slope=1.5)),
        optim=Optim(lr=1e-5, precision="bf16"),
        mixture={"a": Source(path="p")},
        stages=[Source(path="q", weight=0.5)],
    )
    assert parse(Root, plain(tree)) == tree


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"optm": {}}, "optm: no such key; the nearest is optim"),
        ({"optim": {"lrr": 1}}, "optim.lrr: no such key; the nearest is optim.lr"),
        ({"lr": 1}, "lr: no such key; the nearest is optim.lr"),
        ({"model": {"lr": 1}}, "model.lr: no such key; the nearest is optim.lr"),
        ({"optim": {"width": 1}}, "optim.width: no such key; the nearest is model.width"),
        (
            {"model": {"position": {"bsae": 1}}},
            "model.position.bsae: no such key; the nearest is model.position.base",
        ),
        (
            {"mixture": {"a": {"path": "x", "wieght": 1}}},
            "mixture.a.wieght: no such key; the nearest is mixture.a.weight",
        ),
        ({"zzzz": 1}, "zzzz: no such key; at the top there are name, model, optim, mixture, stages"),
        ({"optim": {"lr": {"peak": 1}}}, "optim.lr.peak: no such key; optim.lr is one value (float)"),
        ({"model": {"width": 1.5}}, "model.width: 1.5 is not a whole number"),
        ({"model": {"width": "wide"}}, "model.width: 'wide' is not a whole number"),
        ({"model": {"width": True}}, "model.width: True is not a whole number"),
        ({"model": {"window": "x"}}, "model.window: 'x' is not a whole number or null"),
        ({"model": {"width": None}}, "model.width: None is not a whole number"),
        ({"model": {"tied": "yes please"}}, "model.tied: 'yes please' is not true or false"),
        ({"optim": {"lr": False}}, "optim.lr: False is not a number such as 0.1 or 1e-4"),
        (
            {"optim": {"precision": "bf61"}},
            "optim.precision: 'bf61' is not one of fp32, bf16; the nearest is bf16",
        ),
        (
            {"model": {"position": {"kind": "ropee"}}},
            "model.position.kind: 'ropee' is not one of rope, alibi; the nearest is rope",
        ),
        (
            {"model": {"position": {"slope": 3}}},
            (
                "model.position.slope belongs to model.position.kind=alibi, but it is rope; leave it out or "
                "choose that"
            ),
        ),
        (
            {"model": 3},
            "model: 3 is not a section; give its keys: model.width, model.tied, model.window, model.position",
        ),
        ({"model": {"width": 7}}, "model.width (7) must be even; use 8"),
        ({"stages": [{}]}, "stages.0.path must be given: stages.0.path=VALUE (where)"),
        ({"mixture": [1]}, "mixture: [1] is not a dict; give mixture={NAME: {...}, ...}"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(raw: dict[str, Any], message: str) -> None:
    assert refused(raw) == [message]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "-inf"])
def test_no_setting_is_without_bounds(value: Any) -> None:
    (message,) = refused({"optim": {"lr": value}})
    assert message.startswith("optim.lr: ") and "finite number" in message


def test_a_wrong_item_of_a_list_is_named() -> None:
    (message,) = refused({"optim": {"betas": [0.9, "x"]}})
    assert message.startswith("optim.betas: [0.9, 'x'], item 1: ") and message.endswith("give list[float]")


def test_every_error_is_listed_in_one_message() -> None:
    raw = {"optim": {"lrr": 1, "lr": "fast"}, "model": {"width": 7}, "nme": "x"}
    assert refused(raw) == [
        "nme: no such key; the nearest is name",
        "model.width (7) must be even; use 8",
        "optim.lrr: no such key; the nearest is optim.lr",
        "optim.lr: 'fast' is not a number such as 0.1 or 1e-4",
    ]
    with pytest.raises(InvalidConfiguration) as caught:
        parse(Root, raw)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "4 errors in the configuration: nme, model, optim.lrr, optim.lr"
    assert second == "  nme: no such key; the nearest is name"


def test_the_file_that_gave_a_wrong_value_is_named() -> None:
    with pytest.raises(ValueError, match=r"optim\.lr: 'x' is not .* \(in presets/fast\.yaml\)"):
        parse(Root, {"optim": {"lr": "x"}}, {"optim.lr": "presets/fast.yaml"})
