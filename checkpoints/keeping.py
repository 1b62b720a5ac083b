"""Which checkpoints stay, and why each does."""

from collections.abc import Iterable, Mapping
from typing import Any

HELD_OUT_LOSS = "held_out_loss"  # in a checkpoint's `extra`: the loss that is compared, where it was taken
NEWEST, PROTECTED, BEST, EVERY, LAST = "newest", "protected", "best", "every", "last"


def kept(
    present: Iterable[int],
    *,
    newest: int,
    keep: int,
    keep_every: int = 0,
    keep_best: int = 0,
    protected: Iterable[int] = (),
    losses: Mapping[int, float] | None = None,
) -> dict[int, str]:
    """The steps that stay, of those that are there, each with its reason: the first that holds of

    newest: the one just written, which is complete; protected: the newest good one, the next one, and the
    source of the last rewind, named by the caller, at most three; best: the keep_best lowest held-out losses;
    every: multiples of keep_every (0: none); last: the last `keep` (0: all). So at most keep + keep_best + 3
    stay beside the multiples. Steps above the newest were left behind by a rewind: they count as the oldest,
    and are never best.
    """
    present = set(present)
    order = sorted(present, key=lambda step: (step <= newest, step))
    known = {s: loss for s, loss in (losses or {}).items() if s in present and s <= newest}
    best = sorted(known, key=lambda step: (known[step], -step))[:keep_best]
    multiples = [step for step in order if keep_every and step % keep_every == 0]
    reasons: dict[int, str] = {}
    for reason, steps in (
        (NEWEST, [newest]),
        (PROTECTED, protected),
        (BEST, best),
        (EVERY, multiples),
        (LAST, order[-keep:] if keep else order),
    ):
        for step in steps:
            if step in present:
                reasons.setdefault(step, reason)
    return reasons


def held_out_loss(extra: Mapping[str, Any]) -> float | None:
    """The held-out loss that a checkpoint was saved with, if it is a number."""
    value = extra.get(HELD_OUT_LOSS)
    return float(value) if isinstance(value, int | float) else None
