"""Linear layers and embeddings split over the tensor-parallel group (Megatron's column and row split).

B batch, S sequence length, D width, V vocabulary. Under sequence parallelism x outside the tensor-parallel
regions is this rank's (B, S / tp, D); inside, and always without it, the sequence is whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.collectives import copy_to, gather_sequence, reduce_from, scatter_sequence
from parallel.lookup import rows_of
from parallel.mesh import SINGLE, Group
from parallel.piece import Fill, Piece, tag
from parallel.product import Product, entered


@dataclass(frozen=True)
class TensorParallel:
    """The tp group and whether activations outside its regions are split over the sequence."""

    group: Group = SINGLE
    sequence: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """x as stored between the regions -> whole x, with its gradient summed on the way back."""
        return gather_sequence(x, self.group) if self.sequence else copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums of whole x -> x as stored between the regions."""
        return scatter_sequence(x, self.group) if self.sequence else reduce_from(x, self.group)


@dataclass(frozen=True)
class Heads:
    """One output of a ColumnLinear: `count` blocks of `width` rows, split over tp by whole blocks.

    With fewer blocks than ranks, tp / count neighbouring ranks hold the same block.
    """

    count: int
    width: int = 1

    def local_blocks(self, group: Group) -> tuple[int, int]:
        """(first block, number of blocks) of this rank; ValueError when it does not divide."""
        if self.count % group.size == 0:
            blocks = self.count // group.size
            return group.rank * blocks, blocks
        if group.size % self.count == 0:
            return group.rank * self.count // group.size, 1
        raise ValueError(
            f"{self.count} blocks of {self.width} cannot be split over tp ({group.size}); "
            "one must be a multiple of the other"
        )

    def replicas(self, group: Group) -> int:
        """How many ranks hold the same block."""
        return max(1, group.size // self.count)


class ColumnLinear(nn.Module):
    """One product for several outputs that share their input: y_name = x W_name^T, rows split over tp.

    x (B, S, d_in), already entered -> one (B, S, local rows) per output, in the order of `outputs`. Their
    tensors are called name.output.weight; without a name, output.weight.
    """

    def __init__(
        self,
        name: str,
        d_in: int,
        outputs: Mapping[str, Heads],
        *,
        std: float,
        group: Group,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.product: Product = F.linear
        # Whether that widens 16-bit operands; None: it is neither product nor widened product.
        self.wide: bool | None = False
        self.sizes: list[int] = []
        weights: list[Piece] = []
        biases: list[Piece] = []
        for output, heads in outputs.items():
            first, blocks = heads.local_blocks(group)
            copies = heads.replicas(group)
            rows, total, at = blocks * heads.width, heads.count * heads.width, first * heads.width
            owner, summed = group.rank % copies == 0, copies > 1
            done = sum(self.sizes)
            full = f"{name}.{output}" if name else output
            weights.append(
                Piece(
                    f"{full}.weight",
                    (total, d_in),
                    (at, 0),
                    (rows, d_in),
                    done * d_in,
                    owner,
                    summed,
                )
            )
            biases.append(Piece(f"{full}.bias", (total,), (at,), (rows,), done, owner, summed))
            self.sizes.append(rows)
        self.weight = nn.Parameter(torch.empty(sum(self.sizes), d_in))
        tag(self.weight, weights, Fill(0.0, std))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes))) if bias else None
        if self.bias is not None:
            tag(self.bias, biases, Fill(0.0, 0.0))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.product(x, self.weight, self.bias).split(self.sizes, dim=-1)

    def entered(self, x: Tensor, parallel: TensorParallel) -> tuple[Tensor, ...]:
        """The same of x (B, S, D) between the regions, which enters for this product alone."""
        if parallel.group.size == 1 or self.wide is None:
            return self(parallel.enter(x))
        y = entered(x, self.weight, self.bias, parallel.group, parallel.sequence, self.wide)
        return y.split(self.sizes, dim=-1)


class RowLinear(nn.Module):
    """y = sum over tp of x_local W_local^T, columns split over tp; leaves the region.

    x (B, S, local columns) -> (B, S, d_out), or (B, S / tp, d_out) under sequence parallelism.
    """

    def __init__(
        self, name: str, d_in: int, d_out: int, *, std: float, parallel: TensorParallel, bias: bool = False
    ) -> None:
        super().__init__()
        self.product: Product = F.linear
        group = parallel.group
        if d_in % group.size:
            raise ValueError(f"{name}: {d_in} columns cannot be split over tp ({group.size})")
        self.parallel = parallel
        columns = d_in // group.size
        self.weight = nn.Parameter(torch.empty(d_out, columns))
        piece = Piece(f"{name}.weight", (d_out, d_in), (0, group.rank * columns), (d_out, columns))
        tag(self.weight, [piece], Fill(0.0, std))
        self.bias = replicated(f"{name}.bias", d_out, Fill(0.0, 0.0), parallel) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.parallel.leave(self.product(x, self.weight, None))
        return y if self.bias is None else y + self.bias


