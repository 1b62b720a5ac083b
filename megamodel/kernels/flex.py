"""Attention through torch's flex_attention: compiled on a GPU, where it skips whatever blocks see nothing.

B batch, S length, H query heads, K key/value heads, E head width, V value width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention


class Visibility(Protocol):
    """Which keys a query sees: see megamodel.attend.Seen."""

    @property
    def sparse(self) -> str: ...
    def rule(self, i: Tensor, j: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Rule:
    """What a batch lets each query see. number (B, S): of each token's document; None: one a row."""

    seen: Visibility
    positions: Tensor
    number: Tensor | None

    def mask(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The rule at one (row, head, query, key)."""
        if self.number is None:
            return self.seen.rule(i, j)
        same = self.number[b, i] == self.number[b, j]
        if self.seen.sparse == "none":
            return same & self.seen.rule(i, j)
        return same & self.seen.rule(self.positions[b, i], self.positions[b, j])


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q (B, H, S, E), k (B, K, S, E), v (B, K, S, V) -> (B, H, S, V).

    A sink s adds exp(s) to the denominator: the output is that without it x sigmoid(log Z - s).
    """
    rows = None if rule.number is None else q.shape[0]
    length = q.shape[2]

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule.mask(b, h, i, j)

    blocks = create_block_mask(sees, rows, None, length, length, device=str(q.device))

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    run = _compiled() if q.is_cuda else flex_attention
    out, aux = run(
        q,
        k,
        v,
        score_mod=None if softcap is None else capped,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    log_z = aux.lse
    if sinks is None or log_z is None:
        return out
    return out * torch.sigmoid(log_z - sinks.float().view(1, -1, 1)).unsqueeze(-1).to(out.dtype)
