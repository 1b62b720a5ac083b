"""The one place that picks how attention is computed.

B batch, S sequence length, H query heads, K key/value heads (H a multiple of K), E head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamodel.dropout import KeyedDropout


def visible(positions: Tensor, *, window: int | None, documents: bool) -> Tensor:
    """Which keys each query sees: bool (B or 1, 1, S, S).

    Query i sees keys i - window + 1 .. i (all up to i without a window), and with `documents` only those of
    its own document: positions (B, S) restart at 0 with each.
    """
    length = positions.shape[-1]
    place = torch.arange(length, device=positions.device)
    distance = place[:, None] - place[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    mask = mask[None, None]
    if documents:
        document = (positions == 0).cumsum(-1)  # (B, S)
        mask = mask & (document[:, None, :, None] == document[:, None, None, :])
    return mask


class Attend(nn.Module):
    """softmax(scale q k^T, over the visible keys) v.

    q (B, S, H, E), k and v (B, S, K, E), positions (B, S), samples (B,) -> (B, S, H, E).
    """

    def __init__(
        self, *, scale: float, window: int | None, documents: bool, dropout: KeyedDropout, first_head: int
    ) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.documents = documents
        self.dropout = dropout
        self.first_head = first_head  # number of this rank's first query head: its dropout masks are slices

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, samples: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, S, E)
        length = q.shape[2]
        window = None if self.window is None or self.window >= length else self.window
        if self.dropout.p and self.training:
            mask = visible(positions, window=window, documents=self.documents)
            return self._with_dropout(q, k, v, mask, samples).transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        if window is None and not self.documents:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped
            )
        else:
            mask = visible(positions, window=window, documents=self.documents)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=grouped
            )
        return out.transpose(1, 2)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, samples: Tensor) -> Tensor:
        heads, length = q.shape[1], q.shape[2]
        repeats = heads // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1)  # (B, H, S, S)
        head = torch.arange(self.first_head, self.first_head + heads, device=q.device)
        cell = torch.arange(length * length, device=q.device).view(length, length)
        places = head[:, None, None] * (length * length) + cell
        keep = self.dropout.keep(samples, places, self.dropout.clock.step)
        probabilities = torch.where(keep, probabilities / (1 - self.dropout.p), 0.0)
        return probabilities.to(v.dtype) @ v
