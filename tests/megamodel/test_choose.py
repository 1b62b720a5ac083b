"""Which form is chosen where, what is refused, and that a model equipped with a form computes the same."""

import importlib.util
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.typed import parse
from launcher.__main__ import main
from megamodel import choose as choose_module
from megamodel.block import Block
from megamodel.choose import Machine, choose, chunked, equip, this_machine
from megamodel.config import Model
from megamodel.kernels.config import Kernels
from megamodel.kernels.head import linear_cross_entropy
from megamodel.model import Transformer
from megamodel.norm import Normalise

NO_TRITON = "triton is not installed; pip install 'megamodel[gpu]'"
CPU = Machine(cuda=False, matrix_units=False, triton=NO_TRITON, compiler=None)
GPU = Machine(cuda=True, matrix_units=False, triton=None, compiler=None)
AMX = replace(CPU, matrix_units=True)
NAKED = replace(GPU, triton=NO_TRITON, compiler=NO_TRITON)


@pytest.mark.parametrize(
    ("machine", "precision", "settings", "expected"),
    [
        (
            CPU,
            "fp32",
            {},
            {"products": "native", "attention": "blocked", "experts": "sorted", "norm": "plain"},
        ),
        (CPU, "bf16", {}, {"products": "widened", "head": "chunked", "entropy": "plain"}),
        (AMX, "bf16", {}, {"products": "native"}),
        (
            GPU,
            "bf16",
            {},
            {"products": "native", "attention": "flex", "experts": "grouped", "norm": "triton"},
        ),
        (GPU, "fp32", {}, {"experts": "sorted", "rotate": "triton"}),
        (GPU, "bf16", {"compile": "block"}, {"norm": "plain", "gate": "plain", "entropy": "triton"}),
        (NAKED, "bf16", {}, {"norm": "plain", "entropy": "plain", "attention": "blocked"}),
        (GPU, "bf16", {"head": "whole"}, {"entropy": "plain", "norm": "triton"}),
        (AMX, "bf16", {"products": "widened"}, {"products": "widened"}),
        (CPU, "fp32", {"compile": "block"}, {"compile": "block", "attention": "blocked"}),
        (AMX, "bf16", {"compile": "block"}, {"attention": "rebuilt"}),
        (AMX, "fp32", {"compile": "block"}, {"attention": "blocked"}),
        (CPU, "bf16", {"compile": "block"}, {"attention": "blocked"}),
        (AMX, "bf16", {}, {"attention": "blocked"}),
        (GPU, "bf16", {"compile": "block"}, {"attention": "flex"}),
    ],
)
def test_what_is_chosen(machine: Machine, precision: Any, settings: Any, expected: dict[str, str]) -> None:
    found = choose(parse(Kernels, settings), machine, precision)
    assert {name: found[name].form for name in expected} == expected
    assert all(choice.why for choice in found.values())


