"""The decoder as a list of layers that a pipeline can cut anywhere.

B batch, S sequence length, D width, V vocabulary. Stages exchange only (x, positions, samples): positions
that restart at 0 are the document mask, samples are the global sample numbers that key dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamodel.block import Block, Stream, standard_deviation
from megamodel.config import Model
from megamodel.dropout import Clock, KeyedDropout
from megamodel.init import initialise
from megamodel.norm import build_norm
from megamodel.position import build_position
from parallel.tensor import TensorParallel, VocabularyMatrix


class Embedding(nn.Module):
    """(tokens, positions, samples) -> (x, positions, samples). Holds the head's matrix too when tied."""

    def __init__(self, settings: Model, *, seed: int, clock: Clock, parallel: TensorParallel) -> None:
        super().__init__()
        std = standard_deviation(settings)(settings.d_model)
        self.matrix = VocabularyMatrix(
            "embedding", settings.vocab_size, settings.d_model, std=std, parallel=parallel
        )
        self.parallel = parallel
        self.dropout = KeyedDropout(
            settings.dropout.embedding, seed=seed, layer=-1, site="embedding", clock=clock
        )

    def forward(self, stream: Stream) -> Stream:
        tokens, positions, samples = stream
        x = self.matrix.embed(tokens)  # (B, S, D) or (B, S / tp, D)
        first = self.parallel.group.rank * x.shape[1] if self.parallel.sequence else 0
        return self.dropout(x, samples, first_token=first), positions, samples

    def unembed(self, x: Tensor) -> Tensor:
        """The tied head: x -> logits of this rank's vocabulary rows."""
        return self.matrix.logits(x)


class FinalNorm(nn.Module):
    """(x, positions, samples) -> the normalised x alone."""

    def __init__(self, settings: Model, *, parallel: TensorParallel) -> None:
        super().__init__()
        self.norm = build_norm(settings.norm, "final_norm", settings.d_model, parallel)

    def forward(self, stream: Stream) -> Tensor:
        return self.norm(stream[0])


class Head(nn.Module):
    """The untied head: x (B, S, D) or (B, S / tp, D) -> logits (B, S, this rank's true rows)."""

    def __init__(self, settings: Model, *, parallel: TensorParallel) -> None:
        super().__init__()
        std = standard_deviation(settings)(settings.d_model)
        self.matrix = VocabularyMatrix(
            "head", settings.vocab_size, settings.d_model, std=std, parallel=parallel
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.logits(x)


def _unembed(embedding: nn.Module, x: Tensor) -> Tensor:
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
    apply: Callable[[nn.Module, Tensor], Tensor] | None = None


def layers(
    settings: Model,
    *,
    seed: int,
    documents: bool,
    parallel: TensorParallel,
    recompute: bool = False,
    clock: Clock | None = None,
) -> list[Layer]:
    """The model as layer builders. Each builds with its initial weights, the same at every layout.

    Costs are matrix elements that a token is multiplied with; the embedding counts as a look-up.
    """
    clock = clock or Clock()
    position = build_position(settings.position, settings.attention.head_width)

    def started(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: initialise(build(), seed=seed)

    def block(layer: int) -> Layer:
        build = started(
            lambda: Block(
                settings,
                layer,
                position=position,
                documents=documents,
                seed=seed,
                clock=clock,
                recompute=recompute,
                parallel=parallel,
            )
        )
        return Layer(build, cost=block_cost(settings), is_block=True)

    vocabulary_cost = float(settings.vocab_size * settings.d_model)
    tied = "embedding" if settings.tie_embeddings else None
    embedding = started(lambda: Embedding(settings, seed=seed, clock=clock, parallel=parallel))
    head = (
        Layer(embedding, cost=vocabulary_cost, tied=tied, apply=_unembed)
        if settings.tie_embeddings
        else Layer(started(lambda: Head(settings, parallel=parallel)), cost=vocabulary_cost)
    )
    return [
        Layer(embedding, cost=float(settings.d_model), tied=tied),
        *[block(layer) for layer in range(settings.n_layers)],
        Layer(started(lambda: FinalNorm(settings, parallel=parallel)), cost=float(settings.d_model)),
        head,
    ]


def block_cost(settings: Model) -> float:
    """Matrix elements of one block, over all tp ranks."""
    attention, feedforward = settings.attention, settings.feedforward
    heads = 2 * attention.n_heads + 2 * attention.n_kv_heads
    matrices = 3 if feedforward.gated else 2
    return float(settings.d_model * (heads * attention.head_width + matrices * feedforward.d_ff))


class Transformer(nn.Module):
    """The whole model in one process: tokens (B, S) int64 -> logits (B, S, V)."""

    def __init__(
        self, settings: Model, *, seed: int = 0, documents: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.settings = settings
        self.clock = Clock()
        self._parts = layers(
            settings,
            seed=seed,
            documents=documents,
            parallel=TensorParallel(),
            recompute=recompute,
            clock=self.clock,
        )
        built: dict[str, nn.Module] = {}
        self.layers = nn.ModuleList()
        for part in self._parts:
            module = built.get(part.tied or "") or part.build()
            if part.tied:
                built[part.tied] = module
            self.layers.append(module)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, samples: Tensor | None = None
    ) -> Tensor:
        """positions default to 0 .. S - 1; samples, which key dropout, to 0 .. B - 1."""
        rows, length = tokens.shape
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand(rows, length)
        if samples is None:
            samples = torch.arange(rows, device=tokens.device)
        x: Stream | Tensor = (tokens, positions, samples)
        for part, module in zip(self._parts, self.layers, strict=True):
            x = part.apply(module, x) if part.apply else module(x)  # type: ignore[arg-type]
        assert isinstance(x, Tensor)
        return x
