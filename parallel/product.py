"""Matrix products y = x W^T + b and their gradients, in the operands' own numbers or widened to fp32.

x (..., d_in), W (d_out, d_in), b (d_out) or None, y and its gradient (..., d_out).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.collectives import all_reduce_started, gather_sequence_started, scatter_sequence_started
from parallel.mesh import Group
from parallel.outside import Outside

# y = x W^T + b: (x, W, b or None) -> y. Layers multiply with F.linear unless they are given another.
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def product(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool) -> Tensor:
    """y. wide: 16-bit operands are multiplied and added up in fp32 and the result is rounded once."""
    if not wide:
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def of_input(grad: Tensor, weight: Tensor, *, wide: bool) -> Tensor:
    """The gradient of x, (..., d_in). Here and below grad may be in fp32 already where it is wide."""
    return (grad.float() @ weight.float()).to(weight.dtype) if wide else grad @ weight


def of_weight(grad: Tensor, x: Tensor, *, wide: bool) -> Tensor:
    """The gradient of W, (d_out, d_in)."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    return (grad.float().t() @ x.float()).to(x.dtype) if wide else grad.t() @ x


def of_bias(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of b, (d_out), in the numbers of `like`."""
    return grad.flatten(0, -2).sum(0).to(like.dtype)


class _Entered(torch.autograd.Function):
    """x enters a tensor-parallel region and is multiplied there.

    Backward sends while it multiplies: the input's parts of the other ranks come during the product that
    makes the input's gradient, and that gradient's sum is taken during the product that makes the weight's.
    Under sequence parallelism only this rank's tokens are kept.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool, wide: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence, ctx.wide, ctx.has_bias = group, sequence, wide, bias is not None
        whole = gather_sequence_started(x, group)() if sequence else x
        return product(whole, weight, bias, wide=wide)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.float() if ctx.wide else grad
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathered = gather_sequence_started(x, ctx.group) if ctx.sequence and needs_weight else lambda: x
        summed = None
        if needs_x:
            start = scatter_sequence_started if ctx.sequence else all_reduce_started
            summed = start(of_input(grad, weight, wide=ctx.wide), ctx.group)
        for_weight = of_weight(grad, gathered(), wide=ctx.wide) if needs_weight else None
        for_bias = of_bias(grad, weight) if needs_bias and ctx.has_bias else None
        return summed() if summed else None, for_weight, for_bias, None, None, None


@Outside
def entered(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool, wide: bool
) -> Tensor:
    """y of x, which enters a region for this product alone; `sequence`: it is this rank's tokens."""
    return _Entered.apply(x, weight, bias, group, sequence, wide)  # type: ignore[return-value]
