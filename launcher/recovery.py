"""What to do about a REWIND: from which snapshot to go on, which samples to leave out, at which rate.

Pure, and plain JSON to keep. `plan_recovery` answers an alarm with a Plan, or with STOP when the budget is
used up or nothing from before the onset is left. `Trail` remembers which samples each step was fed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.monitor import Kind, Monitor

RUNS = 512  # stretches of the trail that are kept
MOST_DOUBLINGS = 6  # of the margin


@dataclass(frozen=True)
class Stretch:
    """Attempts in a row, each of one step more and of the next `batch` samples."""

    step: int
    sample: int
    batch: int
    count: int


@dataclass(frozen=True)
class Trail:
    """Which samples were fed for which step. After a rewind it goes on from the trail of the snapshot."""

    stretches: tuple[Stretch, ...] = ()

    def fed(self, step: int, first: int, stop: int) -> "Trail":
        """With one attempt more: the update it tried and its samples [first, stop)."""
        last = self.stretches[-1] if self.stretches else None
        follows = last is not None and (
            step == last.step + last.count
            and stop - first == last.batch
            and first == last.sample + last.count * last.batch
        )
        if last is not None and follows:
            grown = dataclasses.replace(last, count=last.count + 1)
            return Trail((*self.stretches[:-1], grown))
        return Trail((*self.stretches, Stretch(step, first, stop - first, 1))[-RUNS:])

    def first_sample(self, step: int) -> int:
        """Of the first attempt at this step; of the oldest one known when the step lies before it."""
        assert self.stretches, "nothing was fed"
        for stretch in self.stretches:
            if step < stretch.step + stretch.count:
                return stretch.sample + max(0, step - stretch.step) * stretch.batch
        return self.stop

    @property
    def stop(self) -> int:
        """The sample after the last one fed."""
        last = self.stretches[-1]
        return last.sample + last.count * last.batch

    def as_json(self) -> list[list[int]]:
        return [[s.step, s.sample, s.batch, s.count] for s in self.stretches]

    @staticmethod
    def from_json(plain: Sequence[Sequence[int]]) -> "Trail":
        return Trail(tuple(Stretch(*entry) for entry in plain))


@dataclass(frozen=True)
class Budget:
    """What the rewinds so far have used; never rewound itself, but stored with what happens now.

    used: rewinds of the run; relapses: how many in a row did not help; alarm, snapshot: steps of the last
    one; lr_factor until the step lr_until, 1 after it.
    """

    used: int = 0
    relapses: int = 0
    alarm: int = 0
    snapshot: int = -1
    lr_factor: float = 1.0
    lr_until: int = 0

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> "Budget":
        return Budget(**plain)

    def lr_factor_at(self, step: int) -> float:
        """By which the scheduled rate is multiplied when `step` updates have been applied."""
        return self.lr_factor if step < self.lr_until else 1.0


@dataclass(frozen=True)
class Plan:
    """kind: REWIND or STOP; snapshot: step of the state to go on from; skipped: samples [start, stop) not to
    be fed (again); budget: as it stands afterwards; left: rewinds that remain."""

    kind: Kind
    reason: str
    budget: Budget
    left: int
    snapshot: int | None = None
    skipped: tuple[int, int] | None = None


def plan_recovery(
    settings: Monitor,
    budget: Budget,
    *,
    onset: int,
    alarm: int,
    snapshots: Sequence[int],
    trail: Trail,
    batch: int,
    reason: str = "",
) -> Plan:
    """Answer an alarm at the step `alarm` about what began at the step `onset`.

    snapshots: steps of all states that can be restored, those on disk included; N is the state after N
    updates. batch: samples of one update now. The skipped samples are those of the steps from onset - margin
    on, whatever the snapshot, up to those of `margin` steps after the alarm. A relapse begins within lr_steps
    and the margins of the alarm before: it goes back before that one's snapshot, doubles the margin and
    lowers the rate once more.
    """
    left = settings.budget_rewinds - budget.used
    if left <= 0:
        return Plan(
            Kind.STOP,
            f"all {settings.budget_rewinds} rewinds are used up; the last alarm: {reason}",
            budget,
            0,
        )
    horizon = max(settings.lr_steps, settings.cooldown_steps) + 2 * settings.margin_steps
    relapse = budget.used > 0 and onset <= budget.alarm + horizon
    relapses = budget.relapses + 1 if relapse else 0
    margin = settings.margin_steps * 2 ** min(relapses, MOST_DOUBLINGS)
    snapshot = choose(snapshots, onset, margin, before=budget.snapshot if relapse else None)
    if snapshot is None:
        return Plan(Kind.STOP, f"no snapshot from before step {onset}; the alarm: {reason}", budget, left)
    factor, until = budget.lr_factor, budget.lr_until
    if relapse:
        factor = budget.lr_factor_at(snapshot) * settings.lr_factor
        until = alarm + settings.lr_steps
    changed = Budget(budget.used + 1, relapses, max(alarm, budget.alarm), snapshot, factor, until)
    start = trail.first_sample(max(onset - margin, 1))
    skipped = (start, trail.stop + margin * batch)
    return Plan(Kind.REWIND, reason, changed, left - 1, snapshot, skipped)


def choose(snapshots: Sequence[int], onset: int, margin: int, *, before: int | None) -> int | None:
    """The newest snapshot from before the margin, and before the one that did not help; else the oldest one
    from before the onset, or the one that did not help; None without any.

    The loss of an update is of the weights before it: what began at the onset may be in step onset - 1.
    """
    good = [step for step in snapshots if step < onset - 1]
    clear = [step for step in good if step < onset - margin]
    further = [step for step in clear if before is None or step < before]
    if further:
        return max(further)
    if before is not None:
        again = before if before in snapshots and before < onset else None
        return min(good, default=again)
    return max(clear, default=min(good, default=None))
