"""The decoder as a list of layers that a pipeline can cut anywhere.

B batch, S sequence length, D width, V vocabulary. Stages exchange only (x, positions, samples): positions
that restart at 0 are the document mask, samples are the global sample numbers that key dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megamodel.accounting import block_matrices
from megamodel.auxiliary import Auxiliary
from megamodel.block import Block, Recompute, Stream, standard_deviation
from megamodel.cache import Cache
from megamodel.config import Logits, Model
from megamodel.dropout import Clock, KeyedDropout
from megamodel.init import initialise
from megamodel.kernels.head import Projection, VocabularyRows, projected
from megamodel.norm import build_norm
from megamodel.position import (
    ABSOLUTE,
    OWN,
    Buckets,
    Position,
    Rope,
    Site,
    build_absolute,
    build_position,
)
from parallel.tensor import TensorParallel, VocabularyBias, VocabularyMatrix


class Embedding(nn.Module):
    """(tokens, positions, samples) -> (x, positions, samples). Holds the head's matrix too when tied.

    What needs weights of its own before the first block stands in `Entry`, so that a tied copy has none.
    """

    def __init__(self, settings: Model, *, seed: int, clock: Clock, parallel: TensorParallel) -> None:
        super().__init__()
        self.matrix = VocabularyMatrix(
            "embedding",
            settings.vocab_size,
            settings.d_model,
            std=standard_deviation(settings)(settings.d_model),
            parallel=parallel,
        )
        self.parallel = parallel
        self.scale = settings.embedding.scale
        self.settings = settings.logits
        p = 0.0 if needs_entry(settings) else settings.dropout.embedding
        self.dropout = KeyedDropout(p, seed=seed, layer=-1, site="embedding", clock=clock)

    def forward(self, stream: Stream) -> Stream:
        tokens, positions, samples = stream
        x = self.matrix.embed(tokens)  # (B, S, D) or (B, S / tp, D)
        if self.scale != 1:
            x = x * self.scale
        first = self.parallel.group.rank * x.shape[1] if self.parallel.sequence else 0
        return self.dropout(x, samples, first_token=first), positions, samples

    def unembed(self, x: Tensor) -> Projection:
        """The tied head: x -> what logits are made of."""
        return projection(self.matrix, self.settings, x)


class Tail(nn.Module):
    """The bias of a tied head, which has to stand outside of what is tied."""

    def __init__(self, settings: Model, *, parallel: TensorParallel) -> None:
        super().__init__()
        self.bias = VocabularyBias("head.bias", settings.vocab_size, parallel.group)

    def forward(self, made: Projection) -> Projection:
        return Projection(made.x, replace(made.output, bias=self.bias.weight))


def needs_entry(settings: Model) -> bool:
    """Whether something stands between the embedding and the first block."""
    return isinstance(settings.position, ABSOLUTE) or settings.embedding.norm


class Entry(nn.Module):
    """Absolute positions, the embedding's norm and dropout: (x, positions, samples) -> the same."""

    def __init__(self, settings: Model, *, seed: int, clock: Clock, parallel: TensorParallel) -> None:
        super().__init__()
        self.position = build_absolute(settings.position, site("position", settings, parallel))
        norm = settings.embedding.norm
        self.norm = (
            build_norm(settings.norm, "embedding_norm", settings.d_model, parallel) if norm else nn.Identity()
        )
        self.parallel = parallel
        self.dropout = KeyedDropout(
            settings.dropout.embedding, seed=seed, layer=-1, site="embedding", clock=clock
        )

    def forward(self, stream: Stream) -> Stream:
        x, positions, samples = stream
        first, length = 0, x.shape[1]
        if self.parallel.sequence:
            first = self.parallel.group.rank * length
        places = positions[:, first : first + length].clamp(min=0)
        x = self.norm(self.position.embed(x, places))
        return self.dropout(x, samples, first_token=first), positions, samples


class FinalNorm(nn.Module):
    """(x, positions, samples) -> the normalised x alone; post-norm layouts have no norm here."""

    def __init__(self, settings: Model, *, parallel: TensorParallel) -> None:
        super().__init__()
        self.norm = (
            build_norm(settings.norm, "final_norm", settings.d_model, parallel)
            if settings.has_final_norm
            else nn.Identity()
        )

    def forward(self, stream: Stream) -> Tensor:
        return self.norm(stream[0])


