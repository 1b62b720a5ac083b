"""Dropout from a key, never from a stream: masks are a function of (seed, step, sample, layer, site, place).

Nothing to save, equal masks where activations are replicated, slices of one logical mask where they are
split, the same on every device and layout. B batch, S sequence length.
"""

import torch
from torch import Tensor, nn

from conf.typed import config, setting
from parallel.outside import Outside
from parallel.seed import key


@config
class Dropout:
    """Probabilities of zeroing; what is kept is divided by (1 - p). 0 is off."""

    embedding: float = setting(0.0, on_resume="needs_override", help="after the embedding")
    attention: float = setting(0.0, on_resume="needs_override", help="on the attention probabilities")
    residual: float = setting(0.0, on_resume="needs_override", help="on each sublayer's output")

    def __post_init__(self) -> None:
        for name in ("embedding", "attention", "residual"):
            p = getattr(self, name)
            if not 0 <= p < 1:
                raise ValueError(f"model.dropout.{name} ({p}) must be in [0, 1); 0 is off")


class Clock:
    """The step that is being tried, set once before each step; shared by the layers of one model."""

    def __init__(self) -> None:
        self.step = 0

    def set(self, step: int) -> None:
        """The step that is tried next."""
        self.step = step


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the int64 with the same bits."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >= 1 << 63 else number


def _mix(z: Tensor) -> Tensor:
    """The SplitMix64 finaliser (Steele et al. 2014) on int64 bits: right shifts made logical by masking."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@Outside  # the step is a number that changes: a graph that held it would be made anew each time
def _kept(samples: Tensor, places: Tensor, site: tuple[int, int, str], step: int, p: float) -> Tensor:
    base = samples.view(-1, *[1] * places.dim()) * _signed(0x9E3779B97F4A7C15)
    rows = _mix(base ^ key(*site, step))  # (B, 1 ...)
    bits = _mix(rows + places * _signed(0x9E3779B97F4A7C15))
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53 >= p


class KeyedDropout(nn.Module):
    """Dropout of one site in one layer. In evaluation, and with p = 0, the identity."""

    def __init__(self, p: float, *, seed: int, layer: int, site: str, clock: Clock) -> None:
        super().__init__()
        self.p = p
        self.clock = clock
        self.site = (seed, layer, site)

    def keep(self, samples: Tensor, places: Tensor, step: int) -> Tensor:
        """samples (B,), places int64 of any shape P -> bool (B, *P), True with probability 1 - p.

        The mask of a place depends on its number, not on how the places are split over ranks.
        """
        return _kept(samples, places, self.site, step, self.p)

    def forward(self, x: Tensor, samples: Tensor, *, first_token: int = 0) -> Tensor:
        """x (B, S, D), whose first token is number `first_token` of the sequence."""
        if not self.training or self.p == 0:
            return x
        tokens, width = x.shape[1:]
        places = torch.arange(first_token * width, (first_token + tokens) * width, device=x.device)
        keep = self.keep(samples, places.view(tokens, width), self.clock.step)
        return torch.where(keep, x / (1 - self.p), 0.0)
