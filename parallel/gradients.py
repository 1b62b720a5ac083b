"""Gradients in fp32: added up over micro-batches as they come, averaged over dp while backward goes on.

Each optimizer group is a bucket. With one data rank a gradient stays the tensor that backward made of it;
with more, the bucket's gradients are copied side by side into one buffer, which is summed and cut over the
ranks as soon as its last gradient is there. All ranks send the buckets in the same order, whatever order
theirs come in. Buffers live from a bucket's first gradient to its sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import scatter_started
from parallel.mesh import Group
from parallel.piece import pieces_of


@dataclass(eq=False)
class _Bucket:
    """size: elements of all parameters together, padded to a multiple of dp. late: sent after backward."""

    parameters: list[Tensor]
    size: int
    late: bool
    missing: int = 0  # parameters whose last gradient has not come yet
    flat: Tensor | None = None
    part: Tensor | None = None  # this rank's elements of the mean
    work: dist.Work | None = None
    sent: bool = False
    starts: dict[Tensor, int] = field(default_factory=dict)


class Gradients:
    """The gradients of one step on this rank. sizes: of each group's part of one rank, in elements."""

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], sizes: Sequence[int], dp: Group, *, tied: Sequence[Tensor]
    ) -> None:
        self.dp = dp
        shared = {id(parameter) for parameter in tied}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        for parameters, size in zip(groups, sizes, strict=True):
            late = any(id(p) in shared or comes_late(p) for p in parameters)
            bucket = _Bucket(list(parameters), size * dp.size, late)
            start = 0
            for parameter in parameters:
                bucket.starts[parameter] = start
                self._bucket_of[parameter] = bucket
                start += parameter.numel()
            self._buckets.append(bucket)
        # The same on all data ranks: what may go early first.
        self._order = sorted(self._buckets, key=lambda bucket: bucket.late)
        self._own: dict[Tensor, Tensor] = {}
        self._times: dict[Tensor, int] = {}
        self._micro_batches, self._overlaps, self._next = 1, False, 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in self._bucket_of
        ]

    def begin(self, micro_batches: int, *, overlap: bool) -> None:
        """Before the first of the backward passes of a step."""
        self.clear()
        self._micro_batches, self._overlaps, self._next = micro_batches, overlap, 0
        for bucket in self._buckets:
            bucket.missing, bucket.sent = len(bucket.parameters), False

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """Take over what autograd has left in parameter.grad."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self._bucket_of[parameter].sent:
            raise RuntimeError(f"a gradient of {pieces_of(parameter)[0].name} came after its sum was sent")
        own, times = self._own.get(parameter), self._times.get(parameter, 0) + 1
        if own is not None:
            own.add_(gradient)
        elif self.dp.size == 1:
            self._own[parameter] = gradient.float().contiguous()
        else:
            self._own[parameter] = self._place(parameter).copy_(gradient)
        self._times[parameter] = times
        if times == self._micro_batches:
            self._bucket_of[parameter].missing -= 1
            self._send_ready()

    def _place(self, parameter: Tensor) -> Tensor:
        """Where the gradient of a parameter lies in its bucket."""
        bucket = self._bucket_of[parameter]
        if bucket.flat is None:
            bucket.flat = parameter.new_empty(bucket.size, dtype=torch.float32)
            bucket.flat[sum(p.numel() for p in bucket.parameters) :].zero_()
        start = bucket.starts[parameter]
        return bucket.flat[start : start + parameter.numel()].view(parameter.shape)

    def own(self, parameter: Tensor) -> Tensor:
        """What this rank has added up, zeros where nothing came. Before it is averaged only."""
        if parameter not in self._own:
            alone = self.dp.size == 1
            zeros = (
                torch.zeros_like(parameter, dtype=torch.float32) if alone else self._place(parameter).zero_()
            )
            self._own[parameter] = zeros
        return self._own[parameter]

    def _send_ready(self) -> None:
        """Send the buckets that are complete, as far as those before them are sent."""
        if not self._overlaps:
            return
        while self._next < len(self._order):
            bucket = self._order[self._next]
            if bucket.late or bucket.missing:
                return
            self._send(bucket)
            self._next += 1
        for bucket in self._order[: self._next]:
            if bucket.work is not None and bucket.work.is_completed():
                self._receive(bucket)

    def _send(self, bucket: _Bucket) -> None:
        for parameter in bucket.parameters:
            self.own(parameter)
        flat, bucket.sent = bucket.flat, True
        if flat is None:
            return  # a bucket without a parameter
        if flat.is_cuda:  # in place: NCCL takes a result that lies where this rank's part does
            bucket.work = scatter_started(self._mine(bucket, flat), flat, self.dp)
        else:
            bucket.work = dist.all_reduce(flat, group=self.dp.handle, async_op=True)

    def _receive(self, bucket: _Bucket) -> None:
        """Wait for a bucket's sum and let go of its buffer."""
        if bucket.work is None or bucket.flat is None:
            return
        bucket.work.wait()
        bucket.part = self._mine(bucket, bucket.flat) / self.dp.size
        bucket.work = bucket.flat = None
        for parameter in bucket.parameters:
            del self._own[parameter]

    def _mine(self, bucket: _Bucket, flat: Tensor) -> Tensor:
        size = bucket.size // self.dp.size
        return flat[self.dp.rank * size : (self.dp.rank + 1) * size]

    @torch.no_grad()
    def average(self) -> None:
        """The mean over dp of everything, each rank its part. Collective over dp."""
        if self.dp.size == 1:
            for parameter in self._bucket_of:
                self.own(parameter)
            return
        for bucket in self._order[self._next :]:
            self._send(bucket)
        self._next = len(self._order)
        for bucket in self._order:
            self._receive(bucket)

    def averaged(self, parameter: Tensor, *, start: int, length: int, at: int) -> Tensor:
        """Elements [start, start + length) of a parameter's mean, as a flat live view; they lie at `at` of
        this rank's part of its group."""
        if self.dp.size == 1:
            return self._own[parameter].view(-1).narrow(0, start, length)
        part = self._bucket_of[parameter].part
        assert part is not None
        return part.narrow(0, at, length)

    @torch.no_grad()
    def sum_tied(self, pairs: Sequence[tuple[Tensor, dist.ProcessGroup]]) -> None:
        """Add up the averaged gradients of weights that two stages hold. Collective over their groups.

        After the mean, of which both hold the same part, so that their masters stay equal bit by bit.
        """
        for weight, group in pairs:
            part = self._own[weight] if self.dp.size == 1 else self._bucket_of[weight].part
            assert part is not None
            dist.all_reduce(part, group=group)

    def clear(self) -> None:
        """Forget all gradients."""
        self._own.clear()
        self._times.clear()
        for bucket in self._buckets:
            bucket.flat = bucket.part = bucket.work = None

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self.clear()


