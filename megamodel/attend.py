"""The one place that picks how attention is computed.

B batch, S queries, N keys, H query heads, K key/value heads (H a multiple of K), E head width, V value width.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamodel.dropout import KeyedDropout
from megamodel.kernels import flex, products, rebuilt
from megamodel.kernels.reference import wide
from parallel.outside import Outside

QUERIES = 256  # of one block where scores are made a block at a time

Sparse = Literal["none", "strided", "fixed"]
Backend = Literal["whole", "sdpa", "blocked", "flex", "rebuilt"]


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

    def sees_all(self, length: int) -> bool:
        """Whether every earlier key of a document of this length is seen."""
        return self.sparse == "none" and (self.window is None or self.window >= length)

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Places (B, S) and (B, N) -> bool (B, 1, S, N)."""
        return self.rule(queries[:, None, :, None], keys[:, None, None, :])

    def rule(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the query at place i sees the key at place j, of any shapes that go together."""
        distance = i - j
        mask = distance >= 0
        if self.window is not None:
            mask = mask & (distance < self.window)
        if self.sparse == "strided":
            mask = mask & ((distance < self.stride) | (distance % self.stride == 0))
        if self.sparse == "fixed":
            mask = mask & (
                (i // self.stride == j // self.stride) | (j % self.stride >= self.stride - self.summary)
            )
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

    backend: whole, the definition with all scores in memory; sdpa, torch's own where it has the form, with
    a mask of S x S where it needs one; blocked, 256 queries at a time with the keys that they see, whole
    documents at a time, memory linear in S (but for sparse patterns, whose masks are kept); flex, torch's
    flex_attention on a GPU, linear too; rebuilt, as blocked, but plain rows in 16 bit have a backward pass
    for torch.compile.
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
        self.backend: Backend = "blocked"
        self.widens = False  # 16-bit queries, keys and values are attended with in fp32

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
        dtype = q.dtype
        if self.widens:
            q, k, v = wide(q), wide(k), wide(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, S or N, E)
        if key_positions is not None or self.backend == "whole":
            out = self._whole(q, k, v, positions, samples, bias, sinks, key_positions)
        elif self._in_flex(q, v, bias, sinks):
            rule = (positions, self.seen, self.documents)
            out = flex.attention(q, k, v, *rule, self.scale, self.softcap, sinks)
        elif self.softcap is not None or sinks is not None or self.drops or bias is not None:
            if self.backend == "sdpa" or q.shape[2] <= QUERIES:
                out = self._whole(q, k, v, positions, samples, bias, sinks, None)
            else:
                out = self._explicit_blocks(q, k, v, positions, samples, bias, sinks)
        elif self._plain(q.shape[2]):
            again = self.backend == "rebuilt" and torch.is_grad_enabled() and rebuilt.fits(q, v)
            out = (rebuilt.attention if again else causal)(q, k, v, self.scale)
        elif self.backend == "sdpa":
            out = masked(q, k, v, self._mask(positions, None), self.scale)
        elif self.documents and not q.is_cuda:
            out = by_documents(q, k, v, positions, self.seen, self.scale)
        else:
            out = in_blocks(q, k, v, self.seen, self.scale, positions if self.documents else None)
        return out.transpose(1, 2).to(dtype)

    @property
    def drops(self) -> bool:
        """Whether probabilities are dropped in this pass."""
        return bool(self.dropout.p) and self.training

    def _plain(self, length: int) -> bool:
        return self.seen.sees_all(length) and not self.documents

    def _in_flex(self, q: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> bool:
        """Plain rows are faster in torch's flash attention; flex knows no bias by position and no dropout,
        and on a GPU no head narrower than 16."""
        narrow = q.is_cuda and min(q.shape[-1], v.shape[-1]) < 16
        if self.backend != "flex" or bias is not None or self.drops or narrow:
            return False
        return self.softcap is not None or sinks is not None or not self._plain(q.shape[2])

    def _mask(self, positions: Tensor, key_positions: Tensor | None) -> Tensor:
        if key_positions is not None:
            return visible_cached(positions, key_positions, seen=self.seen)
        return visible(positions, seen=self.seen, documents=self.documents)

    def _whole(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        samples: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        key_positions: Tensor | None,
    ) -> Tensor:
        """All scores at once. A cache with nothing special about it goes through torch's own."""
        mask = self._mask(positions, key_positions)
        if self.backend != "whole" and self.softcap is None and sinks is None and not self.drops:
            if bias is not None:
                mask = bias.to(q.dtype).masked_fill(~mask, -torch.inf)
            return masked(q, k, v, mask, self.scale)
        return self._explicit(q, k, v, mask, samples, bias, sinks, 0)

    def _explicit_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        samples: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """The definition for some queries at a time; their scores are made again in the backward pass."""
        sinks = None if sinks is None else wide(sinks)  # its gradient is a sum over the blocks
        parts = []
        for queries, keys in blocks_of(q.shape[2], self.seen):

            def part(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, queries=queries, keys=keys):
                mask = block_mask(queries, keys, self.seen, positions, self.documents)
                own = None if bias is None else bias[..., queries, keys]
                return self._explicit(q, k, v, mask, samples, own, sinks, queries.start, keys.start)

            inputs = (q[:, :, queries], k[:, :, keys], v[:, :, keys], sinks)
            recomputed = torch.is_grad_enabled()
            parts.append(
                checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
                if recomputed
                else part(*inputs)
            )
        return torch.cat(parts, dim=2)  # type: ignore[arg-type]

    def _explicit(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        samples: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        first_query: int,
        first_key: int = 0,
    ) -> Tensor:
        """The definition, with the scores in memory. sinks (H): a logit a head in the denominator only."""
        heads, length = q.shape[1:3]
        # The queries that share a key/value head stand under each other: no key is repeated.
        grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (B, K, H / K S, E)
        scores = products.scores(grouped, k).unflatten(2, (-1, length)).flatten(1, 2)  # (B, H, S, N)
        scores = wide(scores) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is None:
            probabilities = scores.softmax(-1)
        else:
            sink = wide(sinks).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            probabilities = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        if self.drops:
            probabilities = self._dropped(probabilities, samples, first_query, first_key)
        weights = probabilities.to(v.dtype).unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        return (weights @ v).unflatten(2, (-1, length)).flatten(1, 2) if heads != k.shape[1] else weights @ v

    def _dropped(self, probabilities: Tensor, samples: Tensor, first_query: int, first_key: int) -> Tensor:
        """Masks are keyed by (query, key) as places in the row, whichever part of it this is."""
        heads, queries, keys = probabilities.shape[1:]
        device = probabilities.device
        head = torch.arange(self.first_head, self.first_head + heads, device=device)
        query = torch.arange(first_query, first_query + queries, device=device)
        key = torch.arange(first_key, first_key + keys, device=device)
        places = (head[:, None, None] << 42) + (query[:, None] << 21) + key
        keep = self.dropout.keep(samples, places, self.dropout.clock.step)
        return torch.where(keep, probabilities / (1 - self.dropout.p), 0.0)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Every earlier key; q (B, H, S, E), k (B, K, S, E), v (B, K, S, V)."""
    return _by_torch(q, k, v, is_causal=True, scale=scale)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The keys of a mask, bool, or a summand of the scores, in q's dtype."""
    return _by_torch(q, k, v, attn_mask=mask, scale=scale)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """torch's own attention. On a CPU it makes all scores where values are not as wide as keys: zeros make
    them so, which change nothing."""
    width, values = q.shape[-1], v.shape[-1]
    if not q.is_cuda and width < values:
        q, k = (F.pad(x, (0, values - width)) for x in (q, k))
    elif not q.is_cuda and values < width:
        v = F.pad(v, (0, width - values))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **how)[..., :values]


