"""What runs on a GPU only: compiled flex_attention and torch's grouped products, against the definitions."""

import pytest
import torch
from torch import Tensor

from conf.typed import parse
from megamodel.attend import Attend, Seen
from megamodel.dropout import Clock, KeyedDropout
from megamodel.feedforward import FeedForward
from megamodel.moe import Experts, Routed
from parallel.mesh import Group
from parallel.tensor import TensorParallel

pytestmark = pytest.mark.gpu


def attended(backend: str, seen: Seen, softcap: float | None, inputs: list[Tensor]) -> list[Tensor]:
    """The output and all gradients; two documents a row."""
    dropout = KeyedDropout(0.0, seed=1, layer=0, site="attention", clock=Clock())
    module = Attend(scale=0.2, seen=seen, documents=True, dropout=dropout, first_head=0, softcap=softcap)
    module.backend = backend  # type: ignore[assignment]
    q, k, v, sinks = (x.detach().requires_grad_() for x in inputs)
    positions = torch.arange(300, device="cuda").repeat(2, 1)
    positions[:, 130:] -= 130
    y = module(q, k, v, positions, torch.arange(2), sinks=sinks)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [q, k, v, sinks])]


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("seen", [Seen(), Seen(window=50), Seen(sparse="strided", stride=16)], ids=str)
def test_flex_attention_and_its_gradients(seen: Seen, softcap: float | None) -> None:
    source = torch.Generator().manual_seed(1)
    shapes = ((2, 300, 6, 64), (2, 300, 3, 64), (2, 300, 3, 64), (6,))
    inputs = [torch.randn(shape, generator=source).cuda() for shape in shapes]
    exact = attended("whole", seen, softcap, [x.double() for x in inputs])
    for ours, theirs in zip(attended("flex", seen, softcap, inputs), exact, strict=True):
        assert (ours.double() - theirs).abs().max() < 2e-3 * theirs.abs().max()


def test_grouped_products_let_nothing_of_other_rows_through() -> None:
    settings = parse(Routed, {"n_experts": 8, "top_k": 2, "d_ff": 64})
    form = parse(FeedForward.Config, {"d_ff": 64, "bias": True})
    parallel = TensorParallel(Group((0, 1), 1, None))
    module = Experts("e", settings, form, 32, std=1.0, output_std=1.0, parallel=parallel)
    source = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=source).mul(0.2).cuda().bfloat16()
    chosen = torch.stack([torch.randperm(8, generator=source)[:2] for _ in range(100)]).cuda()
    x0, w0 = (
        torch.randn(100, 32, generator=source).cuda().bfloat16(),
        torch.rand(100, 2, generator=source).cuda(),
    )
    found = []
    for used in ("loop", "grouped"):
        module.form = used  # type: ignore[assignment]
        for _ in range(3):  # what the allocator gives again is not 0
            torch.full((1 << 22,), float("nan"), device="cuda")
            x, weights = x0.clone().requires_grad_(), w0.clone().requires_grad_()
            y = module(x, chosen, weights).float()
            gradients = torch.autograd.grad(y.square().sum(), [x, weights, *module.parameters()])
        found.append([y.detach(), *gradients])
    for a, b in zip(*found, strict=True):
        assert (a.double() - b.double()).abs().max() < 3e-2 * a.double().abs().max()
