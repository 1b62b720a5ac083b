"""Multi-head latent attention (DeepSeek V2, V3).

B batch, S sequence length, H query heads (h this rank's), C latent width, P width without position, R rotary
width, V value width.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from conf.typed import config, parse, setting
from megamodel.attention import Masked, Place, lengths_for
from megamodel.cache import Cache
from megamodel.norm import Norm, build_norm
from parallel.tensor import ColumnLinear, Heads, InnerLinear, RowLinear


class LatentAttention(nn.Module):
    """Keys and values from a normed latent; the rotary part of the key is one head that all share.

    q = Wq x, or Wqb norm(Wqa x); [c, r] = Wkv x; [k_nope, v] = Wkvb norm(c); a query and a key are
    [nope | rotated rope]; o reads H V. The cache keeps norm(c) and r alone.
    """

    @config
    class Config(Masked):
        kind: Literal["latent"] = setting(
            "latent", on_resume="must_equal", help="multi-head latent attention"
        )
        n_heads: int = setting(8, on_resume="must_equal", help="query heads")
        query_rank: int | None = setting(
            None, on_resume="must_equal", help="latent of the queries; null: none"
        )
        kv_rank: int = setting(128, on_resume="must_equal", help="latent of keys and values")
        nope_width: int = setting(32, on_resume="must_equal", help="width of a head without position")
        rope_width: int = setting(16, on_resume="must_equal", help="width of a head with position")
        value_width: int = setting(32, on_resume="must_equal", help="width of a value")
        bias: bool = setting(
            False, on_resume="must_equal", help="biases of the projections into latents, and of the output"
        )
        latent_eps: float = setting(1e-6, on_resume="must_equal", help="epsilon of the latents' RMSNorm")

        def __post_init__(self) -> None:
            super().__post_init__()
            widths = (self.n_heads, self.kv_rank, self.nope_width, self.rope_width, self.value_width)
            if min(widths) < 1 or (self.query_rank or 1) < 1:
                raise ValueError(
                    "model.attention: n_heads, kv_rank, nope_width, rope_width and value_width must be at "
                    f"least 1; they are {', '.join(map(str, widths))}"
                )

        @property
        def n_kv_heads(self) -> int:
            """Each head has keys and values of its own."""
            return self.n_heads

        @property
        def query_width(self) -> int:
            return self.nope_width + self.rope_width

        @property
        def rotary_width(self) -> int:
            return self.rope_width

        @property
        def cached_width(self) -> int:
            """Numbers that a token leaves in the cache."""
            return self.kv_rank + self.rope_width

        def matrix_elements(self, d_model: int) -> int:
            """Matrix elements that a token is multiplied with."""
            heads, rank = self.n_heads, self.query_rank
            width = heads * self.query_width
            queries = d_model * width if rank is None else rank * (d_model + width)
            keys = d_model * self.cached_width + self.kv_rank * heads * (self.nope_width + self.value_width)
            return queries + keys + heads * self.value_width * d_model

    def __init__(self, settings: "LatentAttention.Config", place: Place) -> None:
        super().__init__()
        self.settings, self.parallel, name = settings, place.parallel, place.name
        group, rank, bias = place.parallel.group, settings.query_rank, settings.bias
        latent_norm = parse(Norm, {"eps": settings.latent_eps})
        self.q_down = self.q_latent_norm = None
        if rank is not None:
            self.q_down = InnerLinear(
                f"{name}.q_down", place.d_model, rank, std=place.std, parallel=place.parallel, bias=bias
            )
            self.q_latent_norm = build_norm(latent_norm, f"{name}.q_norm", rank, place.parallel, inside=True)
        queries = {"q": Heads(settings.n_heads, settings.query_width)}
        q_in = place.d_model if rank is None else rank
        self.q = ColumnLinear(name, q_in, queries, std=_std(place, q_in), group=group)
        self.kv_down = InnerLinear(
            f"{name}.kv_down",
            place.d_model,
            settings.cached_width,
            std=place.std,
            parallel=place.parallel,
            bias=bias,
        )
        self.kv_norm = build_norm(
            latent_norm, f"{name}.kv_norm", settings.kv_rank, place.parallel, inside=True
        )
        both = {"kv": Heads(settings.n_heads, settings.nope_width + settings.value_width)}
        self.kv = ColumnLinear(name, settings.kv_rank, both, std=_std(place, settings.kv_rank), group=group)
        self.output = RowLinear(
            f"{name}.output",
            settings.n_heads * settings.value_width,
            place.d_model,
            std=place.output_std,
            parallel=place.parallel,
            bias=bias,
        )
        self.position = place.position
        self.attend = place.attend(settings, settings.n_heads, settings.query_width)

    def forward(self, x: Tensor, positions: Tensor, samples: Tensor, cache: Cache | None = None) -> Tensor:
        """x (B, S, D) between the regions, positions (B, S), samples (B,) -> like x."""
        x = self.parallel.enter(x)
        s, places, turn = self.settings, positions.clamp(min=0), self.position.turn
        documents = self.attend.documents and cache is None
        lengths = lengths_for(self.position, positions, documents=documents)
        q = x if self.q_down is None or self.q_latent_norm is None else self.q_latent_norm(self.q_down(x))
        q = self.q(q)[0].unflatten(-1, (-1, s.query_width))  # (B, S, h, P + R)
        q_nope, q_rope = q.split((s.nope_width, s.rope_width), dim=-1)
        q = torch.cat((q_nope, turn(q_rope, places, lengths)), dim=-1)
        latent, rope = self.kv_down(x).split((s.kv_rank, s.rope_width), dim=-1)
        latent, rope = self.kv_norm(latent), rope.unsqueeze(2)  # (B, S, C), (B, S, 1, R)
        rope, key_positions = turn(rope, places, lengths), None
        if cache is not None:
            (latent, rope), key_positions = cache.extend([latent, rope], positions)
        kv = self.kv(latent)[0].unflatten(-1, (-1, s.nope_width + s.value_width))
        k_nope, v = kv.split((s.nope_width, s.value_width), dim=-1)
        k = torch.cat((k_nope, rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)  # (B, N, h, P + R)
        keys = positions if key_positions is None else key_positions
        bias = self.position.bias(q, k, positions, keys, self.attend.scale) if self.position.biases else None
        return self.output(
            self.attend(q, k, v, positions, samples, bias=bias, key_positions=key_positions).flatten(2)
        )


def _std(place: Place, fan_in: int) -> float:
    """By fan-in where the model's is by fan-in, else the model's."""
    return fan_in**-0.5 if place.std == place.d_model**-0.5 else place.std
