"""What rotations and activations are, in fp64, written apart from the code that the model runs.

B batch, S sequence length, H heads, E head width, R rotated width (even, <= E), t = 0 .. R/2 - 1 the pair.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def turned(x: Tensor, angles: Tensor, factor: float, *, interleaved: bool) -> Tensor:
    """Pair (a, b) -> factor e^(i angle) (a + i b), x (B, S, H, E), angles (B, S, R / 2); E - R stay."""
    rotated = 2 * angles.shape[-1]
    first, rest = x[..., :rotated], x[..., rotated:]
    a, b = (first[..., 0::2], first[..., 1::2]) if interleaved else first.tensor_split(2, -1)
    turn = torch.polar(torch.full_like(angles, factor), angles)
    product = torch.complex(a, b) * turn[:, :, None]  # (B, S, H, R / 2)
    pairs = torch.stack((product.real, product.imag), -1 if interleaved else -2)
    return torch.cat((pairs.flatten(-2), rest), -1)


Frequencies = Callable[[float, int, int, float], float]  # (base, R, t, length of the document) -> theta_t


def plain(base: float, rotated: int, t: int) -> float:
    return base ** (-2 * t / rotated)


def linear(factor: float) -> Frequencies:
    return lambda base, rotated, t, length: plain(base, rotated, t) / factor


def ntk(factor: float) -> Frequencies:
    """The slowest pair is stretched by the factor, the fastest by nothing, those between by powers of it."""
    return lambda base, rotated, t, length: plain(base, rotated, t) * factor ** (-2 * t / (rotated - 2))


def dynamic(factor: float, original: int) -> Frequencies:
    def theta(base: float, rotated: int, t: int, length: float) -> float:
        return ntk(factor * max(length / original, 1.0) - factor + 1)(base, rotated, t, length)

    return theta


def yarn(factor: float, original: int, fast: float, slow: float, truncate: bool) -> Frequencies:
    """A pair that turns `fast` times in the original length is kept, one that turns `slow` times is slowed by
    the factor; between them the pair's number decides."""

    def theta(base: float, rotated: int, t: int, length: float) -> float:
        def number(turns: float) -> float:
            return rotated / 2 * math.log(original / (turns * 2 * math.pi), base)

        first, last = number(fast), number(slow)
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotated - 1)
        slowed = min(max((t - first) / (last - first), 0.0), 1.0)
        return plain(base, rotated, t) * (1 - slowed + slowed / factor)

    return theta


def llama3(factor: float, original: int, low: float, high: float) -> Frequencies:
    def theta(base: float, rotated: int, t: int, length: float) -> float:
        kept = plain(base, rotated, t)
        turns = original * kept / (2 * math.pi)
        if turns > high:
            return kept
        if turns < low:
            return kept / factor
        share = (turns - low) / (high - low)
        return kept * (share + (1 - share) / factor)

    return theta


def longrope(short: list[float], long: list[float], original: int) -> Frequencies:
    def theta(base: float, rotated: int, t: int, length: float) -> float:
        return plain(base, rotated, t) / (long if length > original else short)[t]

    return theta


def angles(theta: Frequencies, base: float, rotated: int, positions: Tensor, lengths: Tensor) -> Tensor:
    """(B, S, R / 2) in fp64, of frequencies that are rounded to fp32, as all published models keep them."""
    documents, which = lengths.unique(return_inverse=True)
    found = [theta(base, rotated, t, float(n)) for n in documents.tolist() for t in range(rotated // 2)]
    table = torch.tensor(found, dtype=torch.float64).view(-1, rotated // 2).float().double()
    return positions.double().unsqueeze(-1) * table[which]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.expm1(torch.where(x > 0, 0.0, x)))


def _selu(x: Tensor) -> Tensor:
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return scale * torch.where(x > 0, x, alpha * _elu(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x * 1,
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "elu": _elu,
    "selu": _selu,
}


def activate(x: Tensor, *, activation: str) -> Tensor:
    return ACTIVATIONS[activation](x)


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    return ACTIVATIONS[activation](gate) * up


def clamped(gate: Tensor, up: Tensor, *, clamp: float, alpha: float) -> Tensor:
    """(u + 1) g sigmoid(alpha g), gate cut at c from above, up on both sides; at the cut gradients pass."""
    g = torch.where(gate <= clamp, gate, clamp)
    u = torch.where(up.abs() <= clamp, up, clamp * up.sign())
    return (u + 1) * g * sigmoid(alpha * g)
