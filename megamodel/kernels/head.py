"""The output head and its loss in one: logits, cross-entropy and z-loss without ever holding all logits.

N tokens, D width, V true vocabulary, v this rank's true rows of it (the weight may have more, for padding).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megamodel.data.batch import IGNORE
from parallel.collectives import all_reduce, all_reduce_max
from parallel.mesh import SINGLE, Group

# Of logits, where nothing is asked for. On a GPU large chunks: each reads the whole matrix and its gradient.
WORKSPACE_BYTES = {"cpu": 128 << 20, "cuda": 384 << 20}
MOST_ROUNDED = 8  # chunks whose gradients of the matrix may be added up in 16 bit, each sum rounded
CACHE_BYTES = 1 << 20  # fp32 numbers of a few rows that are worked on while they lie in a CPU's cache


@dataclass(frozen=True)
class VocabularyRows:
    """This rank's part of the vocabulary, and how logits are made: cap(scale (x W^T + b)).

    count: true rows of the weight; start: number of the first in the vocabulary; group: who has the others.
    """

    count: int
    start: int = 0
    group: Group = SINGLE
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class OutputMatrix:
    """The head's weight, of whose rows the first rows.count are true, its bias, and what they are for."""

    weight: Tensor
    bias: Tensor | None
    rows: VocabularyRows


class Projection(NamedTuple):
    """Hidden states (B, S, D) with the head that they are for, before there are logits.

    A tuple, because DeepSpeed prepares a backward pass when it sees a tensor in what a stage gives; the
    matrix is hidden from it, because it would take that for an output too.
    """

    x: Tensor
    output: OutputMatrix

    def logits(self, *, widened: bool = False) -> Tensor:
        """(B, S, v) by the definition; widened: 16-bit operands are multiplied in fp32, and it stays fp32."""
        x, rows, bias = self.x, self.output.rows, self.output.bias
        weight, bias = self.output.weight[: rows.count], None if bias is None else bias[: rows.count]
        if widened:
            x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
        logits = F.linear(x, weight, bias)
        if rows.scale != 1:
            logits = logits * rows.scale
        if rows.softcap is not None:
            logits = rows.softcap * torch.tanh(logits / rows.softcap)
        return logits


def projected(x: Tensor, weight: Tensor, bias: Tensor | None, rows: VocabularyRows) -> Projection:
    return Projection(x, OutputMatrix(weight, bias, rows))


