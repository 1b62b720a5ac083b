"""The one place that picks how attention is computed.

B batch, S queries, N keys, H query heads, K key/value heads (H a multiple of K), E head width, V value width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamodel.dropout import KeyedDropout

Sparse = Literal["none", "strided", "fixed"]


@dataclass(frozen=True)
class Seen:
    """Which keys a query sees, besides that none is later than itself and none of another document.

    window w: i - w + 1 .. i. strided: the last `stride` keys and every stride-th before (Child et al. 2019);
    fixed: the keys of the own block of `stride` and the last `summary` of every earlier block.
    """

    window: int | None = None
    sparse: Sparse = "none"
    stride: int = 1
    summary: int = 1

    @property
    def all(self) -> bool:
        return self.window is None and self.sparse == "none"

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Places (B, S) and (B, N) -> bool (B, 1, S, N)."""
        i, j = queries[:, None, :, None], keys[:, None, None, :]
        distance = i - j
        mask = distance >= 0
        if self.window is not None:
            mask &= distance < self.window
        if self.sparse == "strided":
            mask &= (distance < self.stride) | (distance % self.stride == 0)
        if self.sparse == "fixed":
            mask &= (i // self.stride == j // self.stride) | (j % self.stride >= self.stride - self.summary)
        return mask


def documents_of(positions: Tensor) -> Tensor:
    """Number of each token's document: positions (B, S) restart at 0 with each."""
    return (positions == 0).cumsum(-1)


def document_lengths(positions: Tensor, *, documents: bool) -> Tensor:
    """Tokens of each token's document (B, S), or (B, 1) of each row when documents are not told apart."""
    if not documents:
        return positions.amax(-1, keepdim=True) + 1
    number = documents_of(positions)
    size = positions.new_zeros(positions.shape[0], positions.shape[1] + 1)
    return size.scatter_reduce(1, number, positions + 1, "amax").gather(1, number)


def visible(positions: Tensor, *, seen: Seen, documents: bool) -> Tensor:
    """Which keys each query of whole rows sees: bool (B or 1, 1, S, S); positions (B, S)."""
    place = torch.arange(positions.shape[-1], device=positions.device)[None]
    if not documents:
        return seen.mask(place, place)
    number = documents_of(positions)
    # A sparse pattern starts anew with each document.
    mask = seen.mask(place, place) if seen.sparse == "none" else seen.mask(positions, positions)
    return mask & (number[:, None, :, None] == number[:, None, None, :])


def visible_cached(queries: Tensor, keys: Tensor, *, seen: Seen) -> Tensor:
    """The same by positions (B, S), (B, N) alone: keys at -1 are empty, queries below 0 are padding.

    Padding sees everything, so that nothing becomes NaN; nobody reads what it gives.
    """
    return (seen.mask(queries, keys) & (keys >= 0)[:, None, None, :]) | (queries < 0)[:, None, :, None]


class Attend(nn.Module):
    """softmax(cap(scale q k^T) + bias, over the visible keys and the sink) v.

    q (B, S, H, E), k (B, N, K, E), v (B, N, K, V), positions (B, S), samples (B,) -> (B, S, H, V). Without
    key_positions the keys are those of whole rows, N = S; with them (B, N) they come from a cache.
    """

    def __init__(
        self,
        *,
        scale: float,
        seen: Seen,
        documents: bool,
        dropout: KeyedDropout,
        first_head: int,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.seen = seen
        self.documents = documents
        self.dropout = dropout
        self.softcap = softcap
        self.first_head = first_head  # number of this rank's first query head: its dropout masks are slices

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        samples: Tensor,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, S or N, E)
        dropped = bool(self.dropout.p) and self.training
        if self.softcap is not None or sinks is not None or dropped:
            mask = self._mask(positions, key_positions)
            return self._explicit(q, k, v, mask, samples, bias, sinks, dropped).transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        if self._plain(q.shape[2]) and bias is None and key_positions is None:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped
            )
        else:
            mask = self._mask(positions, key_positions)
            if bias is not None:
                mask = bias.to(q.dtype).masked_fill(~mask, -torch.inf)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=grouped
            )
        return out.transpose(1, 2)

    def _plain(self, length: int) -> bool:
        window = self.seen.window
        return (window is None or window >= length) and self.seen.sparse == "none" and not self.documents

    def _mask(self, positions: Tensor, key_positions: Tensor | None) -> Tensor:
        if key_positions is not None:
            return visible_cached(positions, key_positions, seen=self.seen)
        return visible(positions, seen=self.seen, documents=self.documents)

    def _explicit(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        samples: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        dropped: bool,
    ) -> Tensor:
        """The definition, with the scores in memory. sinks (H): a logit a head in the denominator only."""
        heads = q.shape[1]
        repeats = heads // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is None:
            probabilities = scores.softmax(-1)  # (B, H, S, N)
        else:
            sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            probabilities = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        if dropped:
            probabilities = self._dropped(probabilities, samples)
        return probabilities.to(v.dtype) @ v

    def _dropped(self, probabilities: Tensor, samples: Tensor) -> Tensor:
        heads, length = probabilities.shape[1:3]
        head = torch.arange(self.first_head, self.first_head + heads, device=probabilities.device)
        cell = torch.arange(length * length, device=probabilities.device).view(length, length)
        places = head[:, None, None] * (length * length) + cell
        keep = self.dropout.keep(samples, places, self.dropout.clock.step)
        return torch.where(keep, probabilities / (1 - self.dropout.p), 0.0)