def comes_late(parameter: Tensor) -> bool:
    """Whether a gradient is one summand of several over tp, which are added up after backward."""
    return any(piece.summed for piece in pieces_of(parameter))


def split_groups(optimizer: torch.optim.Optimizer, *, bucket_bytes: int, tied: Sequence[Tensor] = ()) -> None:
    """Cut the optimizer's parameter groups into buckets of about so many bytes of gradients in fp32.

    In the order in which backward comes by, last layers first; what has to wait for the end of backward
    stands in buckets of its own, each tied weight in one, which is the same on all stages. Settings of the
    groups are kept.
    """
    shared = {id(parameter) for parameter in tied}
    made = []
    for group in optimizer.param_groups:
        alone = [[p] for p in group["params"] if id(p) in shared]
        late = [p for p in group["params"] if id(p) not in shared and comes_late(p)]
        waiting = shared | {id(p) for p in late}
        buckets: list[list[Tensor]] = [[]]
        size = 0
        for parameter in reversed(group["params"]):
            if id(parameter) in waiting:
                continue
            if buckets[-1] and size + 4 * parameter.numel() > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += 4 * parameter.numel()
        made += [{**group, "params": bucket} for bucket in (*buckets, late, *alone) if bucket]
    optimizer.param_groups[:] = made
