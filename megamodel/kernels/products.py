"""Matrix products y = x W^T + b in forms that differ in speed, not in what they mean.

x (..., d_in), W (d_out, d_in), b (d_out) or None -> (..., d_out).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class _Widened(torch.autograd.Function):
    """16-bit operands multiplied and added up in fp32, the result rounded once: on CPUs whose fp32 units are
    the faster ones. Only the 16-bit operands are kept for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wide = grad.float()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = (wide @ weight.float()).to(x.dtype) if needs_x else None
        flat = wide.flatten(0, -2)
        of_weight = (flat.t() @ x.flatten(0, -2).float()).to(weight.dtype) if needs_weight else None
        of_bias = flat.sum(0).to(weight.dtype) if needs_bias and ctx.has_bias else None
        return of_x, of_weight, of_bias


def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, computed in fp32 where the operands have 16 bit."""
    if x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    return _Widened.apply(x, weight, bias)  # type: ignore[return-value]