class Entropy(Protocol):
    """The two operations on a chunk of logits: see megamodel.kernels.reference."""

    @property
    def entropy(self) -> Callable[..., tuple[Tensor, Tensor, Tensor]]: ...
    @property
    def entropy_gradient(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Chunked:
    """How the fused head works. workspace_bytes: of the logits that are held at once, None: WORKSPACE_BYTES;
    wide: 16-bit operands are multiplied in fp32; operations: None for those of this file."""

    workspace_bytes: int | None = None
    wide: bool = False
    operations: Entropy | None = None


class _Fused(torch.autograd.Function):
    """The objective is a sum over tokens, so the gradient is known once log Z is: each chunk of logits is
    made, used for the loss and both gradients, and forgotten."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        coefficient: Tensor,
        z_weight: float,
        head: VocabularyRows,
        how: Chunked,
        gradients: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        work = _Work(x, weight, bias, head, how, gradients)
        coefficient = coefficient.to(device=x.device, dtype=torch.float32)
        rows = x.new_zeros((3, x.shape[0]), dtype=torch.float32)  # loss, log Z, largest logit
        for first in range(0, x.shape[0], work.chunk):
            part = slice(first, first + work.chunk)
            rows[:, part] = work.run(part, targets[part], coefficient, z_weight)
        valid = targets != IGNORE
        loss, log_z = (torch.where(valid, r, 0.0) for r in rows[:2])
        largest = torch.where(valid, rows[2], -torch.inf)
        objective = loss.sum()
        if z_weight:
            objective = objective + z_weight * log_z.square().sum()
        objective = coefficient * objective
        ctx.gradients = work.result()
        ctx.mark_non_differentiable(loss, log_z, largest)
        return objective, loss, log_z, largest

    @staticmethod
    def backward(ctx, upstream: Tensor, *_: Tensor):  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the fused head was run backward twice"
        # To ask a GPU whether there is anything to multiply by would cost more than to do it.
        if upstream.is_cuda or float(upstream) != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(upstream)
        return (*gradients, None, None, None, None, None, None)


class _Work:
    """The memory of one pass and what is done to a chunk of tokens."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: VocabularyRows,
        how: Chunked,
        gradients: tuple[bool, bool, bool],
    ) -> None:
        self.head, self.how, self.x = head, how, x
        self.compute = torch.float32 if how.wide else x.dtype
        self.weight = weight[: head.count].to(self.compute)
        self.bias = None if bias is None else bias[: head.count].to(self.compute)
        needs_x, needs_weight, needs_bias = gradients
        self.of_x = torch.empty_like(x) if needs_x else None
        workspace = how.workspace_bytes or WORKSPACE_BYTES[x.device.type]
        self.chunk, summed = self._plan(x, weight.shape[0], workspace)
        self.whole = weight.new_empty(weight.shape, dtype=summed) if needs_weight else None
        if self.whole is not None:
            self.whole[head.count if x.shape[0] else 0 :].zero_()  # the first chunk writes the rest
        self.target_dtype = weight.dtype
        self.of_bias = (
            bias.new_zeros(bias.shape, dtype=torch.float32) if needs_bias and bias is not None else None
        )

    def _plan(self, x: Tensor, rows: int, workspace: int) -> tuple[int, torch.dtype]:
        """(tokens of a chunk, what the matrix's gradient is added up in).

        By the padded rows, which are as many on every rank: all must come to the same collectives.
        """
        line = self.compute.itemsize * rows
        chunk = max(1, workspace // line)
        if chunk >= x.shape[0] or self.compute == torch.float32:
            return chunk, self.compute
        # Several 16-bit chunks: the sum in fp32 is part of the workspace where it leaves room for chunks. A
        # larger one is memory beside it, which is saved where few sums are rounded.
        of_sum = 4 * rows * x.shape[1]
        if of_sum <= workspace // 2:
            return max(1, (workspace - of_sum) // line), torch.float32
        return chunk, self.compute if -(-x.shape[0] // chunk) <= MOST_ROUNDED else torch.float32

    def run(self, part: slice, targets: Tensor, coefficient: Tensor, z_weight: float) -> Tensor:
        """(3, n): loss, log Z and largest logit of the tokens of a chunk; gradients are added up aside."""
        x = self.x[part].to(self.compute)
        logits = self._logits(x)
        if self.of_x is None and self.whole is None and self.of_bias is None:
            measure = statistics if self.how.operations is None else self.how.operations.entropy
            largest, total, target = measure(logits, targets, start=self.head.start)
            log_z, largest, target = reduced(largest, total, target, self.head.group)
            return torch.stack((log_z - target, log_z, largest))
        factor = coefficient * self.head.scale
        if self.head.group.size == 1 and not logits.is_cuda and self.how.operations is None:
            found = one_pass(logits, targets, factor, z_weight, self.head.softcap)
        else:
            found = two_passes(logits, targets, factor, z_weight, self.head, self.how.operations)
        self._add(part, x, logits)
        return found

    def _logits(self, x: Tensor) -> Tensor:
        logits = torch.mm(x, self.weight.t()) if self.bias is None else F.linear(x, self.weight, self.bias)
        if self.head.softcap is not None:
            return logits.mul_(self.head.scale / self.head.softcap).tanh_().mul_(self.head.softcap)
        return logits.mul_(self.head.scale) if self.head.scale != 1 else logits

    def _add(self, part: slice, x: Tensor, gradient: Tensor) -> None:
        if self.of_x is not None:
            if self.of_x.dtype == gradient.dtype:
                torch.mm(gradient, self.weight, out=self.of_x[part])
            else:
                self.of_x[part] = gradient @ self.weight
        if self.whole is not None:
            mine = self.whole[: self.head.count]
            if part.start == 0:
                # torch writes bf16 products into bf16 only.
                fits = mine.dtype == gradient.dtype
                torch.mm(gradient.t(), x, out=mine) if fits else mine.copy_(gradient.t() @ x)
            elif mine.dtype == gradient.dtype:
                mine.addmm_(gradient.t(), x)
            else:
                mine += gradient.t() @ x
        if self.of_bias is not None:
            self.of_bias[: self.head.count] += gradient.sum(0, dtype=torch.float32)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias."""
        whole = None if self.whole is None else self.whole.to(self.target_dtype)
        return self.of_x, whole, None if self.of_bias is None else self.of_bias.to(self.target_dtype)


def row_blocks(logits: Tensor) -> list[slice]:
    """Rows that are worked on at once: what fits into a CPU's cache, and on a GPU 64 MiB."""
    rows, columns = logits.shape
    step = max(1, (64 << 20 if logits.is_cuda else CACHE_BYTES) // (4 * max(columns, 1)))
    return [slice(first, first + step) for first in range(0, rows, max(step, 1))]


def local_targets(targets: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of each target, whether it is one of these columns)."""
    local = targets - start
    return local.clamp(0, max(columns - 1, 0)).unsqueeze(1), (targets != IGNORE) & (local >= 0) & (
        local < columns
    )


def statistics(logits: Tensor, targets: Tensor, *, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """(largest logit, sum of exp(logit - largest), the target's logit or 0) of these columns, (n) in fp32."""
    rows, columns = logits.shape
    largest = logits.new_full((rows,), -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(largest)
    if not columns:
        return largest, total, total.clone()
    index, ours = local_targets(targets, start, columns)
    for part in row_blocks(logits):
        wide = logits[part].float()
        largest[part] = wide.amax(1)
        total[part] = torch.sub(wide, largest[part, None]).exp_().sum(1)
    return largest, total, torch.where(ours, logits.gather(1, index).squeeze(1).float(), 0.0)


def reduced(largest: Tensor, total: Tensor, target: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """(log Z, largest logit, target's logit) of the whole vocabulary: one maximum and one sum over tp."""
    if group.size == 1:
        return largest + total.log(), largest, target
    everywhere = largest.clone()
    all_reduce_max(everywhere, group)
    # A rank without true rows has nothing to add; exp(-inf - -inf) would be no number.
    sums = torch.stack((torch.where(total > 0, total * (largest - everywhere).exp(), 0.0), target))
    all_reduce(sums, group)
    return everywhere + sums[0].log(), everywhere, sums[1]


def one_pass(
    logits: Tensor, targets: Tensor, factor: Tensor, z_weight: float, softcap: float | None
) -> Tensor:
    """(3, n): loss, log Z, largest logit; each logit is exponentiated once and becomes its gradient in place.

    d/dlogit = factor (p (1 + 2 z log Z) - [target]) (1 - (logit / cap)^2).
    """
    rows, columns = logits.shape
    found = logits.new_empty((3, rows), dtype=torch.float32)
    index, valid = local_targets(targets, 0, columns)
    own = logits.dtype == torch.float32
    blocks = row_blocks(logits)
    height = blocks[0].stop - blocks[0].start if blocks else 0
    buffer = None if own else logits.new_empty((height, columns), dtype=torch.float32)
    whole = bool(valid.all())
    for part in blocks:
        here = logits[part]
        wide = here if buffer is None else buffer[: here.shape[0]].copy_(here)
        slope = None if softcap is None else 1 - (wide / softcap).square()
        target = wide.gather(1, index[part])
        largest = wide.amax(1, keepdim=True)
        total = wide.sub_(largest).exp_().sum(1, keepdim=True)
        log_z = largest + total.log()
        found[0, part], found[1, part] = (log_z - target).squeeze(1), log_z.squeeze(1)
        found[2, part] = largest.squeeze(1)
        wide.mul_(factor * (1 + 2 * z_weight * log_z) / total)
        wide.scatter_add_(1, index[part], (-factor).expand(here.shape[0], 1))
        if slope is not None:
            wide.mul_(slope)
        if not whole:
            wide.masked_fill_(~valid[part, None], 0.0)
        if buffer is not None:
            here.copy_(wide)
    return found


def two_passes(
    logits: Tensor,
    targets: Tensor,
    factor: Tensor,
    z_weight: float,
    head: VocabularyRows,
    operations: Entropy | None,
) -> Tensor:
    """The same over several ranks or on a GPU: log Z of the whole vocabulary first, then the gradient."""
    measure = statistics if operations is None else operations.entropy
    differentiate = gradient_ if operations is None else operations.entropy_gradient
    largest, total, target = measure(logits, targets, start=head.start)
    log_z, largest, target = reduced(largest, total, target, head.group)
    of_loss = factor.expand(log_z.shape)
    of_log_z = 2 * z_weight * factor * log_z
    differentiate(logits, targets, log_z, of_loss, of_log_z, start=head.start, softcap=head.softcap)
    return torch.stack((log_z - target, log_z, largest))


def gradient_(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    of_loss: Tensor,
    of_log_z: Tensor,
    *,
    start: int,
    softcap: float | None,
) -> None:
    """Logits become the gradient that reference.entropy_gradient defines, in place."""
    columns = logits.shape[1]
    if not columns:
        return
    index, ours = local_targets(targets, start, columns)
    ignored = (targets == IGNORE).unsqueeze(1)
    both, hit = (of_loss + of_log_z).unsqueeze(1), torch.where(ours, -of_loss, 0.0).unsqueeze(1)
    for part in row_blocks(logits):
        wide = logits[part].float()
        slope = None if softcap is None else 1 - (wide / softcap).square()
        grad = wide.sub(log_z[part, None]).exp_().mul_(both[part])
        grad.scatter_add_(1, index[part], hit[part])
        if slope is not None:
            grad.mul_(slope)
        logits[part] = grad.masked_fill_(ignored[part], 0.0)


def linear_cross_entropy(
    projection: Projection,
    targets: Tensor,
    coefficient: Tensor,
    *,
    z_weight: float = 0.0,
    how: Chunked | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(objective, cross-entropy, log Z, largest logit): a number to differentiate, once, and (B, S) each.

    objective = coefficient sum over valid tokens of (cross-entropy + z_weight (log Z)^2), all in fp32; 0, 0
    and -inf where the target (B, S) is IGNORE. Holds workspace_bytes of logits at a time, and none after.
    """
    x, output, how = projection.x, projection.output, how or Chunked()
    tensors = (x, output.weight, output.bias)
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    objective, loss, log_z, largest = _Fused.apply(  # type: ignore[misc]
        x.reshape(-1, x.shape[-1]),
        output.weight,
        output.bias,
        targets.reshape(-1),
        coefficient,
        z_weight,
        output.rows,
        how,
        wanted,
    )
    return objective, loss.view(targets.shape), log_z.view(targets.shape), largest.view(targets.shape)
