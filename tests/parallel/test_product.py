"""Products that enter a region: the gradients of the plain way, and what is sent during which product."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import parallel.product as products
from parallel.mesh import build_mesh
from parallel.tensor import ColumnLinear, Heads, TensorParallel
from tests.spawn import Ranks


@dataclass(frozen=True)
class Form:
    sequence: bool
    dtype: torch.dtype
    bias: bool = False
    frozen: bool = False


FORMS = [
    Form(sequence, dtype, bias, frozen)
    for sequence in (False, True)
    for dtype, bias, frozen in (
        (torch.float64, True, False),
        (torch.bfloat16, False, False),
        (torch.float32, False, True),
    )
]


def layer(form: Form, parallel: TensorParallel) -> ColumnLinear:
    made = ColumnLinear(
        "f", 6, {"a": Heads(4, 3), "b": Heads(8)}, std=1.0, group=parallel.group, bias=form.bias
    )
    source = torch.Generator().manual_seed(parallel.group.rank)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=source).to(form.dtype)
        parameter.requires_grad_(not form.frozen)
    made.wide = form.dtype == torch.bfloat16
    return made


def inputs(form: Form, group_rank: int) -> tuple[Tensor, Tensor]:
    """x as it lies between the regions, and the gradient that comes for the outputs of this rank."""
    source = torch.Generator().manual_seed(5)
    x = torch.randn(2, 8, 6, generator=source).to(form.dtype)
    grads = torch.randn(2, 2, 8, 10, generator=source).to(form.dtype)
    rows = x[:, 4 * group_rank : 4 * group_rank + 4] if form.sequence else x
    return rows.clone().requires_grad_(), grads[group_rank]


def gradients(form: Form) -> list[list[Tensor | None]]:
    """[y, dx, dW, db] by the layer's own way in, and by an entry followed by a product in fp64."""
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"))
    parallel = TensorParallel(mesh.tp, sequence=form.sequence)
    found: list[list[Tensor | None]] = []
    for own in (True, False):
        module = layer(form, parallel)
        x, grad = inputs(form, mesh.tp.rank)
        if own:
            y = torch.cat(module.entered(x, parallel), dim=-1)
        else:
            module, grad = module.double(), grad.double()
            y = torch.cat(module(parallel.enter(x.double())), dim=-1)
        y.backward(grad)
        bias = None if module.bias is None else module.bias.grad
        found.append([y.detach(), x.grad, module.weight.grad, bias])
    dist.barrier()
    return found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_gradients_of_the_plain_way(form: Form, ranks: Ranks) -> None:
    # The sum of two ranks' gradients is taken of rounded numbers.
    close = {"rtol": 2e-2, "atol": 2e-2} if form.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for own, plain in ranks.run(2, gradients, form):
        assert (own[2] is None) == form.frozen and (own[3] is not None) == form.bias
        for ours, theirs in zip(own, plain, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours.double(), theirs.double(), **close)


def order(sequence: bool) -> list[str]:
    """What happens in a backward pass, in its order."""
    form = Form(sequence, torch.float32)
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"))
    parallel = TensorParallel(mesh.tp, sequence=sequence)
    module, (x, grad) = layer(form, parallel), inputs(form, mesh.tp.rank)
    y = torch.cat(module.entered(x, parallel), dim=-1)
    seen: list[str] = []
    spied = vars(products)
    before = dict(spied)

    def started(name: str):
        def start(*inputs):
            seen.append(f"{name} starts")
            arriving = before[name](*inputs)

            def arrive() -> Tensor:
                seen.append(f"{name} is awaited")
                return arriving()

            return arrive

        return start

    def called(name: str):
        def call(*inputs, **how):
            seen.append(name)
            return before[name](*inputs, **how)

        return call

    spied |= {n: started(n) for n in before if n.endswith("_started")}
    spied |= {n: called(n) for n in ("of_input", "of_weight")}
    try:
        y.backward(grad)
    finally:
        spied |= before
    return seen


def test_what_is_sent_during_which_product(ranks: Ranks) -> None:
    for seen in ranks.run(2, order, False):
        assert seen == ["of_input", "all_reduce_started starts", "of_weight", "all_reduce_started is awaited"]
    for seen in ranks.run(2, order, True):
        assert seen == [
            "gather_sequence_started starts",
            "of_input",
            "scatter_sequence_started starts",
            "gather_sequence_started is awaited",
            "of_weight",
            "scatter_sequence_started is awaited",
        ]
