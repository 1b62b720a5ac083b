"""Collectives with gradients, over one group. A group of size 1 costs nothing.

B batch, S sequence length, D width, tp group size.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Group
from parallel.outside import Outside


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum in place, without gradient; returns x."""
    if group.size > 1:
        dist.all_reduce(x, group=group.handle)
    return x


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Maximum in place, without gradient; returns x. NaN is not carried reliably."""
    if group.size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.handle)
    return x


def _gather_single(out: Tensor, x: Tensor, group: Group, *, started: bool = False) -> dist.Work | None:
    # torch 2.13 renamed both; the old names warn there and are all that 2.11 has.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    return gather(out, x, group=group.handle, async_op=started)


def _scatter_single(out: Tensor, x: Tensor, group: Group, *, started: bool = False) -> dist.Work | None:
    scatter = (
        dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    )
    return scatter(out, x, group=group.handle, async_op=started)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """(n, ...) of each rank -> (size n, ...), in rank order, without gradient."""
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    _gather_single(out, x.contiguous(), group)
    return out


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """(size n, ...) -> this rank's (n, ...) of the sum, without gradient."""
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    _scatter_single(out, x.contiguous(), group)
    return out


def _gather_sequence(x: Tensor, group: Group) -> Tensor:
    rows = gather_rows(x.transpose(0, 1), group)  # (S, B, D)
    return rows.transpose(0, 1).contiguous()  # a stage border sends it as it lies in memory


def _reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    rows = reduce_scatter_rows(x.transpose(0, 1), group)  # (S / tp, B, D)
    return rows.transpose(0, 1).contiguous()  # a stage border sends it as it lies in memory


Arriving = Callable[[], Tensor]  # waits for what was started, once, and gives it


def all_reduce_started(x: Tensor, group: Group) -> Arriving:
    """The sum in place of contiguous x, on its way while other work is done. Without gradient."""
    work = dist.all_reduce(x, group=group.handle, async_op=True)
    return lambda: _arrived(work, x)


def gather_sequence_started(x: Tensor, group: Group) -> Arriving:
    """(B, S / tp, D) -> (B, S, D), on its way while other work is done. Without gradient."""
    x = x.transpose(0, 1).contiguous()
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    work = _gather_single(out, x, group, started=True)
    # x must live until then.
    return lambda: _arrived(work, out, x).transpose(0, 1).contiguous()


def scatter_sequence_started(x: Tensor, group: Group) -> Arriving:
    """Partial sums (B, S, D) -> this rank's (B, S / tp, D), on its way. Without gradient."""
    x = x.transpose(0, 1).contiguous()
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    work = _scatter_single(out, x, group, started=True)
    return lambda: _arrived(work, out, x).transpose(0, 1).contiguous()


def _arrived(work: dist.Work | None, out: Tensor, *inputs: Tensor) -> Tensor:
    assert work is not None
    work.wait()
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad.contiguous().clone(), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather_sequence(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _reduce_scatter_sequence(grad, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scatter_sequence(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gather_sequence(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad.contiguous().clone(), ctx.group), None


@Outside
def _outside(function: type[torch.autograd.Function], x: Tensor, group: Group) -> Tensor:
    return function.apply(x, group)  # type: ignore[return-value]


def sum_inside(x: Tensor, group: Group) -> Tensor:
    """Sum over the group, inside a region: each rank uses it in its own way, so backward sums too."""
    return x if group.size == 1 else _outside(_Sum, x, group)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """(..., n of each rank) -> (..., sum of n), in rank order, without gradient; n may differ by rank."""
    if group.size == 1:
        return x
    sizes = gather_rows(torch.tensor([x.shape[-1]], device=x.device), group).tolist()
    padded = x.new_zeros((max(sizes), *x.shape[:-1]))
    padded[: x.shape[-1]] = x.movedim(-1, 0)
    parts = gather_rows(padded, group).split(max(sizes))
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)]).movedim(0, -1)


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Identity; backward sums the gradients over the group. Entry of a tensor-parallel region."""
    return x if group.size == 1 else _outside(_Copy, x, group)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Sum over the group; backward is the identity. Exit of a tensor-parallel region."""
    return x if group.size == 1 else _outside(_Reduce, x, group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """(B, S / tp, D) -> (B, S, D); backward is a reduce-scatter."""
    return x if group.size == 1 else _outside(_GatherSequence, x, group)


def scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Partial sums (B, S, D) -> this rank's part of their sum (B, S / tp, D); backward is an all-gather."""
    return x if group.size == 1 else _outside(_ScatterSequence, x, group)
