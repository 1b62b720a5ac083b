"""What the model runs where no kernel is chosen, on a CPU, as operations of the same signatures as kernels.

B batch, S sequence length, E head width, R rotated width (even, <= E).
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conf.typed import parse
from megamodel.activation import ACTIVATIONS, gating
from megamodel.norm import Norm, Normalise
from megamodel.position import Rope
from tests.megamodel.kernels import agreement, exact
from tests.megamodel.kernels.agreement import FP32

CPU = torch.device("cpu")
draw = functools.partial(agreement.draw, device=CPU)
vectors = functools.partial(agreement.vectors, device=CPU)


def limit(dtype: torch.dtype, roundings: int) -> float:
    """Of the largest element: bf16 has 8 binary digits, so that one rounding moves a number by up to 2^-8."""
    return 1e-5 if dtype == FP32 else roundings * 2**-8


def norm_settings(*, rounds_first: bool, **options: Any) -> Norm:
    return parse(Norm, {**options, "rounding": "before_gain" if rounds_first else "after_gain"})


def norm(x: Tensor, weight: nn.Parameter | None, bias: nn.Parameter | None, **options: Any) -> Tensor:
    return Normalise(norm_settings(**options), weight, bias)(x)


def add_norm(
    x: Tensor, residual: Tensor, weight: nn.Parameter | None, bias: nn.Parameter | None, **options: Any
) -> tuple[Tensor, Tensor]:
    return Normalise(norm_settings(**options), weight, bias).added(x, residual)


def gate(gate: Tensor, up: Tensor, *, activation: Any) -> Tensor:
    return gating(activation, clamp=None, alpha=1.702)(gate, up)


def clamped(gate: Tensor, up: Tensor, *, clamp: float, alpha: float) -> Tensor:
    return gating("silu", clamp=clamp, alpha=alpha)(gate, up)


def activate(x: Tensor, *, activation: Any) -> Tensor:
    return ACTIVATIONS[activation](x)


def documents(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """(positions, tokens of each token's document), (B, S) each: one in the first row, two in the others."""
    positions, lengths = torch.arange(length).repeat(batch, 1), torch.full((batch, length), length)
    cut = length // 3
    positions[1:, cut:] -= cut
    lengths[1:, :cut], lengths[1:, cut:] = cut, length - cut
    return positions, lengths


STRETCHED = {
    "kind": "yarn",
    "factor": 4.0,
    "original_length": 64,
    "beta_fast": 4.0,
    "beta_slow": 0.2,
    "attention_factor": 1.3,
    "truncate": False,
}
STRETCH = exact.yarn(4.0, 64, 4.0, 0.2, truncate=False)


@dataclass(frozen=True)
class Turn:
    """One rotation in two forms: the model's of positions, and e^(i angle) in fp64.

    Where cos and sin are 1.3 times as large a backward pass that turns back divides where it should multiply.
    """

    positions: Tensor
    lengths: Tensor
    width: int
    fraction: float
    interleaved: bool
    scaling: dict[str, Any] = field(default_factory=lambda: STRETCHED)
    theta: exact.Frequencies = STRETCH
    factor: float = 1.3

    def rope(self) -> Rope:
        pairs = "interleaved" if self.interleaved else "half"
        raw = {"base": 10000.0, "fraction": self.fraction, "pairs": pairs, "scaling": self.scaling}
        return Rope(parse(Rope.Config, raw), self.width)

    def ours(self, *x: Tensor) -> tuple[Tensor, ...]:
        """Of one tensor, or of queries and keys together."""
        if len(x) == 1:
            return (self.rope().turn(x[0], self.positions, self.lengths),)
        q, k = x
        return self.rope().rotate(q, k, self.positions, self.lengths)

    def definition(self, *x: Tensor) -> tuple[Tensor, ...]:
        rotated = round(self.fraction * self.width)
        angles = exact.angles(self.theta, 10000.0, rotated, self.positions, self.lengths)
        return tuple(exact.turned(t, angles, self.factor, interleaved=self.interleaved) for t in x)
