"""Matrix products in forms that differ in speed, not in what they mean: see parallel/product.py.

x (..., d_in), W (d_out, d_in), b (d_out) or None -> (..., d_out).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.product import of_bias, of_input, of_weight, product

FLOAT8_MULTIPLE = 16  # what the units of a GPU ask of both sides of an 8-bit product


class _Widened(torch.autograd.Function):
    """For CPUs whose fp32 units are the faster ones. Only the 16-bit operands are kept for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(x, weight, bias, wide=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad, (needs_x, needs_weight, needs_bias) = grad.float(), ctx.needs_input_grad
        return (
            of_input(grad, weight, wide=True) if needs_x else None,
            of_weight(grad, x, wide=True) if needs_weight else None,
            of_bias(grad, weight) if needs_bias and ctx.has_bias else None,
        )


def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, computed in fp32 where the operands have 16 bit."""
    if x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    return _Widened.apply(x, weight, bias)  # type: ignore[return-value]


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return q.float() @ k.float().transpose(-1, -2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        q, k = ctx.saved_tensors
        needs_q, needs_k = ctx.needs_input_grad
        of_q = (grad @ k.float()).to(q.dtype) if needs_q else None
        return of_q, (grad.transpose(-1, -2) @ q.float()).to(k.dtype) if needs_k else None


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q (..., S, E), k (..., N, E) -> q k^T (..., S, N), of 16-bit operands in fp32 on a CPU.

    In 16 bit a score of 200 would be off by up to a half. A GPU's products round what they give.
    """
    if q.is_cuda or q.dtype in (torch.float32, torch.float64):
        return q @ k.transpose(-1, -2)
    return _Scores.apply(q, k)  # type: ignore[return-value]
