"""Why an attempt went wrong: it is computed twice again, from the same state, on the same samples.

Equal to the record and to each other: these data on this state. Otherwise something in the hardware, named by
the rank and the parameter where fingerprints (64-bit sums of the bits of each rank's own weights and
gradients, between backward and reduction) differ. A fault that is always there cannot be told from data.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.metrics import encoded
from megamodel.data.batch import Batch, Cursor
from parallel.engine import Engine, Signals
from parallel.exchange import Exchange

CLOSE = 1e-3  # relative difference of loss or norm that kernels on a GPU make by themselves
WEIGHT = "weight"
LARGEST = 3  # gradients of each rank that are recorded
PERMANENT = "a fault that is always there would look the same"


@dataclass(frozen=True)
class Fingerprint:
    """Of this rank's P parameters: sums (2, P) int64, of the weights before the attempt and of the gradients;
    norms (P) of the gradients."""

    names: list[str]
    sums: Tensor
    norms: Tensor

    @staticmethod
    def of(found: Sequence[tuple[str, Tensor, Tensor]]) -> "Fingerprint":
        weights = torch.stack([bits(weight) for _, weight, _ in found])
        gradients = torch.stack([bits(gradient) for _, _, gradient in found])
        norms = torch.stack([gradient.detach().float().norm() for _, _, gradient in found])
        return Fingerprint([name for name, *_ in found], torch.stack((weights, gradients)).cpu(), norms.cpu())

    def largest(self, count: int) -> list[list[Any]]:
        """[name, norm] of the largest gradients, those that are no number first."""
        order = torch.nan_to_num(self.norms, nan=torch.inf).argsort(descending=True)[:count].tolist()
        return [[self.names[at], encoded(float(self.norms[at]))] for at in order]

    def differing(self, other: "Fingerprint") -> list[str]:
        """What differs, weights first: one that was changed shows in all gradients."""
        found = []
        for what, row, its in zip((WEIGHT, "gradient"), self.sums, other.sums, strict=True):
            own = dict(zip(self.names, row.tolist(), strict=True))
            others = dict(zip(other.names, its.tolist(), strict=True))
            # One that only one of them has got no gradient in the other, such as an expert without tokens.
            found += [f"{what} of {name}" for name in own | others if own.get(name) != others.get(name)]
        return found


def bits(tensor: Tensor) -> Tensor:
    """The 64-bit sum of a tensor's bits, as a 0-d int64 tensor on its device."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(-1).view(whole).sum(dtype=torch.int64)


@dataclass(frozen=True)
class Attempt:
    """One attempt as it happened. cursor: before it; fingerprint: this rank's, where one was taken."""

    cursor: Cursor
    lr: float
    applied: bool
    loss: float
    norm: float
    fingerprint: Fingerprint | None = None

    @property
    def number(self) -> int:
        return self.cursor.attempt + 1


@dataclass(frozen=True)
class _Again:
    loss: float
    norm: float
    fingerprint: Fingerprint


def diagnose(
    engine: Engine,
    exchange: Exchange,
    attempts: Sequence[Attempt],
    *,
    feed: Callable[[Cursor], list[Batch]],
    restore: Callable[[], None],
    asked: Callable[[], int] = lambda: 0,
) -> dict[str, Any]:
    """What is found, as plain JSON, equal on every rank. Collective.

    attempts: from the state that `restore` gives up to the one in question. feed: the micro-batches of this
    data rank at a cursor. The state is `restore`'s again when this returns. asked: whether this process is to
    stop, which ends the search.
    """
    exact = engine.mesh.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()

    def interrupted() -> bool:
        return any(exchange.everyone(asked()))

    try:
        first = _replay(engine, attempts, feed, interrupted)
        restore()
        second = _replay(engine, attempts, feed, interrupted)
    except _Interrupted:
        return {"cause": "unknown", "reason": "the run was to stop before the cause was found"}
    finally:
        restore()
    for attempt, one, two in zip(attempts, first, second, strict=True):
        apart = one.fingerprint.differing(two.fingerprint) if exact else []
        names = exchange.everyone(apart)
        if any(names) or not (_same(one.loss, two.loss, exact) and _same(one.norm, two.norm, exact)):
            return _hardware("two replays of it differ", attempt, [one, two], names)
        kept = attempt.fingerprint
        apart = kept.differing(one.fingerprint) if kept is not None and exact else []
        names = exchange.everyone(apart)
        alike = _same(attempt.loss, one.loss, exact) and _same(attempt.norm, one.norm, exact)
        if any(names) or not alike:
            return _hardware("what was recorded did not happen again", attempt, [one, two], names)
    last = attempts[-1]
    own = exchange.everyone(first[-1].fingerprint.largest(LARGEST))
    return {
        "reason": f"data x state: attempt {last.number} computed twice again gives the same; {PERMANENT}",
        "cause": "data x state",
        "largest_gradients": [
            {"rank": rank, "parameter": name, "norm": norm}
            for rank, found in enumerate(own)
            for name, norm in found
        ],
        **_numbers(last, [first[-1], second[-1]]),
    }


def _hardware(what: str, attempt: Attempt, again: list[_Again], names: list[list[str]]) -> dict[str, Any]:
    ranks = [rank for rank, apart in enumerate(names) if apart]
    # A weight that was changed is the cause of the gradients, on its own rank and on others.
    weights = [rank for rank in ranks if names[rank][0].startswith(WEIGHT)]
    first = min(weights or ranks, key=lambda rank: len(names[rank]), default=None)
    found: dict[str, Any] = {}
    if first is None:
        where = "which rank is not known: monitor.fingerprint_every=1 would name it"
    else:
        found = {"rank": first, "ranks": ranks, "parameter": names[first][0]}
        where = f"first in the {names[first][0]} on rank {first}"
        where += f" (of ranks {ranks})" if len(ranks) > 1 else ""
    return {
        "reason": f"hardware: {what}, from attempt {attempt.number} on; {where}",
        "cause": "hardware",
        **found,
        **_numbers(attempt, again),
    }


def _numbers(attempt: Attempt, again: list[_Again]) -> dict[str, Any]:
    return {
        "compared_attempt": attempt.number,
        "recorded": encoded({"loss": attempt.loss, "norm": attempt.norm}),
        "replayed": [encoded({"loss": one.loss, "norm": one.norm}) for one in again],
    }


class _Interrupted(Exception):
    """This process, or another one, is to stop."""


def _replay(
    engine: Engine,
    attempts: Sequence[Attempt],
    feed: Callable[[Cursor], list[Batch]],
    interrupted: Callable[[], bool],
) -> list[_Again]:
    done = []
    for attempt in attempts:
        if interrupted():
            raise _Interrupted
        taken: list[Fingerprint] = []

        def judge(signals: Signals, applied: bool = attempt.applied) -> bool:
            return applied

        result = engine.train_step(
            feed(attempt.cursor),
            lr=attempt.lr,
            tried=attempt.cursor.step + 1,
            judge=judge,
            on_gradients=lambda found, taken=taken: taken.append(Fingerprint.of(found)),
        )
        assert result.signals is not None
        done.append(_Again(result.signals.loss, result.signals.norm, taken[0]))
    return done


def _same(a: float, b: float, exact: bool) -> bool:
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or math.isinf(b):
        return str(a) == str(b)
    return a == b if exact else math.isclose(a, b, rel_tol=CLOSE)