class Head(nn.Module):
    """The untied head: x (B, S, D) or (B, S / tp, D) -> what logits are made of."""

    def __init__(self, settings: Model, *, parallel: TensorParallel) -> None:
        super().__init__()
        self.settings = settings.logits
        self.matrix = VocabularyMatrix(
            "head",
            settings.vocab_size,
            settings.d_model,
            std=standard_deviation(settings)(settings.d_model),
            parallel=parallel,
            bias=settings.logits.bias,
        )

    def forward(self, x: Tensor) -> Projection:
        return projection(self.matrix, self.settings, x)


def projection(matrix: VocabularyMatrix, settings: Logits, x: Tensor) -> Projection:
    """Hidden states, whole, with this rank's rows of the matrix: the loss makes of them what it needs."""
    shard = matrix.shard
    rows = VocabularyRows(
        count=shard.true_rows,
        start=shard.start,
        group=shard.group,
        scale=settings.scale,
        softcap=settings.softcap,
    )
    bias = None if matrix.bias is None else matrix.bias.weight
    return projected(matrix.parallel.enter(x), matrix.weight, bias, rows)


def site(name: str, settings: Model, parallel: TensorParallel, width: int | None = None) -> Site:
    """Where a position encoding of this name stands; width of what it turns or compares."""
    return Site(
        name=name,
        n_heads=settings.attention.n_heads,
        head_width=width or settings.attention.query_width,
        d_model=settings.d_model,
        std=standard_deviation(settings)(settings.d_model),
        parallel=parallel,
    )


class Positions:
    """The position encoding of each layer; those without weights of their own, or shared, are built once."""

    def __init__(self, settings: Model, parallel: TensorParallel) -> None:
        self.settings, self.parallel = settings, parallel
        self.shared: list[tuple[object, Position]] = []

    def of(self, layer: int) -> Position:
        """The encoding of one layer."""
        chosen, attention = self.settings.layer(layer).position, self.settings.attention
        width = attention.rotary_width if isinstance(chosen, Rope.Config) else attention.query_width
        own = isinstance(chosen, OWN) and not (isinstance(chosen, Buckets.Config) and chosen.shared)
        if own:
            return build_position(
                chosen, site(f"blocks.{layer}.attention.position", self.settings, self.parallel, width)
            )
        for seen, built in self.shared:
            if seen == chosen:
                return built
        name = f"position.{layer}" if self.shared else "position"
        built = build_position(chosen, site(name, self.settings, self.parallel, width))
        self.shared.append((chosen, built))
        return built


def _unembed(embedding: nn.Module, x: Tensor) -> Projection:
    assert isinstance(embedding, Embedding)
    return embedding.unembed(x)


@dataclass(frozen=True)
class Layer:
    """How to build one layer where it is needed, and what it costs for the balance over stages.

    tied: layers of one key share one module; `apply` is used instead of its forward.
    """

    build: Callable[[], nn.Module]
    cost: float
    is_block: bool = False
    tied: str | None = None
    apply: Callable[[nn.Module, Tensor], Projection] | None = None


