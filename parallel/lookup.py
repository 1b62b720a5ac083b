"""Rows of a matrix by number, with a gradient that is summed in enough digits.

V rows, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def rows_of(numbers: Tensor, weight: Tensor) -> Tensor:
    """weight (V, D) at numbers (...), each in 0 .. V - 1 -> (..., D).

    On a CPU torch adds up the gradient of a 16-bit matrix in 16 bit: in bf16 a row that is looked up more
    than 256 times gets no more (256 + 1 is 256). Here it is summed in fp32 and rounded once.
    """
    if weight.dtype in HALVES and not weight.is_cuda:
        return _Lookup.apply(numbers, weight)  # type: ignore[no-any-return]
    return F.embedding(numbers, weight)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.rows = weight.shape[0]
        return F.embedding(numbers, weight)

    @staticmethod
    def backward(ctx, upstream: Tensor):  # type: ignore[override]
        (numbers,) = ctx.saved_tensors
        # By the rows that are there, so that the sums in fp32 are not as large as the whole matrix.
        if not numbers.numel():
            return None, upstream.new_zeros((ctx.rows, upstream.shape[-1]))
        there, place = numbers.unique(return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(upstream.float(), place, there.numel(), -1, False)
        gradient = upstream.new_zeros((ctx.rows, upstream.shape[-1]))
        return None, gradient.index_copy_(0, there, sums.to(gradient.dtype))
