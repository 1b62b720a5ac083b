"""Normalisation of the residual stream and of queries and keys. D width; statistics in fp32 whatever x is."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.typed import config, setting
from parallel.collectives import sum_inside
from parallel.mesh import Group
from parallel.piece import Fill
from parallel.tensor import Heads, TensorParallel, by_heads, replicated


@config
class Norm:
    """rmsnorm: g x / sqrt(mean(x^2) + eps). layernorm: g (x - mean) / sqrt(var + eps) + b."""

    kind: Literal["rmsnorm", "layernorm"] = setting("rmsnorm", on_resume="must_equal", help="the norm")
    eps: float = setting(1e-5, on_resume="must_equal", help="added inside the root")
    gain: bool = setting(True, on_resume="must_equal", help="multiply by a learned g")
    bias: bool | None = setting(
        None, on_resume="must_equal", help="add a learned b; null: layernorm does, rmsnorm does not"
    )
    offset: float = setting(0.0, on_resume="must_equal", help="multiply by offset + g; Gemma stores g - 1")
    rounding: Literal["before_gain", "after_gain"] | None = setting(
        None,
        on_resume="must_equal",
        help="where a 16-bit x is rounded back; null: rmsnorm before_gain, layernorm after_gain",
    )

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise ValueError(f"norm.eps ({self.eps}) must not be negative")
        if not self.gain and self.offset:
            raise ValueError(f"norm.offset ({self.offset}) needs norm.gain=true")

    @property
    def has_bias(self) -> bool:
        return self.kind == "layernorm" if self.bias is None else self.bias

    @property
    def rounds_first(self) -> bool:
        return self.kind == "rmsnorm" if self.rounding is None else self.rounding == "before_gain"


class Normalising(Protocol):
    """See megamodel.kernels.reference."""

    @property
    def norm(self) -> Callable[..., Tensor]: ...
    @property
    def add_norm(self) -> Callable[..., tuple[Tensor, Tensor]]: ...


def _rms(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps)


def _layer(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], None, None, eps)


STANDARDISED: dict[str, Callable[[Tensor, float], Tensor]] = {"rmsnorm": _rms, "layernorm": _layer}


class Normalise(nn.Module):
    """(offset + g) x_hat + b over the last dimension; g and b may be absent.

    form: None for torch's own; or the operations of megamodel.kernels that compute the same.
    """

    def __init__(self, settings: Norm, weight: nn.Parameter | None, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.settings = settings
        self.weight, self.bias = weight, bias
        self.standardise = STANDARDISED[settings.kind]
        whole = weight is not None and not settings.offset
        self.fused = settings.kind == "rmsnorm" and whole and bias is None
        self.form: Normalising | None = None

    @property
    def how(self) -> dict[str, Any]:
        """The settings as the operations take them."""
        s = self.settings
        return {"kind": s.kind, "eps": s.eps, "offset": s.offset, "rounds_first": s.rounds_first}

    def forward(self, x: Tensor) -> Tensor:
        if self.form is not None:
            return self.form.norm(x, self.weight, self.bias, **self.how)
        weight = self.weight
        if self.fused and x.dtype == torch.float32 and weight is not None and weight.shape == x.shape[-1:]:
            return F.rms_norm(x, weight.shape, weight, self.settings.eps)
        y = self.standardise(x.float(), self.settings.eps)
        return scaled(self.settings, y, self.weight, self.bias, x.dtype)

    def added(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(x + residual, its norm)."""
        if self.form is not None:
            return self.form.add_norm(x, residual, self.weight, self.bias, **self.how)
        total = x + residual
        return total, self(total)


def scaled(
    settings: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x_hat in fp32 -> (offset + g) x_hat + b in dtype, rounded where the settings say."""
    if settings.rounds_first:
        x = x.to(dtype)
    if weight is not None:
        gain = weight if settings.rounds_first else weight.float()
        x = x * (gain + settings.offset if settings.offset else gain).view(_wide(x, weight))
    if bias is not None:
        x = x + (bias if settings.rounds_first else bias.float()).view(_wide(x, bias))
    return x.to(dtype)


def _wide(x: Tensor, vector: Tensor) -> tuple[int, ...]:
    """The vector's shape against x: (E), or (h, E) where it has a part for each head."""
    width = x.shape[-1]
    return (width,) if vector.numel() == width else (vector.numel() // width, width)


def build_norm(
    settings: Norm, name: str, width: int, parallel: TensorParallel, *, inside: bool = False
) -> nn.Module:
    """The norm of the settings over vectors of `width`; `inside` a tp region or between them."""

    def vector(kind: str, value: float, present: bool) -> nn.Parameter | None:
        if not present:
            return None
        return replicated(f"{name}.{kind}", width, Fill(value, 0.0), parallel, inside=inside)

    weight = vector("weight", 1.0 - settings.offset, settings.gain)
    return Normalise(settings, weight, vector("bias", 0.0, settings.has_bias))


def build_head_norm(settings: Norm, name: str, heads: Heads, group: Group) -> nn.Module:
    """Each head normalised by itself, with a gain of its own: x (B, S, h, E)."""
    weight = by_heads(f"{name}.weight", heads, Fill(1.0 - settings.offset, 0.0), group)
    bias = by_heads(f"{name}.bias", heads, Fill(0.0, 0.0), group)
    return Normalise(settings, weight if settings.gain else None, bias if settings.has_bias else None)


class ProjectionNorm(nn.Module):
    """One norm over all heads of a projection together, its statistics summed over tp, each head once.

    x (B, S, h, E) -> like x.
    """

    def __init__(self, settings: Norm, name: str, heads: Heads, group: Group) -> None:
        super().__init__()
        self.settings, self.group = settings, group
        self.width, self.copies = heads.count * heads.width, heads.replicas(group)
        first = Fill(1.0 - settings.offset, 0.0)
        self.weight = by_heads(f"{name}.weight", heads, first, group) if settings.gain else None
        self.bias = by_heads(f"{name}.bias", heads, Fill(0.0, 0.0), group) if settings.has_bias else None
        self.centred = settings.kind == "layernorm"

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        if self.centred:
            y = y - self._mean(y)
        y = y * (self._mean(y.square()) + self.settings.eps).rsqrt()
        return scaled(self.settings, y, self.weight, self.bias, x.dtype)

    def _mean(self, y: Tensor) -> Tensor:
        total = y.sum((-2, -1), keepdim=True) / self.copies
        return sum_inside(total, self.group) / self.width
