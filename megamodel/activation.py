"""Pointwise activations of the feed-forward layers, by name."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2", "elu", "selu", "identity", "sigmoid"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "relu2": _relu2,
    "elu": F.elu,
    "selu": F.selu,
    "identity": _identity,
    "sigmoid": torch.sigmoid,
}


def gating(name: ActivationName, *, clamp: float | None, alpha: float) -> Callable[[Tensor, Tensor], Tensor]:
    """(gate, up) -> act(gate) up.

    With a clamp c: g = min(gate, c), u = clamp(up, -c, c): (u + 1) g sigmoid(alpha g) (gpt-oss).
    """
    if clamp is None:
        act = ACTIVATIONS[name]
        return lambda gate, up: act(gate) * up

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        g, u = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        return (u + 1) * (g * torch.sigmoid(alpha * g))

    return clamped