def layers(
    settings: Model,
    *,
    seed: int,
    documents: bool,
    parallel: TensorParallel,
    recompute: Recompute = "none",
    recompute_every: int = 1,
    clock: Clock | None = None,
    auxiliary: Auxiliary | None = None,
    initial: bool = True,
    equip: Callable[[nn.Module], None] = lambda module: None,
) -> list[Layer]:
    """The model as layer builders. Each builds with its initial weights, the same at every layout.

    Costs are matrix elements that a token is multiplied with; the embedding counts as a look-up. With
    initial=False the weights are left as the memory is, to be loaded. equip is called with each layer that
    was built (see megamodel.choose). recompute counts for every recompute_every-th block, from the first.
    """
    clock, auxiliary = clock or Clock(), auxiliary or Auxiliary()
    positions = Positions(settings, parallel)

    def started(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def finished() -> nn.Module:
            module = initialise(build(), seed=seed) if initial else build()
            equip(module)
            return module

        return finished

    def block(layer: int) -> Layer:
        build = started(
            lambda: Block(
                settings,
                layer,
                position=positions.of(layer),
                documents=documents,
                seed=seed,
                clock=clock,
                recompute="none" if layer % recompute_every else recompute,
                parallel=parallel,
                auxiliary=auxiliary,
            )
        )
        return Layer(build, cost=float(sum(block_matrices(settings, layer))), is_block=True)

    width, vocabulary_cost = float(settings.d_model), float(settings.vocab_size * settings.d_model)
    tied = "embedding" if settings.tie_embeddings else None
    embedding = started(lambda: Embedding(settings, seed=seed, clock=clock, parallel=parallel))
    entry = Layer(started(lambda: Entry(settings, seed=seed, clock=clock, parallel=parallel)), cost=width)
    head = (
        Layer(embedding, cost=vocabulary_cost, tied=tied, apply=_unembed)
        if settings.tie_embeddings
        else Layer(started(lambda: Head(settings, parallel=parallel)), cost=vocabulary_cost)
    )
    tail = Layer(started(lambda: Tail(settings, parallel=parallel)), cost=float(settings.vocab_size))
    return [
        Layer(embedding, cost=width, tied=tied),
        *([entry] if needs_entry(settings) else []),
        *[block(layer) for layer in range(settings.n_layers)],
        Layer(started(lambda: FinalNorm(settings, parallel=parallel)), cost=width),
        head,
        *([tail] if settings.tie_embeddings and settings.logits.bias else []),
    ]


class Transformer(nn.Module):
    """The whole model in one process, or of one tp rank: tokens (B, S) int64 -> logits (B, S, V)."""

    def __init__(
        self,
        settings: Model,
        *,
        seed: int = 0,
        documents: bool = False,
        recompute: Recompute = "none",
        initial: bool = True,
        parallel: TensorParallel | None = None,
        equip: Callable[[nn.Module], None] = lambda module: None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.clock = Clock()
        self.auxiliary = Auxiliary()
        self.parallel = parallel or TensorParallel()
        self._parts = layers(
            settings,
            seed=seed,
            documents=documents,
            parallel=self.parallel,
            recompute=recompute,
            clock=self.clock,
            auxiliary=self.auxiliary,
            initial=initial,
            equip=equip,
        )
        built: dict[str, nn.Module] = {}
        self.layers = nn.ModuleList()
        for part in self._parts:
            module = built.get(part.tied or "") or part.build()
            if part.tied:
                built[part.tied] = module
            self.layers.append(module)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        samples: Tensor | None = None,
        caches: list[Cache] | None = None,
    ) -> Tensor:
        """The logits. positions default to 0 .. S - 1; samples, which key dropout, to 0 .. B - 1.

        caches, one a block: what earlier calls saw is seen too; positions are then needed, -1 for padding.
        """
        return self.project(tokens, positions, samples, caches).logits()

    def project(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        samples: Tensor | None = None,
        caches: list[Cache] | None = None,
    ) -> Projection:
        """The same before the logits are made, for a loss that does not need all of them."""
        rows, length = tokens.shape
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand(rows, length)
        if samples is None:
            samples = torch.arange(rows, device=tokens.device)
        remaining = iter(caches) if caches is not None else None
        x: Stream | Tensor | Projection = (tokens, positions, samples)
        for part, module in zip(self._parts, self.layers, strict=True):
            if part.is_block and remaining is not None:
                x = module(x, next(remaining))
            else:
                x = part.apply(module, x) if part.apply else module(x)  # type: ignore[arg-type]
        assert isinstance(x, Projection)
        return x

    def regime(self, length: int) -> tuple[int, ...]:
        """What positions make of a text of this length; memories hold for texts of one regime."""
        blocks = [module for module in self.layers if isinstance(module, Block)]
        return tuple(block.regime(length) for block in blocks)

    def caches(self, capacity: int) -> list[Cache]:
        """Empty memories for texts of up to `capacity` tokens."""
        windows = [layer.attention.window for layer in self.settings.layers]
        return [Cache(capacity=capacity, window=window) for window in windows]