def replicated(
    name: str, shape: int | tuple[int, ...], fill: Fill, parallel: TensorParallel, *, inside: bool = False
) -> nn.Parameter:
    """A tensor that every tp rank holds whole.

    Used outside the regions, each rank sees the same, but under sequence parallelism only its tokens: then
    its gradient is one summand. `inside` a region each rank works for its own heads or experts: always one.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    parameter = nn.Parameter(torch.empty(shape))
    summed = (inside and parallel.group.size > 1) or parallel.sequence
    piece = Piece(name, shape, (0,) * len(shape), shape, owner=parallel.group.rank == 0, summed=summed)
    tag(parameter, [piece], fill)
    return parameter


def by_heads(name: str, heads: Heads, fill: Fill, group: Group) -> nn.Parameter:
    """A vector of `count` blocks of `width`, split over tp as the rows of a ColumnLinear's output are."""
    first, blocks = heads.local_blocks(group)
    copies = heads.replicas(group)
    rows = blocks * heads.width
    parameter = nn.Parameter(torch.empty(rows))
    owner, summed = group.rank % copies == 0, copies > 1
    piece = Piece(
        name, (heads.count * heads.width,), (first * heads.width,), (rows,), owner=owner, summed=summed
    )
    tag(parameter, [piece], fill)
    return parameter


class InnerLinear(nn.Module):
    """y = x W^T with the whole W on every rank, inside a region: what each rank then uses is its own."""

    def __init__(
        self, name: str, d_in: int, d_out: int, *, std: float, parallel: TensorParallel, bias: bool = False
    ) -> None:
        super().__init__()
        self.product: Product = F.linear
        weight = Fill(0.0, std)
        self.weight = replicated(f"{name}.weight", (d_out, d_in), weight, parallel, inside=True)
        zero = Fill(0.0, 0.0)
        self.bias = replicated(f"{name}.bias", d_out, zero, parallel, inside=True) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


@dataclass(frozen=True)
class VocabularyShard:
    """Rows [start, start + rows) of a vocabulary padded to a multiple of tp x 64; `true_rows` are real."""

    vocab_size: int
    group: Group

    @property
    def rows(self) -> int:
        size = self.group.size * 64
        return -(-self.vocab_size // size) * 64

    @property
    def start(self) -> int:
        return self.group.rank * self.rows

    @property
    def true_rows(self) -> int:
        return min(max(self.vocab_size - self.start, 0), self.rows)


class VocabularyMatrix(nn.Module):
    """A (V, D) matrix with rows split over tp: the embedding, the output head, or both (tied).

    Padding rows exist in memory only; they start at zero and never receive a gradient.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        d_model: int,
        *,
        std: float,
        parallel: TensorParallel,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.shard = VocabularyShard(vocab_size, parallel.group)
        self.weight = nn.Parameter(torch.empty(self.shard.rows, d_model))
        rows = self.shard.true_rows
        offset = min(self.shard.start, vocab_size)
        piece = Piece(f"{name}.weight", (vocab_size, d_model), (offset, 0), (rows, d_model))
        tag(self.weight, [piece], Fill(0.0, std))
        self.bias = VocabularyBias(f"{name}.bias", vocab_size, parallel.group) if bias else None

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) -> (B, S, D), or (B, S / tp, D) under sequence parallelism."""
        if self.parallel.group.size == 1:
            return rows_of(tokens, self.weight)
        local = tokens - self.shard.start
        ours = (local >= 0) & (local < self.shard.rows)
        x = rows_of(local.clamp(0, self.shard.rows - 1), self.weight)
        return self.parallel.leave(x * ours.unsqueeze(-1))


class VocabularyBias(nn.Module):
    """A number for each token of the vocabulary, split and padded as the rows of its matrix."""

    def __init__(self, name: str, vocab_size: int, group: Group) -> None:
        super().__init__()
        shard = VocabularyShard(vocab_size, group)
        self.rows = shard.true_rows
        self.weight = nn.Parameter(torch.empty(shard.rows))
        offset = (min(shard.start, vocab_size),)
        tag(self.weight, [Piece(name, (vocab_size,), offset, (self.rows,))], Fill(0.0, 0.0))

    def forward(self, logits: Tensor) -> Tensor:
        """logits (B, S, true rows of this rank) -> the same with the bias added."""
        return logits + self.weight[: self.rows]
