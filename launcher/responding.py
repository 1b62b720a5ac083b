"""What is done about a verdict: the record first, then the rewind, then the search for the cause.

Every method is a collective: all ranks come to the same verdict at the same attempt.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from checkpoints.manager import Rewound
from launcher.config import Plan
from launcher.diagnosis import Attempt, Fingerprint, diagnose
from launcher.events import Events
from launcher.faults import Faults
from launcher.guard import KEY, Guard
from launcher.metrics import encoded
from launcher.monitor import Kind
from launcher.recovery import Plan as Recovery
from launcher.recovery import choose, plan_recovery
from launcher.rewind import Rewinder
from megamodel.data.batch import Batch, Cursor
from megamodel.data.loader import LoadedStep, Loader
from megamodel.tokenizer import Tokenizer
from parallel.engine import Signals, StepResult
from parallel.exchange import Exchange, together

log = logging.getLogger(__name__)

WORST = 3  # sequences whose text is recorded
TEXT = 400  # characters of each
MOST_SOURCES = 1000  # in one record
JOURNAL = 4096  # attempts that are remembered for a diagnosis


class MonitorStop(RuntimeError):
    """The monitor gives the run up: exit code 1, the checkpoints as they are."""


@dataclass
class Responder:
    """started: attempts made before this process; journal: its attempts that led to the live state."""

    plan: Plan
    guard: Guard
    events: Events
    rewinder: Rewinder
    loader: Loader
    exchange: Exchange
    faults: Faults
    started: int
    tokenizer: Tokenizer | None = None
    journal: deque[Attempt] = field(default_factory=lambda: deque(maxlen=JOURNAL))
    asked: Callable[[], int] = lambda: 0  # whether this process is to stop: ends a diagnosis
    _skipping: bool = False

    def decide(self, cursor: Cursor) -> tuple[Kind, Recovery | None]:
        """What of the verdict on the attempt at the cursor is carried out. A REWIND may turn out a STOP."""
        guard, verdict = self.guard, self.guard.verdict
        if guard.kind < Kind.REWIND or verdict is None:
            return guard.kind, None
        assert verdict.onset is not None
        recovery = plan_recovery(
            guard.settings,
            guard.budget,
            onset=verdict.onset,
            alarm=cursor.step + 1,
            snapshots=self.rewinder.checkpoints.restorable(self.rewinder.past),
            trail=guard.trail,
            batch=self.plan.batches.at(cursor.step).global_batch,
            reason=verdict.reason,
        )
        return recovery.kind, recovery

    def note(self, cursor: Cursor, result: StepResult, *, lr: float, taken: Fingerprint | None) -> None:
        """Remember an attempt, for a diagnosis."""
        if result.signals is not None:
            signals = result.signals
            self.journal.append(Attempt(cursor, lr, result.applied, signals.loss, signals.norm, taken))

    def respond(
        self, before: Cursor, after: Cursor, fed: LoadedStep, result: StepResult, recovery: Recovery | None
    ) -> Cursor:
        """Record what was found and do what was decided; the cursor to go on from.

        before, after: of the attempt. MonitorStop when the run is given up.
        """
        verdict, signals = self.guard.verdict, result.signals
        refused = not result.applied
        again, self._skipping = self._skipping, refused
        if signals is None:
            facts = {
                "reason": "empty: no target of the batch is valid",
                "sources": self._sources(fed.samples),
            }
            self._write("skip", before, **facts)
            self._tell(before, "SKIP", f"no target of the batch is valid, {self._where(fed)}")
            return after
        kind = verdict.kind if verdict else Kind.SKIP if refused else Kind.OK
        if kind == Kind.OK:
            return after
        facts = self._facts(before, signals, kind)
        if recovery is None:
            self._skip_or_warn(before, fed, facts, refused=refused, again=again)
            return after
        lr = {"lr_before": self.journal[-1].lr}
        facts |= {"alarm": before.step + 1, "worst": self._worst(fed), **lr}
        if recovery.kind == Kind.STOP:
            more = {"reason": recovery.reason, "budget_left": recovery.left}
            self._stop(before, after, facts | more, below=facts["onset"])
        return self._rewind(before, after, facts, recovery)

    def fire(self, cursor: Cursor, fed: LoadedStep) -> None:
        """Record the faults that begin at this attempt, and change the weights if one of them does."""
        for fault in self.faults.due(cursor, fed.samples):
            self._write("fault", cursor, reason=f"on purpose: {fault.kind}", fault=fault.as_json())
        self.faults.weights(cursor, self.rewinder.engine)

    def _facts(self, cursor: Cursor, signals: Signals, kind: Kind) -> dict[str, Any]:
        verdict = self.guard.verdict
        reason = verdict.reason if verdict else "non_finite: the loss or a gradient is not finite"
        names = ("loss", "z_loss", "norm", "max_logit", "max_log_z", "non_finite")
        known = asdict(signals)
        return {
            "verdict": kind.name,
            "reason": reason,
            "onset": verdict.onset if verdict else None,
            "signals": {name: known[name] for name in names},
        }

    def _skip_or_warn(
        self, cursor: Cursor, fed: LoadedStep, facts: dict[str, Any], *, refused: bool, again: bool
    ) -> None:
        name, done = facts["verdict"], "SKIP" if refused else "WARN"
        what = done if name == done else f"{done} (monitor={self.guard.settings.action}; it says {name})"
        if refused:
            facts |= {"worst": self._worst(fed), "sources": self._sources(fed.samples)}
        self._write("skip" if refused else "warn", cursor, **facts)
        where = f"; {self._where(fed)}" if refused else ""
        self._tell(cursor, what, f"{facts['reason']}{where}")
        if refused and not again:  # of several in a row the first is enough
            self._diagnose(cursor, list(self.journal)[-1:], restore=lambda: None)

    def _rewind(self, before: Cursor, after: Cursor, facts: dict[str, Any], recovery: Recovery) -> Cursor:
        guard, rewinder = self.guard, self.rewinder
        assert recovery.snapshot is not None and recovery.skipped is not None
        start, stop = recovery.skipped
        budget, alarm = recovery.budget, list(self.journal)
        told: list[Rewound] = []

        def announce(rewound: Rewound) -> None:
            nonlocal budget
            told.append(rewound)
            step = rewound.cursor.step
            budget = replace(recovery.budget, snapshot=step)
            record = facts | {
                "snapshot_step": step,
                "snapshot": rewound.source,
                "skipped": [start, stop],
                "sources": self._sources(range(start, stop)),
                "lr_after": self.plan.learning_rate.at(step) * budget.lr_factor_at(step),
                "budget_left": recovery.left,
                "budget": budget.as_json(),
            }
            together(self.exchange, lambda: self._write("rewind", before, **record))

        cursor = rewinder.rewind(after, recovery.snapshot, (start, stop), announce=announce)
        guard.restore(rewinder.extra, budget.as_json())
        self._tell(
            before,
            "REWIND",
            f"{facts['reason']} since step {facts['onset']}; back to step {cursor.step} "
            f"({told[0].source}), samples {start} to {stop - 1} are left out, rewinds left: {recovery.left}",
        )
        since = [attempt for attempt in alarm if attempt.number > told[0].cursor.attempt]
        whole = told[0].cursor.attempt >= self.started and len(alarm) < JOURNAL
        self.journal = deque((a for a in alarm if a.number <= told[0].cursor.attempt), maxlen=JOURNAL)

        def restore() -> None:
            rewinder.checkpoints.rewind(rewinder.engine, cursor.step, rewinds=rewinder.past)

        self._diagnose(before, since if whole else [], restore=restore)
        return cursor

    def give_up(self, before: Cursor, after: Cursor, attempts: int) -> NoReturn:
        """End a run that makes no update any more."""
        reason = f"{attempts} attempts in a row applied no update"
        self._stop(before, after, {"reason": reason}, below=self.guard.trusted + 1)

    def _stop(self, before: Cursor, after: Cursor, facts: dict[str, Any], *, below: int) -> NoReturn:
        """Record the end; save the newest good state, from before the step `below`, if only memory has it."""
        guard, rewinder = self.guard, self.rewinder
        steps = rewinder.checkpoints.restorable(rewinder.past)
        last = guard.budget.snapshot  # of the last rewind: as good as any that is left
        good = choose(steps, below, guard.settings.margin_steps, before=None)
        good = last if good is None and last in steps else good
        facts |= {"snapshot_step": good, "budget": guard.budget.as_json()}
        together(self.exchange, lambda: self._write("stop", before, **facts))
        if good is not None and good not in rewinder.checkpoints.saved(rewinder.past):
            self._save_good(before, after, good)
        raise MonitorStop(f"stopped by the monitor at step {before.step + 1}: {facts['reason']}")

    def _save_good(self, before: Cursor, after: Cursor, good: int) -> None:
        guard, rewinder = self.guard, self.rewinder
        cursor = rewinder.rewind(after, good, None)
        guard.restore(rewinder.extra, guard.budget.as_json())
        path = rewinder.checkpoints.save(rewinder.engine, cursor, {**rewinder.extra, KEY: guard.as_json()})
        rewinder.checkpoints.wait()
        self._tell(before, "STOP", f"the state of step {good}, from before the onset, is saved in {path}")

    def _diagnose(self, cursor: Cursor, attempts: list[Attempt], *, restore: Callable[[], None]) -> None:
        most = self.guard.settings.diagnose_attempts
        if most == 0:
            return
        if 0 < len(attempts) <= most:
            found = diagnose(
                self.rewinder.engine,
                self.exchange,
                attempts,
                feed=self._feed,
                restore=restore,
                asked=self.asked,
            )
        elif attempts:
            reason = f"{len(attempts)} attempts since the snapshot, monitor.diagnose_attempts is {most}"
            found = {"cause": "unknown", "reason": reason}
        else:
            reason = "the attempts since the snapshot were made by an earlier process"
            found = {"cause": "unknown", "reason": reason}
        self._write("diagnosis", cursor, **found)
        self._tell(cursor, "cause", found["reason"])

    def _feed(self, cursor: Cursor) -> list[Batch]:
        mesh, batches = self.rewinder.engine.mesh, self.plan.batches
        return self.loader.at(
            cursor,
            micro_batch=batches.micro_batch,
            accumulation=batches.at(cursor.step).accumulation,
            data_rank=mesh.dp.rank,
            data_size=mesh.dp.size,
        ).batches

    def _worst(self, fed: LoadedStep) -> list[dict[str, Any]]:
        """The sequences of the attempt with the largest losses, and their text."""
        losses = self.rewinder.engine.sample_losses().tolist()
        numbers = [int(sample) for batch in fed.batches for sample in batch.samples]
        own = [
            [sample, encoded(total / count)]
            for sample, (total, count) in zip(numbers, losses, strict=False)
            if count
        ]
        everyone = [entry for rank in self.exchange.everyone(own) for entry in rank]
        order = sorted(everyone, key=lambda e: -e[1] if isinstance(e[1], float) else -float("inf"))
        return [{"sample": s, "loss": loss, "text": self._text(s)} for s, loss in order[:WORST]]

    def _text(self, sample: int) -> str | None:
        if self.tokenizer is None or self.exchange.rank != 0:
            return None
        return self.tokenizer.decode(self.loader.tokens(sample))[:TEXT]

    def _sources(self, samples: Sequence[int]) -> list[dict[str, Any]]:
        """Where samples come from, documents in order, each once; on the main rank, which records them."""
        if self.exchange.rank != 0:
            return []
        found: dict[tuple, dict[str, Any]] = {}
        for sample in samples:
            for source in self.loader.locate(sample):
                plain = asdict(source)
                found.setdefault(tuple(plain.values()), plain)
            if len(found) >= MOST_SOURCES:
                break
        return list(found.values())[:MOST_SOURCES]

    def _where(self, fed: LoadedStep) -> str:
        sources = self.loader.locate(fed.samples[0])
        where = f"{sources[0].path}, record {sources[0].record}" if sources else "nowhere"
        return f"samples {fed.samples[0]} to {fed.samples[-1]}, from {where}"

    def _write(self, event: str, cursor: Cursor, **facts: Any) -> None:
        self.events.write(event, cursor, attempt=cursor.attempt + 1, **facts)

    def _tell(self, cursor: Cursor, what: str, words: str) -> None:
        log.warning(f"step {cursor.step + 1}, attempt {cursor.attempt + 1}: {what}: {words}")