@pytest.mark.parametrize(
    ("machine", "settings", "message"),
    [
        (CPU, {"attention": "flex"}, "attention=flex is not possible here: torch has no backward"),
        (CPU, {"norm": "triton"}, "norm=triton is not possible here: our kernels are for a GPU"),
        (NAKED, {"gate": "triton"}, "pip install 'megamodel"),
        (NAKED, {"attention": "flex"}, "attention=flex is not possible here: triton is not installed"),
        (CPU, {"experts": "grouped"}, "grouped products need bf16 on a GPU; use auto or loop, sorted"),
        (replace(CPU, compiler="no compiler"), {"compile": "block"}, "compile=block .*: no compiler; use"),
        (CPU, {"products": "widened"}, "the numbers are fp32 already"),
        (
            AMX,
            {"attention": "rebuilt"},
            "attention=rebuilt is not possible here: it is for products of 16-bit",
        ),
        (GPU, {"attention": "rebuilt"}, "torch's own backward pass is faster on a GPU; use auto or whole"),
        (CPU, {"products": "float8"}, "8-bit products are for train.precision=bf16"),
    ],
)
def test_what_is_impossible_is_refused(machine: Machine, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(parse(Kernels, settings), machine, "fp32")


def test_a_gpu_without_triton_says_why_attention_is_blocked() -> None:
    assert choose(Kernels(), NAKED, "bf16")["attention"].why == f"flex needs triton: {NO_TRITON}"


def test_what_lacks_software_is_known_where_a_faster_form_needs_it() -> None:
    slower = {c.operation for c in choose(Kernels(), NAKED, "bf16").values() if c.lacks == NO_TRITON}
    assert slower == {"entropy", "norm", "rotate", "gate", "attention"}
    named = choose(Kernels(norm="plain", attention="blocked", head="whole"), NAKED, "bf16")
    assert {c.operation for c in named.values() if c.lacks} == {"rotate", "gate"}
    # A CPU has no faster ones, whatever is installed; float8 is for who asks for it.
    assert not any(c.lacks for machine in (CPU, GPU) for c in choose(Kernels(), machine, "bf16").values())


@pytest.mark.parametrize("form", ["plain", "triton"])
def test_a_form_that_is_named_holds_beside_compiled_blocks_too(form: Any) -> None:
    automatic = choose(Kernels(compile="block"), GPU, "bf16")
    assert {n: c.beside_graphs for n, c in automatic.items() if c.beside_graphs} == {
        "norm": "triton",
        "gate": "triton",
    }
    named = choose(Kernels(compile="block", gate=form, norm=form), GPU, "bf16")
    assert {(named[n].form, named[n].beside_graphs) for n in ("norm", "gate")} == {(form, None)}


def ours(module: torch.nn.Module) -> set[str]:
    """Where our kernels of norms and gates would run."""
    norms = {n for n, p in module.named_modules() if isinstance(p, Normalise) and p.form is not None}
    gates = {n for n, p in module.named_modules() if isinstance(getattr(p, "gate", None), partial)}
    return norms | gates


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"compile": "block"}, {"1.norm", "3.norm", "2.feed.inner.experts"}),
        ({"compile": "block", "gate": "plain"}, {"1.norm", "3.norm"}),
        ({"compile": "block", "norm": "plain", "gate": "plain"}, set()),
        ({"compile": "block", "norm": "plain"}, {"2.feed.inner.experts"}),
        ({}, {"1.norm", "3.norm", "2.attend.before", "2.feed.before", "2.feed.inner.experts"}),
    ],
)
def test_what_stands_outside_of_compiled_blocks_has_our_kernels(
    settings: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding's norm and the last one, and experts, which are never compiled."""
    fake = SimpleNamespace(**dict.fromkeys(("activate", "gate", "rotate", "norm_rotate"), torch.relu))
    monkeypatch.setattr(choose_module, "_triton", lambda operation: fake)
    monkeypatch.setattr(Block, "compile_block", lambda block: None)
    model = {**MODELS["experts"], "embedding": {"norm": True}, "n_layers": 1}
    choices = choose(parse(Kernels, settings), GPU, "bf16")
    assert ours(small(model, choices).layers) == expected


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_8_bit_products_are_refused_with_the_reason(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"float8 is not possible here: .* compute capability 8\.9 or newer"):
        choose(Kernels(products="float8"), machine, "bf16")
    missing = replace(GPU, float8="torchao is not installed")
    with pytest.raises(ValueError, match="torchao is not installed; use auto or native"):
        choose(Kernels(products="float8"), missing, "bf16")
    assert choose(Kernels(products="float8"), replace(GPU, float8=None), "bf16")["products"].form == "float8"


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed; pip install 'megamodel[float8]'",
)
def test_8_bit_products_are_within_their_rounding() -> None:
    """Elements are off by up to 2^-4 with three bits of mantissa, 2^-3 with the two of a gradient."""
    from megamodel.kernels.float8 import Float8Product

    torch.manual_seed(0)
    x, weight = torch.randn(5, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
    x.requires_grad_()
    weight.requires_grad_()
    got = Float8Product(emulate=True)(x, weight)
    want = x.double() @ weight.double().t()
    upstream = torch.randn_like(want)
    expected = torch.autograd.grad(want, (x, weight), upstream)
    found = torch.autograd.grad(got, (x, weight), upstream.to(got.dtype))
    for a, b in zip((got, *found), (want, *expected), strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert 0 < error < 0.1


def test_the_command_tells_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "hardware.device=cpu", "precision=bf16"]) == 0
    told = capsys.readouterr().out
    for choice in choose(Kernels(), this_machine(torch.device("cpu")), "bf16").values():
        assert f"* {choice.form}" in told
        assert all(form.name in told for form in choice.forms)
    assert main(["kernels", "hardware.device=cpu", "kernels.attention=flex"]) == 2


MODELS: dict[str, dict[str, Any]] = {
    "consensus": {},
    "QK-norm, biases": {
        "norm": {"kind": "layernorm"},
        "attention": {"n_heads": 4, "n_kv_heads": 2, "head_width": 8, "qk_norm": {"scope": "head"}},
        "position": {"kind": "rope", "pairs": "interleaved", "fraction": 0.5},
    },
    "double, gelu": {"layout": "double", "feedforward": {"d_ff": 48, "activation": "gelu_tanh"}},
    "parallel, plain": {"layout": "parallel_shared", "feedforward": {"d_ff": 48, "gated": False}},
    "experts": {
        "experts": {"kind": "routed", "n_experts": 4, "top_k": 2, "d_ff": 24},
        "logits": {"softcap": 5.0},
    },
}


def small(model: dict[str, Any], choices: Any) -> Transformer:
    usual = {
        "vocab_size": 97,
        "d_model": 32,
        "n_layers": 2,
        "attention": {"n_heads": 4, "n_kv_heads": 2, "head_width": 8},
        "feedforward": {"d_ff": 48},
    }
    return Transformer(parse(Model, usual | model), equip=lambda part: equip(part, choices))


def objective_and_gradients(model: dict[str, Any], choices: Any, forms: Kernels) -> list[torch.Tensor]:
    module = small(model, choices)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(97, (2, 12), generator=generator)
    targets = torch.randint(97, (2, 12), generator=generator)
    objective, *_ = linear_cross_entropy(
        module.project(tokens), targets, torch.tensor(0.5), z_weight=1e-3, how=chunked(choices, forms)
    )
    objective.backward()
    return [objective.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.skipif(
    not (os.environ.get("TRITON_INTERPRET") == "1" and this_machine(torch.device("cpu")).triton is None),
    reason="needs triton under its interpreter: TRITON_INTERPRET=1",
)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_our_kernels_is_the_same(name: str) -> None:
    plain, forms = choose(Kernels(), CPU, "fp32"), Kernels()
    triton = choose(Kernels(attention="blocked"), GPU, "fp32")
    assert {triton[n].form for n in ("norm", "rotate", "gate", "entropy")} == {"triton"}
    expected = objective_and_gradients(MODELS[name], plain, forms)
    found = objective_and_gradients(MODELS[name], triton, forms)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
