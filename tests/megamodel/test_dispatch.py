"""Tokens to their experts and back, in every form, against a sum over all experts in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conf.typed import parse
from megamodel.feedforward import FeedForward
from megamodel.init import initialise
from megamodel.kernels.products import widened
from megamodel.moe import Experts, Routed
from parallel.tensor import TensorParallel
from tests.layouts import LAYOUTS
from tests.megamodel.test_moe import _Dirty

EXPERTS, WIDTH, INNER = 6, 8, 16
# bf16 rounds what goes between two products (2^-8 of about 10 numbers of size 1 to 30); fp32 by 2^-24.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5}


def experts(dtype: torch.dtype) -> Experts:
    settings = parse(Routed, {"n_experts": EXPERTS, "top_k": 2, "d_ff": INNER})
    inner = parse(FeedForward.Config, {"d_ff": INNER, "bias": True})
    made = Experts("e", settings, inner, WIDTH, std=0.5, output_std=0.5, parallel=TensorParallel())
    initialise(made, seed=3)
    source = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        parameter.data = (0.5 * torch.randn(parameter.shape, generator=source)).to(dtype)
    return made


def definition(x: Tensor, chosen: Tensor, weights: Tensor, parameters: list[Tensor]) -> Tensor:
    """sum over the slots of weight (down_e (silu(gate_e x) up_e x)), every expert for every token."""
    inner, down, inner_bias, down_bias = parameters
    h = torch.einsum("td,erd->ter", x, inner) + inner_bias.view(EXPERTS, -1)
    gate, up = h.chunk(2, dim=-1)
    every = torch.einsum("ter,edr->ted", F.silu(gate) * up, down) + down_bias.view(EXPERTS, -1)
    taken = F.one_hot(chosen, EXPERTS).to(x.dtype) * weights.unsqueeze(-1)  # (T, k, e)
    return torch.einsum("tke,ted->td", taken, every)


def check(form: Any, count: int, dtype: torch.dtype, layout: str = "contiguous", product: Any = None) -> None:
    module = experts(dtype)
    module.form = form
    if product is not None:
        module.product = product
    source = torch.Generator().manual_seed(count)
    chosen = torch.rand(count, EXPERTS, generator=source).argsort(1)[:, :2]
    arranged = LAYOUTS[layout if layout != "expanded" else "contiguous"]
    x = arranged(torch.randn(count, WIDTH, generator=source).to(dtype)).detach().requires_grad_()
    weights = torch.rand(count, 2, generator=source).to(dtype).requires_grad_()
    upstream = LAYOUTS[layout](torch.randn(count, WIDTH, generator=source).to(dtype))
    inputs = [x, weights, *module.parameters()]
    y = module(x, chosen, weights)
    found = [y, *torch.autograd.grad(y, inputs, upstream)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted_y = definition(exact[0], chosen, exact[1], exact[2:])
    wanted = [wanted_y, *torch.autograd.grad(wanted_y, exact, upstream.double())]
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        size = max(float(want.detach().abs().max()), 1.0) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype] * size)


@pytest.fixture(params=["loop", "sorted", "grouped"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """grouped: with products of groups by hand, as torch has them on a GPU only."""
    monkeypatch.setattr(F, "grouped_mm", lambda x, w, offs: _Dirty.apply(x, w, offs))
    return request.param


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("count", [0, 1, 3, 17, 127, 4097])
def test_any_number_of_tokens(form: str, count: int, dtype: torch.dtype) -> None:
    check(form, count, dtype)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_any_layout(form: str, layout: str) -> None:
    check(form, 41, torch.float32, layout)


@pytest.mark.parametrize("form", ["loop", "sorted"])
def test_products_in_fp32_of_16_bit_operands(form: str) -> None:
    check(form, 41, torch.bfloat16, product=widened)


def test_frozen_experts_and_no_gradient(form: str) -> None:
    module = experts(torch.float32)
    module.form = form  # type: ignore[assignment]
    chosen, weights = torch.tensor([[0, 5], [2, 1]]), torch.ones(2, 2)
    with torch.no_grad():
        assert not module(torch.ones(2, WIDTH), chosen, weights).requires_grad
    module.requires_grad_(False)
    x = torch.ones(2, WIDTH, requires_grad=True)
    module(x, chosen, weights).sum().backward()
    exact = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
    definition(exact, chosen, weights.double(), [p.double() for p in module.parameters()]).sum().backward()
    assert exact.grad is not None and x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
