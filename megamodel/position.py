"""How a token's position reaches the model.

B batch, S sequence length, H heads, E head width, R rotated width (even, <= E).
"""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from conf.typed import config, setting, union


class Position:
    """The neutral base: no position information at all (NoPE). Variants override what they need."""

    @config
    class Config:
        kind: Literal["none"] = setting("none", on_resume="must_equal", help="no position encoding")

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, S, D), positions (B, S) -> x with absolute positions added."""
        return x

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q (B, S, H, E), k (B, S, K, E), positions (B, S) -> both with relative positions turned in."""
        return q, k


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

        def __post_init__(self) -> None:
            if self.base <= 1:
                raise ValueError(f"model.position.base ({self.base}) must be above 1; 10000 is usual")
            if not 0 < self.fraction <= 1:
                raise ValueError(f"model.position.fraction ({self.fraction}) must be in (0, 1]")

    def __init__(self, settings: "Rope.Config", head_width: int) -> None:
        self.rotated = int(head_width * settings.fraction)
        if self.rotated % 2 or not self.rotated:
            raise ValueError(
                f"RoPE turns pairs: head_width ({head_width}) x model.position.fraction "
                f"({settings.fraction}) gives {self.rotated} components; choose an even number"
            )
        self.interleaved = settings.pairs == "interleaved"
        exponent = torch.arange(0, self.rotated, 2, dtype=torch.float64) / self.rotated
        self.frequencies = (1.0 / settings.base**exponent).float()  # (R / 2)
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, (at least length, R / 2) each, in fp32 on the device; grown when needed."""
        tables = self._tables
        if tables is None or tables[0].shape[0] < length or tables[0].device != device:
            size = 1 << max(length - 1, 1).bit_length()
            angles = torch.arange(size, dtype=torch.float64)[:, None] * self.frequencies.double()
            tables = (angles.cos().float().to(device), angles.sin().float().to(device))
            self._tables = tables
        return tables

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables(positions.shape[-1], positions.device)
        cos, sin = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)  # (B, S, 1, R / 2)
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : self.rotated].float(), x[..., self.rotated :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        out = out.to(x.dtype)
        return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


PositionConfig = Annotated[Rope.Config | Position.Config, union("kind")]


def build_position(settings: Rope.Config | Position.Config, head_width: int) -> Position:
    """The position encoding of the settings for heads of this width."""
    if isinstance(settings, Rope.Config):
        return Rope(settings, head_width)
    return Position()


def longest_wavelength(settings: Rope.Config, head_width: int) -> float:
    """Positions in one turn of the slowest pair: 2 pi base^((R - 2) / R)."""
    rotated = int(head_width * settings.fraction)
    return 2 * math.pi * settings.base ** ((rotated - 2) / rotated)
