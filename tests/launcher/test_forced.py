"""Forms that are forced and could have no effect: refused at every door, with the setting and the way out."""

from pathlib import Path
from typing import Any

import pytest

from conf.typed import InvalidConfiguration, parse
from launcher import __main__ as command_line
from launcher.config import Config, plan
from launcher.opening import trained_with
from launcher.plan.command import Plan, PlannedSplit
from megamodel.config import Model
from megamodel.forced import not_in_8_bit, not_in_flex, not_in_groups
from megamodel.kernels.config import Kernels
from megamodel.model import Transformer
from megamodel.moe import Experts
from megamodel.position import Position
from parallel.config import Parallel

SMALL = {
    "vocab_size": 97,
    "d_model": 32,
    "n_layers": 1,
    "attention": {"n_heads": 2, "n_kv_heads": 1, "head_width": 16},
}
NARROW = {"n_heads": 4, "n_kv_heads": 2, "head_width": 8}
ODD = {"kind": "routed", "d_ff": 100}
LATENT = {"kind": "latent", "n_heads": 4, "nope_width": 32, "rope_width": 16, "value_width": 8}
BIAS = "added to the scores, which flex_attention has no form of; use kernels.attention=auto"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"attention": "flex"}, {"position": {"kind": "alibi"}}, f"positions of kind alibi are {BIAS}"),
    ({"attention": "flex"}, {"position": {"kind": "buckets"}}, f"positions of kind buckets are {BIAS}"),
    ({"attention": "flex"}, {"position": {"kind": "relative_keys"}}, BIAS),
    ({"attention": "flex"}, {"position": {"kind": "transformer_xl"}}, BIAS),
    (
        {"attention": "flex"},
        {"dropout": {"attention": 0.1}},
        r"model\.dropout\.attention \(0\.1\) is unknown",
    ),
    ({"attention": "flex"}, {"attention": NARROW}, "heads are 8 wide, and flex_attention needs 16"),
    ({"attention": "flex"}, {"attention": LATENT}, "heads are 8 wide"),
    ({"attention": "sdpa"}, {"attention": {"softcap": 50.0}}, r"no form of model\.attention\.softcap \(50"),
    ({"attention": "sdpa"}, {"attention": {"sinks": True}}, r"no form of model\.attention\.sinks"),
    ({"attention": "sdpa"}, {"dropout": {"attention": 0.1}}, r"no form of model\.dropout\.attention \(0\.1"),
    ({"experts": "grouped"}, {"experts": ODD}, r"model\.experts\.d_ff \(100\) must be a multiple of 8; use"),
    ({"products": "float8"}, {"d_model": 100}, r"model\.d_model is 100; change it or use kernels\.products"),
    ({"products": "float8"}, {"feedforward": {"d_ff": 1000}}, r"model\.feedforward\.d_ff is 1000"),
]
USED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"attention": "auto"}, {"position": {"kind": "alibi"}}),
    ({"attention": "blocked"}, {"dropout": {"attention": 0.1}}),
    ({"attention": "flex"}, {"attention": {"softcap": 50.0, "sinks": True}}),
    ({"attention": "sdpa"}, {"position": {"kind": "alibi"}}),
    (
        {"attention": "flex"},
        {
            "position": {"kind": "alibi"},
            "kinds": {"far": {}, "near": {"window": 8, "position": {"kind": "rope"}}},
            "pattern": ["far", "near"],
        },
    ),
    ({"experts": "grouped"}, {}),
    ({"experts": "grouped"}, {"experts": {"kind": "routed", "d_ff": 104}}),
    ({"experts": "sorted"}, {"experts": ODD}),
    ({"products": "float8"}, {"experts": ODD, "feedforward": {"d_ff": 1000}}),
]


