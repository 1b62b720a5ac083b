"""Normalisation of the residual stream. D width; statistics in fp32 whatever the dtype of x."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.typed import config, setting
from parallel.piece import Fill
from parallel.tensor import TensorParallel, replicated


@config
class Norm:
    """rmsnorm: g x / sqrt(mean(x^2) + eps). layernorm: g (x - mean) / sqrt(var + eps) + b."""

    kind: Literal["rmsnorm", "layernorm"] = setting("rmsnorm", on_resume="must_equal", help="the norm")
    eps: float = setting(1e-5, on_resume="must_equal", help="added inside the root")


class RMSNorm(nn.Module):
    """g x / sqrt(mean(x^2) + eps): normalised in fp32, rounded to the dtype of x, then multiplied by g."""

    def __init__(self, name: str, width: int, *, eps: float, parallel: TensorParallel) -> None:
        super().__init__()
        self.eps = eps
        self.weight = replicated(f"{name}.weight", width, Fill(1.0, 0.0), parallel)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """g (x - mean) / sqrt(var + eps) + b, with the statistics in fp32."""

    def __init__(self, name: str, width: int, *, eps: float, parallel: TensorParallel) -> None:
        super().__init__()
        self.eps = eps
        self.weight = replicated(f"{name}.weight", width, Fill(1.0, 0.0), parallel)
        self.bias = replicated(f"{name}.bias", width, Fill(0.0, 0.0), parallel)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.weight.shape, weight, bias, self.eps).to(x.dtype)


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def build_norm(settings: Norm, name: str, width: int, parallel: TensorParallel) -> nn.Module:
    """The norm of the settings over vectors of `width`."""
    return NORMS[settings.kind](name, width, eps=settings.eps, parallel=parallel)
