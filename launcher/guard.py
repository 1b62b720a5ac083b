"""The monitor in a running loop: its memory, and its word on each attempt before the update is applied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.monitor import (
    History,
    Kind,
    Monitor,
    Observation,
    Verdict,
    carried_out,
    cooled,
    judge,
    trusted_step,
)
from launcher.recovery import Budget, Trail
from megamodel.data.batch import Cursor
from parallel.engine import Signals

KEY = "monitor"  # in a checkpoint's `extra`


@dataclass
class Guard:
    """Equal on every rank."""

    settings: Monitor
    history: History = field(default_factory=History)
    trail: Trail = field(default_factory=Trail)
    budget: Budget = field(default_factory=Budget)
    verdict: Verdict | None = None  # on the attempt that runs or has just run
    kind: Kind = Kind.OK  # what of it is carried out
    _step: int = 0

    def expect(self, cursor: Cursor) -> None:
        """The next thing to be judged is the attempt at this cursor."""
        self._step, self.verdict, self.kind = cursor.step + 1, None, Kind.OK

    def judge(self, signals: Signals) -> bool:
        """Whether to apply the update: the engine's judge."""
        if self.settings.action != "none":
            seen = Observation(self._step, signals.loss, signals.norm, signals.non_finite)
            self.verdict = judge(self.history, seen, self.settings)
            self.history = self.verdict.history
            self.kind = carried_out(self.verdict.kind, self.settings)
        return self.kind <= Kind.WARN

    def fed(self, cursor: Cursor, samples: Sequence[int], next_sample: int) -> None:
        """Remember what the attempt at this cursor was fed."""
        self.trail = self.trail.fed(cursor.step + 1, samples[0], next_sample)

    def lr_factor(self, step: int) -> float:
        """By which the scheduled rate is multiplied when `step` updates have been applied."""
        return self.budget.lr_factor_at(step)

    @property
    def trusted(self) -> int:
        """The newest step whose state is beyond suspicion."""
        return trusted_step(self.history)

    def pending(self, step: int) -> list[int]:
        """The state last gone back to, as long as a relapse may want it."""
        soon = self.budget.alarm + max(self.settings.lr_steps, self.settings.cooldown_steps)
        return [self.budget.snapshot] if self.budget.used and step <= soon else []

    @property
    def suspects(self) -> bool:
        """Whether something has begun that may turn out to last."""
        tracks = (self.history.loss, self.history.norm)
        return bool(self.history.non_finite) or any(track.rising for track in tracks)

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint's `extra`."""
        return {
            "history": self.history.as_json(),
            "trail": self.trail.as_json(),
            "budget": self.budget.as_json(),
        }

    def restore(self, extra: Mapping[str, Any], decided: Mapping[str, Any] | None = None) -> None:
        """Go on from a checkpoint's `extra`; decided: the budget after rewinds that it does not know of."""
        found = extra.get(KEY)
        if found:
            self.history = History.from_json(found["history"])
            self.trail = Trail.from_json(found["trail"])
            self.budget = Budget.from_json(found["budget"])
        else:
            self.history, self.trail = History(), Trail()
        if decided:
            self.budget = Budget.from_json(decided)
            self.history = cooled(self.history, self.settings)