@pytest.mark.parametrize(("kernels", "model", "message"), REFUSED)
def test_what_the_model_could_never_use_is_refused(
    kernels: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    (name,) = kernels
    for root in (Config, Plan):
        with pytest.raises(InvalidConfiguration, match=message) as caught:
            parse(root, {"kernels": kernels, "model": model})
        (problem,) = caught.value.problems
        assert problem.path == f"kernels.{name}" and str(problem).startswith(
            f"kernels.{name}={kernels[name]}"
        )


@pytest.mark.parametrize(("kernels", "model"), USED)
def test_what_some_of_the_model_uses_is_accepted(kernels: dict[str, Any], model: dict[str, Any]) -> None:
    for root in (Config, Plan):
        assert parse(root, {"kernels": kernels, "model": model}).kernels == parse(Kernels, kernels)


def test_8_bit_products_are_those_of_each_rank() -> None:
    raw = {"kernels": {"products": "float8"}, "model": {"feedforward": {"d_ff": 1056}}, "parallel": {"tp": 4}}
    for root in (Config, Plan):
        with pytest.raises(InvalidConfiguration, match=r"d_ff is 1056 over parallel\.tp=4"):
            parse(root, raw)
        assert parse(root, {**raw, "parallel": {"tp": 2}}).kernels.products == "float8"
    experts = {"kind": "routed", "shared_d_ff": 24}
    assert not_in_8_bit(parse(Model, {"experts": experts}), 1) == "model.experts.shared_d_ff is 24"


def test_8_bit_products_need_a_multiple_of_tokens() -> None:
    raw = {"kernels": {"products": "float8"}, "train": {"sequence_length": 24, "micro_batch": 1}}
    with pytest.raises(ValueError, match=r"train\.micro_batch \(1\) x train\.sequence_length \(24\); change"):
        plan(parse(Config, raw), world_size=1, cuda=True)
    raw["train"]["micro_batch"] = 2
    assert plan(parse(Config, raw), world_size=1, cuda=True).batches.micro_batch == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"entropy": "plain"},
            r"^kernels\.entropy=plain would have no effect: kernels\.head=whole .* leave it out",
        ),
        ({"workspace_bytes": 1 << 20}, r"^kernels\.workspace_bytes=1048576 would have no effect"),
        ({"entropy": "triton", "workspace_bytes": 1 << 20}, "entropy=triton and kernels.workspace_bytes="),
    ],
)
def test_a_whole_head_has_no_chunks(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(Kernels, {"head": "whole", **given})
    assert parse(Kernels, {"head": "chunked", **given}).head == "chunked"


@pytest.mark.parametrize("root", [Parallel, PlannedSplit])
def test_every_second_block_of_none_is_refused(root: type) -> None:
    with pytest.raises(
        ValueError, match=r"recompute_every \(2\) has no effect with parallel\.recompute=none"
    ):
        parse(root, {"recompute": "none", "recompute_every": 2})
    for mode in ("block", "attention"):
        assert parse(root, {"recompute": mode, "recompute_every": 2}).recompute_every == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "parallel.recompute_every=2"],
        ["train", "kernels.attention=flex", "model.dropout.attention=0.1"],
        ["plan", "parallel.recompute=none", "parallel.recompute_every=2"],
        ["plan", "kernels.attention=sdpa", "model.attention.softcap=30.0"],
        ["kernels", "hardware.device=cpu", "kernels.head=whole", "kernels.entropy=plain"],
    ],
)
def test_each_command_refuses_what_it_can_know(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line.main(arguments) == 2
    said = capsys.readouterr().err
    assert arguments[-1].split("=")[0].split(".")[-1] in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind",
    ["none", "rope", "sinusoidal", "learned", "alibi", "buckets", "relative_keys", "transformer_xl"],
)
def test_positions_with_a_bias_are_those_whose_modules_give_one(kind: str) -> None:
    model = parse(Model, {**SMALL, "position": {"kind": kind}})
    built = [part for part in Transformer(model, initial=False).modules() if isinstance(part, Position)]
    assert (not_in_flex(model) is not None) == any(part.biases for part in built)


@pytest.mark.parametrize(("width", "inner"), [(32, 24), (36, 24), (32, 20), (36, 20)])
def test_experts_that_fit_grouped_products_are_those_that_say_so(width: int, inner: int) -> None:
    model = parse(Model, {**SMALL, "d_model": width, "experts": {"kind": "routed", "d_ff": inner}})
    built = [part for part in Transformer(model, initial=False).modules() if isinstance(part, Experts)]
    assert {part.fits_groups for part in built} == {not_in_groups(model) is None}


def test_the_weights_of_a_run_that_is_refused_today_can_be_read() -> None:
    saved = {
        "model": SMALL,
        "parallel": {"recompute_every": 2},
        "kernels": {"workspace_bytes": 1},
    }
    assert trained_with(saved).model == parse(Model, SMALL)
