"""How rotary angles are stretched beyond the length that a model was first trained on.

R rotated width, t = 0 .. R/2 - 1 the pair, theta_t = base^(-2 t / R), s the factor, T0 the original length.
Each entry gives the angles' frequencies (R/2) in fp32 and the factor on cos and sin.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from conf.typed import config, setting, union


@config
class Unscaled:
    """theta_t as they are."""

    kind: Literal["none"] = setting("none", on_resume="must_equal", help="no scaling")


@config
class LinearScaling:
    """theta_t / s: positions divided by s (Chen et al. 2023)."""

    kind: Literal["linear"] = setting("linear", on_resume="must_equal", help="positions divided by a factor")
    factor: float = setting(2.0, on_resume="must_equal", help="how many times longer")

    def __post_init__(self) -> None:
        _above_zero(self.factor)


@config
class NtkScaling:
    """base' = base s^(R / (R - 2)): the slowest pair is stretched by s, the fastest not at all."""

    kind: Literal["ntk"] = setting("ntk", on_resume="must_equal", help="a larger base")
    factor: float = setting(2.0, on_resume="must_equal", help="how many times longer")

    def __post_init__(self) -> None:
        _above_zero(self.factor)


@config
class DynamicScaling:
    """base' = base (s n / T0 - (s - 1))^(R / (R - 2)), n = max(length, T0): nothing changes up to T0."""

    kind: Literal["dynamic"] = setting(
        "dynamic", on_resume="must_equal", help="a base that grows with length"
    )
    factor: float = setting(2.0, on_resume="must_equal", help="how many times longer")
    original_length: int = setting(2048, on_resume="must_equal", help="tokens of the first training")

    def __post_init__(self) -> None:
        _above_zero(self.factor)


@config
class YarnScaling:
    """theta (1 - ramp) + (theta / s) ramp over the pair index (Peng et al. 2023).

    c(n) = R ln(T0 / (2 pi n)) / (2 ln base), ramp(t) = clamp((t - low) / (high - low), 0, 1), low = c(fast)
    to high = c(slow), rounded outwards when `truncate`. cos and sin are multiplied by `attention_factor`, or
    m(s, mscale) / m(s, mscale_all_dim), or m(s, 1); m(s, a) = 0.1 a ln s + 1.
    """

    kind: Literal["yarn"] = setting(
        "yarn", on_resume="must_equal", help="slow pairs stretched, fast ones not"
    )
    factor: float = setting(2.0, on_resume="must_equal", help="how many times longer")
    original_length: int = setting(2048, on_resume="must_equal", help="tokens of the first training")
    beta_fast: float = setting(32.0, on_resume="must_equal", help="turns in T0 above which a pair is kept")
    beta_slow: float = setting(1.0, on_resume="must_equal", help="turns in T0 below which it is divided by s")
    attention_factor: float | None = setting(
        None, on_resume="must_equal", help="factor on cos and sin; null: from mscale, or 0.1 ln s + 1"
    )
    mscale: float | None = setting(None, on_resume="must_equal", help="numerator of the factor")
    mscale_all_dim: float | None = setting(None, on_resume="must_equal", help="its denominator")
    truncate: bool = setting(True, on_resume="must_equal", help="round the ends of the ramp to whole pairs")

    def __post_init__(self) -> None:
        _above_zero(self.factor)


@config
class Llama3Scaling:
    """By wavelength 2 pi / theta: short ones kept, long ones divided by s, a blend between (Llama 3.1)."""

    kind: Literal["llama3"] = setting("llama3", on_resume="must_equal", help="bands by wavelength")
    factor: float = setting(8.0, on_resume="must_equal", help="how many times longer")
    original_length: int = setting(8192, on_resume="must_equal", help="tokens of the first training")
    low: float = setting(1.0, on_resume="must_equal", help="wavelengths above T0 / low are divided by s")
    high: float = setting(4.0, on_resume="must_equal", help="wavelengths below T0 / high are kept")

    def __post_init__(self) -> None:
        _above_zero(self.factor)
        if self.high <= self.low:
            raise ValueError(f"scaling.high ({self.high}) must be above scaling.low ({self.low})")


@config
class LongRopeScaling:
    """theta_t / f_t, the short list up to T0, else the long one; cos, sin times sqrt(1 + ln s / ln T0)."""

    kind: Literal["longrope"] = setting("longrope", on_resume="must_equal", help="a factor for each pair")
    short: list[float] = setting(factory=list, on_resume="must_equal", help="factors up to T0")
    long: list[float] = setting(factory=list, on_resume="must_equal", help="factors beyond T0")
    factor: float = setting(1.0, on_resume="must_equal", help="longest length / original_length")
    original_length: int = setting(4096, on_resume="must_equal", help="tokens of the first training")
    attention_factor: float | None = setting(
        None, on_resume="must_equal", help="factor on cos and sin; null: the formula"
    )

    def __post_init__(self) -> None:
        if len(self.short) != len(self.long) or not self.short:
            raise ValueError(
                f"scaling.short ({len(self.short)} factors) and scaling.long ({len(self.long)}) must have "
                "one factor for each rotated pair"
            )


Scaling = Annotated[
    Unscaled | LinearScaling | NtkScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling,
    union("kind"),
]
VARYING = (DynamicScaling, LongRopeScaling)  # their frequencies depend on the length of the document


