"""The definitions, in plain torch: what every kernel must compute, values and gradients (by autograd).

Any dtype: what is summed, exponentiated or rotated is fp32, and fp64 where the input is fp64.
B batch, S sequence length, H heads, E head width, R rotated width (even, <= E); n rows, v columns.
"""

import torch
from torch import Tensor

from megamodel.activation import ACTIVATIONS, ActivationName, gating
from megamodel.data.batch import IGNORE


def wide(x: Tensor) -> Tensor:
    """In fp32, fp64 where it was."""
    return x if x.dtype == torch.float64 else x.float()


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
    offset: float,
    rounds_first: bool,
) -> Tensor:
    """(offset + g) x_hat + b over the last dimension, in x's dtype.

    rmsnorm: x_hat = x / sqrt(mean(x^2) + eps); layernorm: the same of x - mean(x). weight and bias: (E), or
    (h E) for x (..., h, E). rounds_first: x_hat is rounded to x's dtype before the gain, else at the end.
    """
    y = wide(x)
    if kind == "layernorm":
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if rounds_first:
        y = y.to(x.dtype)
    if weight is not None:
        gain = weight if rounds_first else wide(weight)
        y = y * (gain + offset if offset else gain).view(_heads(weight, x))
    if bias is not None:
        y = y + (bias if rounds_first else wide(bias)).view(_heads(bias, x))
    return y.to(x.dtype)


def _heads(vector: Tensor, x: Tensor) -> tuple[int, ...]:
    """A vector's shape against x: (E), or (h, E) where it has a part for each head."""
    width = x.shape[-1]
    return (width,) if vector.numel() == width else (vector.numel() // width, width)


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
    offset: float,
    rounds_first: bool,
) -> tuple[Tensor, Tensor]:
    """(x + residual, norm(x + residual)): the stream of the next block, and what its layer reads."""
    total = x + residual
    return total, norm(total, weight, bias, kind=kind, eps=eps, offset=offset, rounds_first=rounds_first)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Pair (a, b) of the first R components -> (a cos - b sin, b cos + a sin); the other E - R stay.

    x (B, S, H, E); cos and sin (B, S, R / 2) fp32. interleaved: components 2t and 2t + 1 are a pair, else t
    and t + R / 2.
    """
    rotated = 2 * cos.shape[-1]
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)  # (B, S, 1, R / 2)
    turned, rest = wide(x[..., :rotated]), x[..., rotated:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        out = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    return torch.cat((out.to(x.dtype), rest), dim=-1)


def norm_rotate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    kind: str,
    eps: float,
    offset: float,
    rounds_first: bool,
    interleaved: bool,
) -> Tensor:
    """QK-norm: each head of x (B, S, H, E) normalised by itself, then rotated."""
    y = norm(x, weight, bias, kind=kind, eps=eps, offset=offset, rounds_first=rounds_first)
    return rotate(y, cos, sin, interleaved=interleaved)


def gate(
    gate: Tensor, up: Tensor, *, activation: ActivationName, clamp: float | None = None, alpha: float = 1.702
) -> Tensor:
    """act(gate) up; with a clamp c, g = min(gate, c), u = clamp(up, -c, c): (u + 1) g sigmoid(alpha g)."""
    return gating(activation, clamp=clamp, alpha=alpha)(gate, up)


def activate(x: Tensor, *, activation: ActivationName) -> Tensor:
    """act(x)."""
    return ACTIVATIONS[activation](x)


def entropy(logits: Tensor, targets: Tensor, *, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of a cross-entropy: (largest logit, sum of exp(logit - largest), target's logit).

    logits (n, v): columns [start, start + v) of the vocabulary, soft-capped already if they are; targets (n)
    int64 -> (n) fp32 each. The target's logit is 0 where another rank has it or the target is IGNORE. A row
    without a logit above -inf gives -inf and 0.
    """
    x = wide(logits)
    rows, columns = x.shape
    if not columns:
        return x.new_full((rows,), -torch.inf), x.new_zeros(rows), x.new_zeros(rows)
    largest = x.amax(1)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    local, ours = _local(targets, start, columns)
    picked = torch.where(ours, x.gather(1, local.clamp(0, columns - 1)[:, None])[:, 0], 0.0)
    return largest, (x - shift[:, None]).exp().sum(1), picked


def entropy_gradient(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    coefficient_loss: Tensor,
    coefficient_log_z: Tensor,
    *,
    start: int,
    softcap: float | None,
) -> Tensor:
    """Gradient of sum over rows of c_l (log Z - target's logit) + c_z log Z for the local columns.

    logits, targets, start: as given to `entropy`; log_z, c_l and c_z (n), log Z of the whole vocabulary. With
    a softcap c the logits are c tanh(raw / c), and the gradient is that of raw: (1 - (logit / c)^2) times.
    Rows whose target is IGNORE give zero, whatever they hold.
    """
    x = wide(logits)
    columns = x.shape[1]
    local, ours = _local(targets, start, columns)
    hit = (torch.arange(columns, device=x.device) == local[:, None]) & ours[:, None]  # (n, v)
    grad = (coefficient_loss + coefficient_log_z)[:, None] * (x - log_z[:, None]).exp()
    grad = grad - torch.where(hit, coefficient_loss[:, None], 0.0)
    if softcap is not None:
        grad = grad * (1 - (x / softcap).square())
    return torch.where(targets[:, None] == IGNORE, 0.0, grad).to(logits.dtype)


def _local(targets: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of the target here, whether it is one)."""
    local = targets - start
    return local, (targets != IGNORE) & (local >= 0) & (local < columns)
