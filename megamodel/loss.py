"""Cross-entropy and z-loss over a vocabulary that is split over tp, in fp32.

B batch, S sequence length, N = B S rows, V true vocabulary, v this rank's true rows of it.
"""

import torch
from torch import Tensor

from megamodel.data.batch import IGNORE
from megamodel.kernels.head import Chunked, Projection, linear_cross_entropy
from parallel.collectives import all_reduce, all_reduce_max
from parallel.mesh import SINGLE, Group

_CHUNK_BYTES = 64 << 20  # fp32 workspace of one chunk of rows
_CACHE_BYTES = 4 << 20


class _VocabularyCrossEntropy(torch.autograd.Function):
    """logits (N, v), targets (N) -> loss, log Z, largest logit: (N) fp32 each; 0, 0, -inf where ignored."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, start: int, group: Group, consume: bool):
        rows, columns = logits.shape
        valid = targets != IGNORE
        local = targets - start
        ours = valid & (local >= 0) & (local < columns)
        index = local.clamp(0, max(columns - 1, 0)).unsqueeze(1)
        largest = logits.new_full((rows,), -torch.inf, dtype=torch.float32)
        if columns:
            torch.amax(logits, dim=1, out=largest) if logits.dtype == torch.float32 else largest.copy_(
                logits.amax(1)
            )
        all_reduce_max(largest, group)
        sums = logits.new_zeros((2, rows), dtype=torch.float32)
        if columns:
            for part in _chunks(logits):
                sums[0, part] = torch.sub(logits[part].float(), largest[part, None]).exp_().sum(1)
            sums[1] = torch.where(ours, logits.gather(1, index).squeeze(1).float(), 0.0)
        all_reduce(sums, group)
        log_z = largest + sums[0].log()
        ctx.save_for_backward(logits, log_z, ours, index, valid)
        ctx.consume = consume
        loss = torch.where(valid, log_z - sums[1], 0.0)
        log_z = torch.where(valid, log_z, 0.0)
        largest = torch.where(valid, largest, -torch.inf)
        ctx.mark_non_differentiable(largest)
        return loss, log_z, largest

    @staticmethod
    def backward(ctx, grad_loss: Tensor, grad_log_z: Tensor, _: Tensor):  # type: ignore[override]
        logits, log_z, ours, index, valid = ctx.saved_tensors
        columns = logits.shape[1]
        grad = logits if ctx.consume else torch.empty_like(logits)
        if not columns:
            return grad, None, None, None, None
        grad_loss = torch.where(valid, grad_loss, 0.0)
        spread = grad_loss + torch.where(valid, grad_log_z, 0.0)  # both act through log Z
        hit = torch.where(ours, grad_loss, 0.0)
        in_place = logits.dtype == torch.float32
        whole = not logits.is_cuda and bool(valid.all())  # on a GPU to ask costs more than the answer saves
        for part in _chunks(logits):
            softmax = torch.sub(logits[part].float(), log_z[part, None], out=grad[part] if in_place else None)
            softmax.exp_().mul_(spread[part, None])
            softmax.scatter_add_(1, index[part], -hit[part, None])
            # An ignored row may hold anything, non-finite values included: its gradient is zero.
            if not whole:
                softmax.masked_fill_(~valid[part, None], 0.0)
            if not in_place:
                grad[part] = softmax
        return grad, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    """Rows that are worked on at once: what fits into a CPU's cache, or into a workspace on a GPU."""
    rows, columns = logits.shape
    step = max(1, (_CHUNK_BYTES if logits.is_cuda else _CACHE_BYTES) // (4 * columns))
    return [slice(a, min(a + step, rows)) for a in range(0, rows, step)]


def cross_entropy(
    logits: Tensor, targets: Tensor, *, start: int = 0, group: Group = SINGLE, consume: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(cross-entropy, log Z, largest logit), each (B, S) in fp32; 0, 0 and -inf where the target is IGNORE.

    logits (B, S, v) of the rows [start, start + v) of the true vocabulary; targets (B, S) int64. The
    gradient flows through the first two. log Z = logsumexp over the true vocabulary of all ranks. consume:
    the backward pass, which may run once, leaves the gradient in the memory of the logits.
    """
    rows = logits.reshape(targets.numel(), logits.shape[-1])
    outputs = _VocabularyCrossEntropy.apply(rows, targets.reshape(-1), start, group, consume)
    loss, log_z, largest = (x.view(targets.shape) for x in outputs)  # type: ignore[union-attr]
    return loss, log_z, largest


class Loss:
    """Weighted sum over a micro-batch, for the engine; what the metrics need is kept aside, detached.

    Called with logits (B, S, v) and labels (targets (B, S), weight scalar): returns
    weight x sum over valid tokens of (cross-entropy + z_weight (log Z)^2). With weight = micro-batches x
    dp / N, N the valid tokens of the global batch, DeepSpeed's two means make this the token mean. In place
    of logits it takes what they are made of: with `chunked` it never holds all of them, without it they are
    made by the definition, widened: with 16-bit operands multiplied in fp32. consume: see cross_entropy;
    for logits that nobody looks at again.
    """

    def __init__(
        self,
        *,
        z_weight: float,
        start: int = 0,
        group: Group = SINGLE,
        consume: bool = False,
        chunked: Chunked | None = None,
        widened: bool = False,
    ) -> None:
        self.z_weight = z_weight
        self.start = start
        self.group = group
        self.consume = consume
        self.chunked = chunked
        self.widened = widened
        self.reset()

    def reset(self) -> None:
        """Forget what was kept; before each step."""
        self.loss_sum: Tensor | None = None  # cross-entropy summed over this data rank's valid tokens, fp64
        self.z_sum: Tensor | None = None
        self.max_logit: Tensor | None = None
        self.max_log_z: Tensor | None = None
        self.per_sample: list[Tensor] = []  # (B, 2): sum and count of each row

    def __call__(self, made: Tensor | Projection, labels: tuple[Tensor, Tensor]) -> Tensor:
        targets, weight = labels
        if isinstance(made, Projection) and self.chunked is not None:
            return self._fused(made, targets, weight)
        logits = made.logits(widened=self.widened) if isinstance(made, Projection) else made
        loss, log_z, largest = cross_entropy(
            logits, targets, start=self.start, group=self.group, consume=self.consume
        )
        total = loss.sum()
        if self.z_weight:
            z = self.z_weight * log_z.square().sum()
            self._keep(loss, log_z, largest, targets, z.detach())
            return weight * (total + z)
        self._keep(loss, log_z, largest, targets, None)
        return weight * total

    def _fused(self, made: Projection, targets: Tensor, weight: Tensor) -> Tensor:
        objective, loss, log_z, largest = linear_cross_entropy(
            made, targets, weight, z_weight=self.z_weight, how=self.chunked
        )
        z = self.z_weight * log_z.square().sum() if self.z_weight else None
        self._keep(loss, log_z, largest, targets, z)
        return objective

    @torch.no_grad()
    def _keep(self, loss: Tensor, log_z: Tensor, largest: Tensor, targets: Tensor, z: Tensor | None) -> None:
        valid = targets != IGNORE
        rows = torch.stack((loss.detach().double().sum(-1), valid.sum(-1).double()), dim=-1)
        total = rows[:, 0].sum()
        self.loss_sum = total if self.loss_sum is None else self.loss_sum + total
        if z is not None:
            self.z_sum = z.double() if self.z_sum is None else self.z_sum + z.double()
        top, log_top = largest.max(), torch.where(valid, log_z.detach(), -torch.inf).max()
        self.max_logit = top if self.max_logit is None else torch.maximum(self.max_logit, top)
        self.max_log_z = log_top if self.max_log_z is None else torch.maximum(self.max_log_z, log_top)
        self.per_sample.append(rows)
