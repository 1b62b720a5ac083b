"""How a token's position reaches the model.

B batch, S sequence length, H heads (h this rank's), E head width, R rotated width (even, <= E), D width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from conf.typed import config, setting, union
from megamodel.kernels import reference
from megamodel.rope_scaling import VARYING, Scaling, Unscaled, check_rotated, frequencies, regime
from parallel.lookup import rows_of
from parallel.piece import Fill, Piece, tag
from parallel.tensor import Heads, TensorParallel, by_heads, replicated


@dataclass(frozen=True)
class Site:
    """Where a position encoding stands: its name in the model, and the heads that it serves."""

    name: str
    n_heads: int
    head_width: int
    d_model: int
    std: float
    parallel: TensorParallel

    @property
    def local_heads(self) -> tuple[int, int]:
        """(first head, number of heads) of this rank."""
        return Heads(self.n_heads).local_blocks(self.parallel.group)


class Position(nn.Module):
    """The neutral base: no position information at all (NoPE). Variants override what they need."""

    @config
    class Config:
        kind: Literal["none"] = setting("none", on_resume="must_equal", help="no position encoding")

    embeds = False  # whether `embed` does anything
    biases = False  # whether `bias` gives anything
    varies = False  # whether `turn` needs the lengths of the documents

    def regime(self, length: int) -> int:
        """Texts of lengths in one regime turn their tokens alike; a memory holds for one regime."""
        return 0

    def prepare(self, positions: Tensor) -> None:
        """Make the tables that positions (B, S) of a training row need, outside of what is compiled."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, S, D), positions (B, S) -> x with absolute positions added."""
        return x

    def turn(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x (B, S, H, E), positions (B, S) -> x with relative positions turned in.

        lengths (B, S or 1): tokens of each token's document, for encodings that vary with it.
        """
        return x

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q (B, S, H, E), k (B, S, K, E), positions (B, S) -> both turned."""
        return self.turn(q, positions, lengths), self.turn(k, positions, lengths)

    def bias(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, scale: float
    ) -> Tensor | None:
        """q (B, S, h, E), k (B, N, k, E), positions (B, S) and (B, N) -> summand of the scaled scores.

        (B or 1, h, S, N) in fp32; scale is what q k^T is multiplied by.
        """
        return None


class Rope(Position):
    """Rotary embedding (Su et al. 2021): pair t is turned by m theta_t, theta_t = base^(-2 t / R).

    `half` pairs component t with t + R/2 (Llama as published by Hugging Face); `interleaved` pairs 2t with
    2t + 1 (the paper, GPT-J). Angles and tables are fp32 whatever the dtype of the model.
    """

    @config
    class Config:
        kind: Literal["rope"] = setting("rope", on_resume="must_equal", help="rotary embedding")
        base: float = setting(10000.0, on_resume="must_equal", help="theta_t = base^(-2 t / rotated width)")
        fraction: float = setting(1.0, on_resume="must_equal", help="rotated share of each head, (0, 1]")
        pairs: Literal["half", "interleaved"] = setting(
            "half", on_resume="must_equal", help="which two components are turned together"
        )
        scaling: Scaling = setting(
            factory=Unscaled, on_resume="must_equal", help="beyond the length that was trained"
        )

        def __post_init__(self) -> None:
            if self.base <= 1:
                raise ValueError(f"model.position.base ({self.base}) must be above 1; 10000 is usual")
            if not 0 < self.fraction <= 1:
                raise ValueError(f"model.position.fraction ({self.fraction}) must be in (0, 1]")

    def __init__(self, settings: "Rope.Config", head_width: int) -> None:
        super().__init__()
        self.rotated = rotated_width(settings, head_width)
        self.settings = settings
        self.interleaved = settings.pairs == "interleaved"
        self.rotation: Callable[..., Tensor] = reference.rotate
        self.varies = isinstance(settings.scaling, VARYING)
        if not self.varies:
            self.frequencies, self.factor = frequencies(settings.scaling, settings.base, self.rotated)
        # Plain attributes, not buffers: a cast of the model to bf16 must not round them.
        self._tables: tuple[Tensor, Tensor] | None = None

    def regime(self, length: int) -> int:
        return regime(self.settings.scaling, length)

    def prepare(self, positions: Tensor) -> None:
        if not self.varies:
            self.tables(positions.shape[-1], positions.device)

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, (at least length, R / 2) each, in fp32 on the device; grown when needed."""
        tables = self._tables
        if tables is None or tables[0].shape[0] < length or tables[0].device != device:
            size = 1 << max(length - 1, 1).bit_length()
            places = torch.arange(size, dtype=torch.float64, device="cpu")
            angles = places[:, None] * self.frequencies.double()
            cos, sin = ((f * self.factor).float().to(device) for f in (angles.cos(), angles.sin()))
            tables = (cos, sin)
            self._tables = tables
        return tables

    def turn(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.rotation(x, *self.angles(positions, lengths), interleaved=self.interleaved)

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        cos, sin = self.angles(positions, lengths)
        turned = (self.rotation(x, cos, sin, interleaved=self.interleaved) for x in (q, k))
        return next(turned), next(turned)

    def angles(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin of every pair, (B, S, R / 2) each, in fp32."""
        return self._varying(positions, lengths) if self.varies else self._looked_up(positions)

    def _looked_up(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        tables = self._tables
        # No look at the largest position where the number of tokens bounds it, as in training.
        length = positions.shape[-1]
        if positions.numel() and (tables is None or tables[0].shape[0] < length or not self.training):
            length = max(length, int(positions.max()) + 1)
        cos, sin = self.tables(length, positions.device)
        return cos[positions], sin[positions]

    def _varying(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        assert lengths is not None
        theta, factor = frequencies(self.settings.scaling, self.settings.base, self.rotated, lengths)
        angles = positions.double().unsqueeze(-1) * theta.double()
        return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def rotated_width(settings: "Rope.Config", head_width: int) -> int:
    """R = int(fraction E); ValueError unless it is even and fits the factors of the scaling."""
    rotated = int(head_width * settings.fraction)
    if rotated % 2 or not rotated:
        raise ValueError(
            f"RoPE turns pairs: head_width ({head_width}) x model.position.fraction "
            f"({settings.fraction}) gives {rotated} components; choose an even number"
        )
    check_rotated(settings.scaling, rotated)
    return rotated


class Sinusoidal(Position):
    """Added to the embedding: sin(i / base^(2k / D)) in channel 2k, cos in 2k + 1 (Vaswani et al. 2017)."""

    @config
    class Config:
        kind: Literal["sinusoidal"] = setting(
            "sinusoidal", on_resume="must_equal", help="fixed sines and cosines added to the embedding"
        )
        base: float = setting(10000.0, on_resume="must_equal", help="of the wavelengths")

    embeds = True

    def __init__(self, settings: "Sinusoidal.Config") -> None:
        super().__init__()
        self.base = settings.base

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        width = x.shape[-1]
        theta = self.base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
        angles = positions.double().unsqueeze(-1) * theta
        waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :width]
        return x + waves.to(x.dtype)


class Learned(Position):
    """Added to the embedding: row (position + offset) of a learned table (max_positions + offset, D)."""

    @config
    class Config:
        kind: Literal["learned"] = setting(
            "learned", on_resume="must_equal", help="a learned vector for each position"
        )
        max_positions: int = setting(1024, on_resume="must_equal", help="a longer input is an error")
        offset: int = setting(0, on_resume="must_equal", help="unused rows before position 0 (OPT: 2)")

        def __post_init__(self) -> None:
            if self.max_positions < 1 or self.offset < 0:
                raise ValueError(
                    f"model.position.max_positions ({self.max_positions}) must be at least 1 and "
                    f"model.position.offset ({self.offset}) at least 0"
                )

    embeds = True

    def __init__(self, settings: "Learned.Config", site: Site) -> None:
        super().__init__()
        self.settings = settings
        rows = settings.max_positions + settings.offset
        self.weight = replicated(
            f"{site.name}.weight", (rows, site.d_model), Fill(0.0, site.std), site.parallel
        )

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        # As many places as that may be beyond the end; only then a GPU is asked.
        longer = positions.shape[-1] > self.settings.max_positions or not self.training
        most = int(positions.max()) if longer and positions.numel() else 0
        if most >= self.settings.max_positions:
            raise ValueError(
                f"position {most} is beyond model.position.max_positions ({self.settings.max_positions}): "
                "learned positions end there"
            )
        return x + rows_of(positions + self.settings.offset, self.weight).to(x.dtype)


def alibi_slopes(n_heads: int) -> Tensor:
    """2^(-8 h / n), h = 1 .. n; no power of two: the next lower power's, then every second of twice it."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]

    lower = 1 << (n_heads.bit_length() - 1)
    slopes = powers(lower) + powers(2 * lower)[0::2][: n_heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


class Alibi(Position):
    """score - slope_h (i - j) (Press et al. 2021)."""

    @config
    class Config:
        kind: Literal["alibi"] = setting(
            "alibi", on_resume="must_equal", help="a penalty on the distance, by head"
        )
        before_scale: bool = setting(
            False, on_resume="must_equal", help="add before the scale of the scores (Falcon-RW)"
        )
        round_slopes: bool = setting(False, on_resume="must_equal", help="slopes rounded to bf16 (Falcon-RW)")

    biases = True

    def __init__(self, settings: "Alibi.Config", site: Site) -> None:
        super().__init__()
        first, count = site.local_heads
        slopes = alibi_slopes(site.n_heads)[first : first + count]
        self.slopes = slopes.bfloat16().float() if settings.round_slopes else slopes
        self.before_scale = settings.before_scale

    def bias(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, scale: float
    ) -> Tensor:
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).float()  # (B, S, N)
        if self.slopes.device != q.device:  # once: a copy from the host makes it wait
            self.slopes = self.slopes.to(q.device)
        slopes = self.slopes * (scale if self.before_scale else 1.0)
        return -slopes[:, None, None] * distance[:, None]


class Buckets(Position):
    """score + table[head, bucket(i - j)]: exact up to half of the buckets, logarithmic beyond (T5)."""

    @config
    class Config:
        kind: Literal["buckets"] = setting(
            "buckets", on_resume="must_equal", help="a learned bias for each bucket of distances"
        )
        buckets: int = setting(32, on_resume="must_equal", help="number of buckets")
        max_distance: int = setting(128, on_resume="must_equal", help="from here on all are in the last one")
        shared: bool = setting(True, on_resume="must_equal", help="one table for all layers; needs pp = 1")

        def __post_init__(self) -> None:
            if self.buckets < 2 or self.max_distance <= self.buckets // 2:
                raise ValueError(
                    f"model.position.buckets ({self.buckets}) must be at least 2 and max_distance "
                    f"({self.max_distance}) more than half of them"
                )

    biases = True

    def __init__(self, settings: "Buckets.Config", site: Site) -> None:
        super().__init__()
        self.settings = settings
        first, count = site.local_heads
        self.weight = nn.Parameter(torch.empty(count, settings.buckets))
        shape, extent = (site.n_heads, settings.buckets), (count, settings.buckets)
        tag(self.weight, [Piece(f"{site.name}.weight", shape, (first, 0), extent)], Fill(0.0, site.std))

    def bucket(self, distance: Tensor) -> Tensor:
        """Distances >= 0 -> bucket numbers."""
        exact = self.settings.buckets // 2
        ratio = math.log(self.settings.max_distance / exact)
        steps = (distance.clamp(min=1).float() / exact).log() / ratio * (self.settings.buckets - exact)
        far = (exact + steps.long()).clamp(max=self.settings.buckets - 1)
        return torch.where(distance < exact, distance, far)

    def bias(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, scale: float
    ) -> Tensor:
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).clamp(min=0)  # (B, S, N)
        return self.weight.float()[:, self.bucket(distance)].transpose(0, 1)  # (B, h, S, N)


class RelativeKeys(Position):
    """q_i . (k_j + r_{i-j}): a learned vector for each distance up to `clip`, shared by heads (Shaw 2018)."""

    @config
    class Config:
        kind: Literal["relative_keys"] = setting(
            "relative_keys", on_resume="must_equal", help="a learned key vector for each distance"
        )
        clip: int = setting(16, on_resume="must_equal", help="larger distances count as this one")

    biases = True

    def __init__(self, settings: "RelativeKeys.Config", site: Site) -> None:
        super().__init__()
        shape = (settings.clip + 1, site.head_width)
        std = site.head_width**-0.5
        self.weight = replicated(f"{site.name}.weight", shape, Fill(0.0, std), site.parallel, inside=True)

    def bias(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, scale: float
    ) -> Tensor:
        distance = query_positions[:, :, None] - key_positions[:, None, :]  # (B, S, N)
        distance = distance.clamp(0, self.weight.shape[0] - 1)[:, None]
        scores = torch.einsum("bshe,ne->bhsn", q.float(), self.weight.float()) * scale
        return scores.gather(-1, distance.expand(-1, scores.shape[1], -1, -1))


class TransformerXL(Position):
    """(q_i + u) . k_j + (q_i + v) . (W r_{i-j}), r sinusoidal in the distance (Dai et al. 2019; Gopher)."""

    @config
    class Config:
        kind: Literal["transformer_xl"] = setting(
            "transformer_xl", on_resume="must_equal", help="scores from a projected sine of the distance"
        )
        base: float = setting(10000.0, on_resume="must_equal", help="of the wavelengths")

    biases = True

    def __init__(self, settings: "TransformerXL.Config", site: Site) -> None:
        super().__init__()
        self.base, self.width, self.d_model = settings.base, site.head_width, site.d_model
        heads, group = Heads(site.n_heads, site.head_width), site.parallel.group
        self.u = by_heads(f"{site.name}.content_bias", heads, Fill(0.0, 0.0), group)
        self.v = by_heads(f"{site.name}.distance_bias", heads, Fill(0.0, 0.0), group)
        first, count = site.local_heads
        rows = count * site.head_width
        self.weight = nn.Parameter(torch.empty(rows, site.d_model))
        shape = (site.n_heads * site.head_width, site.d_model)
        box = (first * site.head_width, 0)
        tag(
            self.weight, [Piece(f"{site.name}.weight", shape, box, (rows, site.d_model))], Fill(0.0, site.std)
        )

    def bias(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, scale: float
    ) -> Tensor:
        heads = q.shape[2]
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).clamp(min=0)  # (B, S, N)
        # In training no key is farther than a row is long; to ask a GPU would make the host wait.
        count = k.shape[1] if self.training or not distance.numel() else int(distance.max()) + 1
        places = torch.arange(count, dtype=torch.float64, device=q.device)
        theta = torch.arange(0, self.d_model, 2, dtype=torch.float64, device=q.device) / self.d_model
        angles = places[:, None] * self.base**-theta
        waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[:, : self.d_model].float()
        r = (waves @ self.weight.float().T).view(-1, heads, self.width)  # (distances, h, E)
        u, v = (x.float().view(heads, self.width) for x in (self.u, self.v))
        far = torch.einsum("bshe,nhe->bhsn", q.float() + v, r)
        far = far.gather(-1, distance[:, None].expand(-1, heads, -1, -1))
        # The query heads of a key/value head stand beside each other: no key is repeated.
        content = torch.einsum("kge,bnke->bkgn", u.view(k.shape[2], -1, self.width), k.float()).flatten(1, 2)
        return (content[:, :, None] + far) * scale


PositionConfig = Annotated[
    Rope.Config
    | Position.Config
    | Sinusoidal.Config
    | Learned.Config
    | Alibi.Config
    | Buckets.Config
    | RelativeKeys.Config
    | TransformerXL.Config,
    union("kind"),
]
_AT_A_SITE: dict[type, Any] = {
    Alibi.Config: Alibi,
    Buckets.Config: Buckets,
    RelativeKeys.Config: RelativeKeys,
    TransformerXL.Config: TransformerXL,
}
OWN = (Buckets.Config, RelativeKeys.Config, TransformerXL.Config)  # with weights, in each layer
ABSOLUTE = (Sinusoidal.Config, Learned.Config)  # added to the embedding, once


def build_position(settings: Any, site: Site) -> Position:
    """What the attention of one layer needs of the position encoding."""
    if isinstance(settings, Rope.Config):
        return Rope(settings, site.head_width)
    kind = _AT_A_SITE.get(type(settings))
    return kind(settings, site) if kind else Position()


def build_absolute(settings: Any, site: Site) -> Position:
    """What the embedding needs of it."""
    if isinstance(settings, Learned.Config):
        return Learned(settings, site)
    return Sinusoidal(settings) if isinstance(settings, Sinusoidal.Config) else Position()


def longest_wavelength(settings: Rope.Config, head_width: int) -> float:
    """Positions in one turn of the slowest pair: 2 pi base^((R - 2) / R)."""
    rotated = int(head_width * settings.fraction)
    return 2 * math.pi * settings.base ** ((rotated - 2) / rotated)