def blocks_of(length: int, seen: Seen) -> list[tuple[slice, slice]]:
    """(queries, the keys that any of them sees) of each block of a row."""
    reach = length if seen.window is None else seen.window - 1
    return [
        (
            slice(first, min(first + QUERIES, length)),
            slice(max(first - reach, 0), min(first + QUERIES, length)),
        )
        for first in range(0, length, QUERIES)
    ]


def block_mask(queries: slice, keys: slice, seen: Seen, positions: Tensor, documents: bool) -> Tensor:
    """The part of `visible` for these queries and keys: bool (B or 1, 1, queries, keys)."""
    place = torch.arange(positions.shape[-1], device=positions.device)[None]
    if not documents:
        return seen.mask(place[:, queries], place[:, keys])
    number = documents_of(positions)
    own = place if seen.sparse == "none" else positions
    mask = seen.mask(own[:, queries], own[:, keys])
    return mask & (number[:, None, queries, None] == number[:, None, None, keys])


def in_blocks(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float, positions: Tensor | None = None
) -> Tensor:
    """Some queries at a time against the keys that they see. positions: to tell documents apart."""
    length = q.shape[2]
    places = positions
    if places is None:
        places = torch.arange(length, device=q.device)[None]
    parts = []
    for queries, keys in blocks_of(length, seen):
        mask = block_mask(queries, keys, seen, places, positions is not None)
        parts.append(masked(q[:, :, queries], k[:, :, keys], v[:, :, keys], mask, scale))
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


@Outside  # where documents end is in the data
def by_documents(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, seen: Seen, scale: float) -> Tensor:
    """Each document by itself: nothing is computed between two of them. For a CPU, which knows where they
    end without waiting."""
    rows = []
    starts = positions == 0
    starts[:, :1] = True
    if not bool(starts[:, 1:].any()):
        return one_document(q, k, v, seen, scale)
    for row in range(q.shape[0]):
        ends = [*torch.where(starts[row])[0].tolist(), q.shape[2]]
        here = [x[row : row + 1] for x in (q, k, v)]
        parts = [
            one_document(here[0][:, :, a:b], here[1][:, :, a:b], here[2][:, :, a:b], seen, scale)
            for a, b in pairwise(ends)
        ]
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


def one_document(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> Tensor:
    """Rows of one document each."""
    return causal(q, k, v, scale) if seen.sees_all(q.shape[2]) else in_blocks(q, k, v, seen, scale)
