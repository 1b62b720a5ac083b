"""Causal attention for compiled blocks on a CPU: torch's own forward pass, scores made again in backward.

For 16-bit rows torch's backward pass of attention takes several times as long as the products that are in it.
As a few batched products for a block of queries, with all between them in the kernels of torch.compile, it
takes half; not compiled, longer. B batch, S sequence, H query heads, K key/value heads (H a multiple of K), E
width.
"""

import torch
from torch import Tensor

from megamodel.kernels.reference import wide

LONGEST = 2048  # of a row: each block of queries is a piece of the graph


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether this is for q (B, H, S, E) and v (B, K, S, V)."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return is_half and not q.is_cuda and q.shape[-1] == v.shape[-1] and 0 < q.shape[2] <= LONGEST


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T over the keys 0 .. i) v: q (B, H, S, E), k and v (B, K, S, E) -> like q."""
    return _Rebuilt.apply(q, k, v, scale)  # type: ignore[no-any-return]


class _Rebuilt(torch.autograd.Function):
    """With P = exp(scale q k^T - log Z), D = sum(out * dO): dV = P^T dO, dS = scale P (dO V^T - D),
    dQ = dS K, dK = dS^T Q (Dao et al. 2022, appendix B.2)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # Asked directly, it takes the numbers of a head to lie side by side, whatever the strides say.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_z = flash(q, k, v, 0.0, True, scale=scale)  # log_z (B, H, S) in fp32
        ctx.save_for_backward(q, k, v, out, log_z)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, upstream: Tensor):  # type: ignore[override]
        q, k, v, out, log_z = ctx.saved_tensors
        rows, length, width = q.shape[0] * k.shape[1], q.shape[2], q.shape[3]
        sums = (wide(out) * wide(upstream)).sum(-1)  # (B, H, S)
        keys, values = (x.reshape(rows, length, width) for x in (k, v))
        of_keys, of_values = (torch.zeros_like(x, dtype=sums.dtype) for x in (keys, values))
        of_queries = []
        step = 128 if length <= 512 else 256
        for first in range(0, length, step):
            end = min(first + step, length)
            # The queries that share a key/value head stand under each other: (B K, H / K queries, E).
            shape = (rows, q.shape[1] // k.shape[1], end - first)
            part, grad = (x[:, :, first:end].reshape(rows, -1, width) for x in (q, upstream))
            log, total = (x[:, :, first:end].reshape(*shape, 1) for x in (log_z, sums))
            scores = torch.bmm(part, keys[:, :end].transpose(1, 2)).unflatten(1, shape[1:])
            later = torch.arange(end) > torch.arange(first, end)[:, None]
            weights = torch.where(later, 0.0, torch.exp(wide(scores) * ctx.scale - log))
            of_weights = torch.bmm(grad, values[:, :end].transpose(1, 2)).unflatten(1, shape[1:])
            of_scores = (weights * (wide(of_weights) - total) * ctx.scale).to(q.dtype).flatten(1, 2)
            weights = weights.to(q.dtype).flatten(1, 2)
            of_queries.append(torch.bmm(of_scores, keys[:, :end]).view(*q.shape[:2], -1, width))
            of_values[:, :end] += torch.bmm(weights.transpose(1, 2), grad)
            of_keys[:, :end] += torch.bmm(of_scores.transpose(1, 2), part)
        found = (of_keys.to(k.dtype).view_as(k), of_values.to(v.dtype).view_as(v))
        return torch.cat(of_queries, dim=2), *found, None
