"""The two halves of a vocabulary-parallel cross-entropy in Triton: statistics of a row, gradient in place.

n rows of v local columns, walked in blocks; sums are fp32, logits stay in their dtype. Both read the logits
once, and the gradient is written over them.
"""

# pyright: reportIndexIssue=false
# A decorator that may not be installed is unknown to the type checker: kernel[grid] looks wrong to it.

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from megamodel.data.batch import IGNORE
from megamodel.kernels.triton_rows import rows, warps

_COLUMNS = 4096  # of a block at most


@triton.jit
def _statistics(
    logits, step, targets, step_target, largest, total, picked, start, columns,
    IGNORED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: the sum so far is of exp(logit - shift), shift the largest so far, 0 while that is -inf."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * step
    top = float("-inf")
    shift = 0.0
    sum_so_far = 0.0
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0))
        next_shift = tl.where(top == float("-inf"), 0.0, top)
        # From 0 to a largest logit far below: nothing was added up yet, and exp(0 - that) is infinite.
        scaled = sum_so_far * tl.exp(tl.minimum(shift - next_shift, 0.0))
        sum_so_far = scaled + tl.sum(tl.exp(x - next_shift), 0)
        shift = next_shift
    tl.store(largest + row, top)
    tl.store(total + row, sum_so_far)
    target = tl.load(targets + row * step_target)
    local = target - start
    ours = (target != IGNORED) & (local >= 0) & (local < columns)
    tl.store(picked + row, tl.load(logits + local, mask=ours, other=0.0).to(tl.float32))


@triton.jit
def _gradient(
    logits, step, targets, step_target, log_z, step_z, coefficient, step_coefficient, other, step_other,
    start, columns, softcap,
    IGNORED: tl.constexpr, CAPPED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (row, block)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = logits + row * step + column
    target = tl.load(targets + row * step_target)
    valid = target != IGNORED
    x = tl.load(at, mask=tl.where(valid, column < columns, False), other=0.0).to(tl.float32)
    c_loss = tl.load(coefficient + row * step_coefficient).to(tl.float32)
    c_z = tl.load(other + row * step_other).to(tl.float32)
    grad = (c_loss + c_z) * tl.exp(x - tl.load(log_z + row * step_z).to(tl.float32))
    grad -= tl.where(column == target - start, c_loss, 0.0)
    if CAPPED:
        ratio = x / softcap
        grad *= 1 - ratio * ratio
    grad = tl.where(valid, grad, 0.0)
    tl.store(at, grad.to(logits.dtype.element_ty), mask=column < columns)


def _sizes(columns: int) -> dict[str, int]:
    size = min(triton.next_power_of_2(columns), _COLUMNS)
    return {"COLUMNS": size, "num_warps": warps(size)}


def _row_vector(values: Tensor, number: int) -> Tensor:
    assert values.shape == (number,), (values.shape, number)
    return values


def _detached(logits: Tensor) -> bool:
    return not (torch.is_grad_enabled() and logits.requires_grad)


def entropy(logits: Tensor, targets: Tensor, *, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.entropy`. For use inside an autograd.Function: no gradient flows back from it."""
    assert _detached(logits), "entropy gives no gradient: call it inside an autograd.Function"
    number, columns = logits.shape
    shape = {"dtype": torch.float32, "device": logits.device}
    largest, total, picked = (torch.empty(number, **shape) for _ in range(3))
    if not columns:
        return largest.fill_(-torch.inf), total.zero_(), picked.zero_()
    if number:
        _row_vector(targets, number)
        read, _ = rows(logits)
        _statistics[(number,)](
            read, read.stride(0), targets, targets.stride(0), largest, total, picked, start, columns,
            IGNORED=IGNORE, **_sizes(columns),
        )  # fmt: skip
    return largest, total, picked


def entropy_gradient(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    coefficient_loss: Tensor,
    coefficient_log_z: Tensor,
    *,
    start: int,
    softcap: float | None,
) -> Tensor:
    """As `reference.entropy_gradient`, written over the logits, which it returns."""
    assert _detached(logits), "the gradient replaces the logits: call it inside an autograd.Function"
    number, columns = logits.shape
    assert columns < 2 or logits.stride(1) == 1, "the logits of a row must be neighbours"
    vectors = (targets, log_z, coefficient_loss, coefficient_log_z)
    if logits.numel():
        sizes = _sizes(columns)
        pairs = [each for v in vectors for each in (_row_vector(v, number), v.stride(0))]
        _gradient[(number, triton.cdiv(columns, sizes["COLUMNS"]))](
            logits, logits.stride(0), *pairs, start, columns, softcap or 0.0,
            IGNORED=IGNORE, CAPPED=softcap is not None, **sizes,
        )  # fmt: skip
    return logits