def _above_zero(factor: float) -> None:
    if factor <= 0:
        raise ValueError(f"scaling.factor ({factor}) must be above 0")


def magnitude(factor: float, scale: float = 1.0) -> float:
    """m(s, a) = 0.1 a ln s + 1; 1 for s <= 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def check_rotated(scaling: Any, rotated: int) -> None:
    """ValueError where a scaling is not for `rotated` components."""
    factors = getattr(scaling, "short", None)
    if factors is not None and len(factors) != rotated // 2:
        raise ValueError(
            f"model.position.scaling has {len(factors)} factors, but {rotated // 2} pairs are rotated"
        )
    if rotated == 2 and isinstance(scaling, NtkScaling | DynamicScaling):
        raise ValueError(
            f"model.position.scaling.kind={scaling.kind} stretches all but the fastest pair, and only one is "
            "rotated; make model.attention.head_width x model.position.fraction 4 or more"
        )


def plain_frequencies(base: float | Tensor, rotated: int) -> Tensor:
    """theta_t in fp64, (..., R / 2) for a base of shape (...)."""
    device = base.device if isinstance(base, Tensor) else "cpu"  # a copy there would make the host wait
    exponent = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    if isinstance(base, Tensor):
        return 1.0 / base.double().unsqueeze(-1) ** exponent
    return 1.0 / base**exponent


def _linear(scaling: LinearScaling, base: float, rotated: int, lengths: Any) -> tuple[Tensor, float]:
    return plain_frequencies(base, rotated) / scaling.factor, 1.0


def _ntk(scaling: NtkScaling, base: float, rotated: int, lengths: Any) -> tuple[Tensor, float]:
    return plain_frequencies(base * scaling.factor ** (rotated / (rotated - 2)), rotated), 1.0


def _dynamic(scaling: DynamicScaling, base: float, rotated: int, lengths: Tensor) -> tuple[Tensor, float]:
    original, s = scaling.original_length, scaling.factor
    n = lengths.double().clamp(min=original)
    return plain_frequencies(base * (s * n / original - (s - 1)) ** (rotated / (rotated - 2)), rotated), 1.0


def yarn_factor(scaling: YarnScaling) -> float:
    """The factor on cos and sin."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.factor, scaling.mscale) / magnitude(scaling.factor, scaling.mscale_all_dim)
    return magnitude(scaling.factor)


def _yarn(scaling: YarnScaling, base: float, rotated: int, lengths: Any) -> tuple[Tensor, float]:
    def pair(turns: float) -> float:
        return rotated * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001  # no ramp at all, as transformers does
    t = torch.arange(rotated // 2, dtype=torch.float64, device="cpu")
    ramp = ((t - low) / (high - low)).clamp(0, 1)
    theta = plain_frequencies(base, rotated)
    return theta * (1 - ramp) + theta / scaling.factor * ramp, yarn_factor(scaling)


def _llama3(scaling: Llama3Scaling, base: float, rotated: int, lengths: Any) -> tuple[Tensor, float]:
    theta = plain_frequencies(base, rotated)
    wavelength, original = 2 * math.pi / theta, scaling.original_length
    share = ((original / wavelength - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - share) * theta / scaling.factor + share * theta, 1.0


@lru_cache
def _divided(base: float, rotated: int, factors: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept on the device: a copy from the host in each layer would make it wait."""
    theta = plain_frequencies(base, rotated)
    return (theta / theta.new_tensor(factors)).to(device)


def _long(scaling: LongRopeScaling, base: float, rotated: int, lengths: Tensor) -> tuple[Tensor, float]:
    short, long = (_divided(base, rotated, tuple(f), lengths.device) for f in (scaling.short, scaling.long))
    beyond = (lengths > scaling.original_length).unsqueeze(-1)
    s, factor = scaling.factor, scaling.attention_factor
    if factor is None:
        factor = math.sqrt(1 + math.log(s) / math.log(scaling.original_length)) if s > 1 else 1.0
    return torch.where(beyond, long, short), factor


def _none(scaling: Unscaled, base: float, rotated: int, lengths: Any) -> tuple[Tensor, float]:
    return plain_frequencies(base, rotated), 1.0


_FORMULAS: dict[type, Callable[..., tuple[Tensor, float]]] = {
    Unscaled: _none,
    LinearScaling: _linear,
    NtkScaling: _ntk,
    DynamicScaling: _dynamic,
    YarnScaling: _yarn,
    Llama3Scaling: _llama3,
    LongRopeScaling: _long,
}


def frequencies(
    scaling: Any, base: float, rotated: int, lengths: Tensor | None = None
) -> tuple[Tensor, float]:
    """(frequencies (..., R / 2) in fp32, factor on cos and sin).

    lengths (...): of each token's document, for the scalings in VARYING only.
    """
    theta, factor = _FORMULAS[type(scaling)](scaling, base, rotated, lengths)
    return theta.float(), factor


def regime(scaling: Any, length: int) -> int:
    """A number that changes with the length where the frequencies do."""
    if isinstance(scaling, DynamicScaling):
        return max(length, scaling.original_length)
    return int(length > scaling.original_length) if isinstance(scaling, LongRopeScaling) else 0
