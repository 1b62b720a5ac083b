"""Attention through torch's flex_attention: compiled on a GPU, where it skips whatever blocks see nothing.

B batch, S length, H query heads, K key/value heads, E head width, V value width.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from parallel.outside import Outside


class Visibility(Protocol):
    """Which keys a query sees, hashable: see megamodel.attend.Seen."""

    @property
    def sparse(self) -> str: ...
    def rule(self, i: Tensor, j: Tensor) -> Tensor: ...


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=1)
def _compiled_mask() -> Callable[..., BlockMask]:
    """Without S x S numbers in memory."""
    return torch.compile(create_block_mask, dynamic=False)


def _made(rule: Callable[..., Tensor], rows: int | None, length: int, device: torch.device) -> BlockMask:
    make = _compiled_mask() if device.type == "cuda" else create_block_mask
    return make(rule, rows, None, length, length, device=str(device))


@lru_cache(maxsize=16)
def _of_any_row(seen: Visibility, length: int, device: torch.device) -> BlockMask:
    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen.rule(i, j)

    return _made(sees, None, length, device)


def _of_documents(seen: Visibility, positions: Tensor) -> BlockMask:
    number = (positions == 0).cumsum(-1)

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = number[b, i] == number[b, j]
        if seen.sparse == "none":
            return same & seen.rule(i, j)
        return same & seen.rule(positions[b, i], positions[b, j])

    return _made(sees, positions.shape[0], positions.shape[1], positions.device)


@dataclass(frozen=True)
class _Latest:
    positions: weakref.ref
    version: int
    mask: BlockMask


_latest: dict[Visibility, _Latest] = {}


def block_mask(seen: Visibility, positions: Tensor, *, documents: bool) -> BlockMask:
    """What the rows of positions (B, S) see; made once for all layers that see alike."""
    if not documents:
        return _of_any_row(seen, positions.shape[1], positions.device)
    known = _latest.get(seen)
    if known is None or known.positions() is not positions or known.version != positions._version:
        known = _Latest(weakref.ref(positions), positions._version, _of_documents(seen, positions))
        _latest[seen] = known
    return known.mask


@Outside  # it has graphs of its own, and a mask is made once for all layers
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    seen: Visibility,
    documents: bool,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q (B, H, S, E), k (B, K, S, E), v (B, K, S, V), positions (B, S) -> (B, H, S, V).

    A sink s adds exp(s) to the denominator: the output is that without it x sigmoid(log Z - s).
    """

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    run = _compiled() if q.is_cuda else flex_attention
    out, aux = run(
        q,
        k,
        v,
        score_mod=None if softcap is None else capped,
        block_mask=block_mask(seen, positions, documents=documents),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=sinks is not None),
    )
    if sinks is None or aux.lse is None:
        return out
    return out * torch.sigmoid(aux.lse - sinks.float().view(1, -1, 1)).unsqueeze(-1).to(out.dtype)
