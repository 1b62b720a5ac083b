"""Randomness from a key, never from a stream: nothing to save, the same at every layout."""

import hashlib

import torch

_MASK = (1 << 63) - 1


def key(*parts: int | str) -> int:
    """A 63-bit number that depends on every part (their types and order count): blake2b of their text."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & _MASK


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by the key of the parts."""
    return torch.Generator("cpu").manual_seed(key(*parts))
