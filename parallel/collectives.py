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


Arriving = Callable[[], Tensor]  # waits for what was started, once, and gives it


def _arriving(work: dist.Work | None, out: Tensor, *inputs: Tensor) -> Arriving:
    """What waits for `out`; the inputs live until then."""

    def arrive(inputs: tuple[Tensor, ...] = inputs) -> Tensor:
        assert work is not None
        work.wait()
        return out

    return arrive


def all_reduce_started(x: Tensor, group: Group) -> Arriving:
    """The sum in place of contiguous x, on its way while other work is done. Without gradient."""
    return _arriving(dist.all_reduce(x, group=group.handle, async_op=True), x)


# torch 2.13 renamed both operations below; the old names warn there and are all that 2.11 has.
def gather_rows_started(x: Tensor, group: Group) -> Arriving:
    """(n, ...) of each rank -> (size n, ...), in rank order, on its way. Without gradient."""
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    x = x.contiguous()
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    return _arriving(gather(out, x, group=group.handle, async_op=True), out, x)


def scatter_started(out: Tensor, x: Tensor, group: Group) -> dist.Work | None:
    """This rank's rows of the sum of contiguous x into `out`, which may be where they lie in x."""
    scatter = (
        dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    )
    return scatter(out, x, group=group.handle, async_op=True)


def scatter_rows_started(x: Tensor, group: Group) -> Arriving:
    """(size n, ...) -> this rank's (n, ...) of the sum, on its way. Without gradient."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return _arriving(scatter_started(out, x, group), out, x)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """(n, ...) of each rank -> (size n, ...), in rank order, without gradient."""
    return gather_rows_started(x, group)()


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """(size n, ...) -> this rank's (n, ...) of the sum, without gradient."""
    return scatter_rows_started(x, group)()


def gather_sequence_started(x: Tensor, group: Group) -> Arriving:
    """(B, S / tp, D) -> (B, S, D), on its way while other work is done. Without gradient."""
    return _rows_first(gather_rows_started(x.transpose(0, 1), group))


def scatter_sequence_started(x: Tensor, group: Group) -> Arriving:
    """Partial sums (B, S, D) -> this rank's (B, S / tp, D), on its way. Without gradient."""
    return _rows_first(scatter_rows_started(x.transpose(0, 1), group))


def _rows_first(arriving: Arriving) -> Arriving:
    # A stage border sends it as it lies in memory.
    return lambda: arriving().transpose(0, 1).contiguous()


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
        return gather_sequence_started(x, group)()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return scatter_sequence_started(grad, ctx.group)(), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return scatter_sequence_started(x, group)()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_sequence_started(grad, ctx.group)(), None


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
