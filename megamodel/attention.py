"""Attention with grouped key/value heads (MHA: K = H, MQA: K = 1), and what every attention shares.

B batch, S sequence length, H query heads, K key/value heads, E head width; h and k this rank's share.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from conf.typed import config, setting
from megamodel.attend import Attend, Seen, Sparse, document_lengths
from megamodel.cache import Cache
from megamodel.dropout import KeyedDropout
from megamodel.norm import Norm, Normalise, ProjectionNorm, build_head_norm, build_norm
from megamodel.position import Position, Rope
from parallel.piece import Fill
from parallel.tensor import ColumnLinear, Heads, RowLinear, TensorParallel, by_heads


@config
class QkNorm:
    """A norm of queries and keys before they are rotated."""

    scope: Literal["none", "head", "each_head", "projection"] = setting(
        "none",
        on_resume="must_equal",
        help="head: each alone, one gain for all; each_head: a gain each; projection: all heads at once",
    )
    norm: Norm = setting(factory=Norm, on_resume="must_equal", help="the norm")


@config
class Masked:
    """What every attention lets a query see, and how it scales the scores."""

    window: int | None = setting(
        None, on_resume="must_equal", help="a query sees this many keys, itself included; null: all"
    )
    sparse: Sparse = setting(
        "none", on_resume="must_equal", help="strided or fixed sparse pattern (Child et al. 2019)"
    )
    stride: int = setting(128, on_resume="must_equal", help="stride or block of the sparse pattern")
    summary: int = setting(8, on_resume="must_equal", help="fixed: last keys of a block that all may see")
    scale: float | None = setting(
        None, on_resume="must_equal", help="factor on q k^T; null: 1 / sqrt(width of a query)"
    )
    scale_by_layer: bool = setting(
        False, on_resume="must_equal", help="divide the scores by the number of the layer, from 1"
    )
    softcap: float | None = setting(None, on_resume="must_equal", help="c tanh(score / c); null: none")

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"model.attention.window ({self.window}) must be at least 1, or null for none")
        if self.sparse != "none" and not 1 <= self.summary <= self.stride:
            raise ValueError(
                f"model.attention.stride ({self.stride}) must be at least 1 and summary ({self.summary}) "
                "from 1 to stride"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"model.attention.softcap ({self.softcap}) must be above 0, or null for none")

    @property
    def seen(self) -> Seen:
        return Seen(self.window, self.sparse, self.stride, self.summary)


@dataclass(frozen=True)
class Place:
    """Where an attention stands and what it is given, beside its settings."""

    name: str
    layer: int
    d_model: int
    position: Position
    std: float
    output_std: float
    documents: bool
    dropout: KeyedDropout
    parallel: TensorParallel
    projected: bool = False  # whether q, k and v are made outside, together with what else reads x

    def attend(self, settings: Masked, n_heads: int, width: int) -> Attend:
        scale = settings.scale if settings.scale is not None else width**-0.5
        return Attend(
            scale=scale / (self.layer + 1) if settings.scale_by_layer else scale,
            seen=settings.seen,
            documents=self.documents,
            dropout=self.dropout,
            first_head=Heads(n_heads).local_blocks(self.parallel.group)[0],
            softcap=settings.softcap,
        )


class GroupedAttention(nn.Module):
    """x -> o(attend(rotate(norm(q x)), rotate(norm(k x)), v x)); the three products are one."""

    @config
    class Config(Masked):
        kind: Literal["grouped"] = setting("grouped", on_resume="must_equal", help="grouped-query attention")
        n_heads: int = setting(8, on_resume="must_equal", help="query heads")
        n_kv_heads: int = setting(4, on_resume="must_equal", help="key/value heads; divides n_heads")
        head_width: int = setting(
            48, on_resume="must_equal", help="width of a head; heads x width may differ from d_model"
        )
        bias: bool = setting(False, on_resume="must_equal", help="biases of q, k and v")
        output_bias: bool = setting(False, on_resume="must_equal", help="bias of the output projection")
        qk_norm: QkNorm = setting(factory=QkNorm, on_resume="must_equal", help="norm of queries and keys")
        clip: float | None = setting(
            None, on_resume="must_equal", help="q, k and v are held within +- this; null: not"
        )
        sinks: bool = setting(
            False, on_resume="must_equal", help="a learned logit a head in the denominator of the softmax"
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            if min(self.n_heads, self.n_kv_heads, self.head_width) < 1:
                raise ValueError(
                    f"model.attention: n_heads ({self.n_heads}), n_kv_heads ({self.n_kv_heads}) and "
                    f"head_width ({self.head_width}) must be at least 1"
                )
            if self.n_heads % self.n_kv_heads:
                raise ValueError(
                    f"model.attention.n_heads ({self.n_heads}) must be a multiple of n_kv_heads "
                    f"({self.n_kv_heads}); use n_kv_heads in {_divisors(self.n_heads)}"
                )

        @property
        def query_width(self) -> int:
            """Width of what is compared."""
            return self.head_width

        @property
        def rotary_width(self) -> int:
            """Width that a position encoding may turn."""
            return self.head_width

        @property
        def value_width(self) -> int:
            return self.head_width

        @property
        def cached_width(self) -> int:
            """Numbers that a token leaves in the cache."""
            return 2 * self.n_kv_heads * self.head_width

        def outputs(self) -> dict[str, Heads]:
            """What is made of x."""
            keys = Heads(self.n_kv_heads, self.head_width)
            return {"q": Heads(self.n_heads, self.head_width), "k": keys, "v": keys}

        def matrix_elements(self, d_model: int) -> int:
            """Matrix elements that a token is multiplied with."""
            return d_model * 2 * (self.n_heads + self.n_kv_heads) * self.head_width

    def __init__(self, settings: "GroupedAttention.Config", place: Place) -> None:
        super().__init__()
        self.parallel = parallel = place.parallel
        self.head_width = width = settings.head_width
        self.clip = settings.clip
        outputs = settings.outputs()
        queries, keys = outputs["q"], outputs["k"]
        self.qkv = (
            None
            if place.projected
            else ColumnLinear(
                place.name,
                place.d_model,
                outputs,
                std=place.std,
                group=parallel.group,
                bias=settings.bias,
            )
        )
        self.output = RowLinear(
            f"{place.name}.output",
            settings.n_heads * width,
            place.d_model,
            std=place.output_std,
            parallel=parallel,
            bias=settings.output_bias,
        )
        self.q_norm = build_qk_norm(settings.qk_norm, f"{place.name}.q_norm", queries, parallel)
        self.k_norm = build_qk_norm(settings.qk_norm, f"{place.name}.k_norm", keys, parallel)
        self.sinks = sink_logits(settings.sinks, place.name, settings.n_heads, parallel)
        self.position = place.position
        self.norm_rotate: Callable[..., Tensor] | None = None  # both in one, where there is such a form
        self.attend = place.attend(settings, settings.n_heads, width)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        samples: Tensor,
        cache: Cache | None = None,
        projected: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """x (B, S, D) between the regions, positions (B, S), samples (B,) -> like x. projected: q, k, v."""
        made = projected if self.qkv is None else self.qkv.entered(x, self.parallel)
        assert made is not None
        q, k, v = (y.unflatten(-1, (-1, self.head_width)) for y in made)  # (B, S, h, E), (B, S, k, E) twice
        if self.norm_rotate is not None and cache is None:
            q, k = self._normed_and_rotated(self.norm_rotate, q, k, positions)
            return self.output(self._attended(q, k, v, positions, samples, None).flatten(2))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (y.clamp(-self.clip, self.clip) for y in (q, k, v))
        if cache is None:
            lengths = lengths_for(self.position, positions, documents=self.attend.documents)
            q, k = self.position.rotate(q, k, positions, lengths)
            return self.output(self._attended(q, k, v, positions, samples, None).flatten(2))
        q, k, v, key_positions = remembered(self.position, cache, q, k, v, positions)
        return self.output(self._attended(q, k, v, positions, samples, key_positions).flatten(2))

    @property
    def can_norm_and_rotate(self) -> bool:
        """Whether queries and keys are normed head by head and then turned, with nothing between."""
        norms = isinstance(self.q_norm, Normalise) and isinstance(self.k_norm, Normalise)
        return norms and isinstance(self.position, Rope) and self.clip is None

    def _normed_and_rotated(
        self, operation: Callable[..., Tensor], q: Tensor, k: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        position, norms = self.position, (self.q_norm, self.k_norm)
        assert isinstance(position, Rope)
        lengths = lengths_for(position, positions, documents=self.attend.documents)
        cos, sin = position.angles(positions, lengths)
        done = []
        for x, norm in zip((q, k), norms, strict=True):
            assert isinstance(norm, Normalise)
            how = {**norm.how, "interleaved": position.interleaved}
            done.append(operation(x, norm.weight, norm.bias, cos, sin, **how))
        return done[0], done[1]

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        samples: Tensor,
        key_positions: Tensor | None,
    ) -> Tensor:
        keys = positions if key_positions is None else key_positions
        bias = self.position.bias(q, k, positions, keys, self.attend.scale) if self.position.biases else None
        return self.attend(
            q, k, v, positions, samples, bias=bias, sinks=self.sinks, key_positions=key_positions
        )


def lengths_for(position: Position, positions: Tensor, *, documents: bool) -> Tensor | None:
    """The lengths that a position encoding needs, if it does."""
    return document_lengths(positions, documents=documents) if position.varies else None


def remembered(
    position: Position, cache: Cache, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotated q, all rotated keys, all values and the keys' positions, with k and v put into the cache."""
    lengths = lengths_for(position, positions, documents=False)
    q, k = position.rotate(q, k, positions.clamp(min=0), lengths)
    (k, v), key_positions = cache.extend([k, v], positions)
    return q, k, v, key_positions


def build_qk_norm(settings: QkNorm, name: str, heads: Heads, parallel: TensorParallel) -> nn.Module:
    """The norm of one of the projections, (B, S, h, E) -> the same."""
    if settings.scope == "none":
        return nn.Identity()
    if settings.scope == "head":
        return build_norm(settings.norm, name, heads.width, parallel, inside=True)
    if settings.scope == "each_head":
        return build_head_norm(settings.norm, name, heads, parallel.group)
    return ProjectionNorm(settings.norm, name, heads, parallel.group)


def sink_logits(present: bool, name: str, n_heads: int, parallel: TensorParallel) -> nn.Parameter | None:
    """A logit for each head, starting at 0."""
    if not present:
        return None
    return by_heads(f"{name}.sinks", Heads(n_heads), Fill(0.0, 0.0), parallel.group)


def narrowed(settings: Any, **changes: object) -> Any:
    """The settings of one layer, where it differs from the model's."""
    return dataclasses.replace(settings, **changes)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
