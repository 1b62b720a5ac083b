"""The loop: cursor to batches to one attempt at an update to its record, until the last step."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from checkpoints.manager import Manager
from launcher.config import Plan
from launcher.evaluate import HeldOutLoss, evaluate
from launcher.garbage import GarbageCollection
from launcher.metrics import MetricsWriter
from launcher.rundirectory import RunDirectory
from megamodel.data.batch import Cursor
from megamodel.data.held_out import HeldOut
from megamodel.data.loader import LoadedStep, Loader
from megamodel.data.prefetch import Prefetcher
from parallel.engine import Engine, StepResult

log = logging.getLogger(__name__)

OK, SKIP = 0, 2  # verdicts as they stand in the metrics
MOST_SKIPPED = 50  # attempts in a row without an update, after which a run gives up
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Run:
    """All that the loop needs, assembled."""

    plan: Plan
    engine: Engine
    loader: Loader
    feed: Prefetcher
    held_out: HeldOut
    metrics: MetricsWriter
    checkpoints: Manager
    directory: RunDirectory
    extra: dict[str, Any]  # goes into every checkpoint beside the cursor
    flops_per_token: float
    peak_flops: float | None  # of all devices together; None: no MFU
    peak_bytes: Callable[[], int]


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: at the last step, or before it by a signal."""

    cursor: Cursor
    stopped_by: str | None
    held_out: HeldOutLoss | None


class StopRequest:
    """Remembers a signal; all ranks learn of it with the next step."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1 and SIGINT ask for a save and a stop; a second SIGINT stops at once."""
    request = StopRequest()
    before = {number: signal.signal(number, request) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(run: Run, cursor: Cursor) -> Outcome:
    """From the cursor to the last step. Collective; the cursor is the same on all ranks."""
    plan, settings = run.plan, run.plan.config
    loss: HeldOutLoss | None = None
    saved, skipped_in_a_row = cursor.step, 0
    with stop_signals() as stop, GarbageCollection(settings.run.garbage_collect_every) as garbage:
        while cursor.step < plan.steps:
            stage = plan.batches.at(cursor.step)
            fed = run.feed.at(cursor, micro_batch=plan.batches.micro_batch, accumulation=stage.accumulation)
            lr = plan.learning_rate.at(cursor.step)
            result = run.engine.train_step(
                fed.batches, lr=lr, tried=cursor.step + 1, maxima=(stop.number, run.peak_bytes())
            )
            record = _record(run, cursor, fed, result, lr=lr)
            cursor = advance(cursor, fed, result)
            run.directory.step = cursor.step
            if result.applied and _due(settings.evaluate.every, cursor.step, plan.steps):
                loss = _evaluate(run, record)
            run.metrics.write(record, applied=result.applied)
            skipped_in_a_row = 0 if result.applied else _skipped(run, cursor, fed, result, skipped_in_a_row)
            asked = int(result.signals.maxima[0]) if result.signals else 0
            if asked or (result.applied and _due(settings.checkpoint.every, cursor.step, plan.steps)):
                _save(run, cursor)
                saved = cursor.step
            if asked:
                run.checkpoints.wait()
                return Outcome(cursor, signal.Signals(asked).name, loss)
            run.checkpoints.check()
            garbage.step(cursor.attempt)
    if saved != cursor.step:
        _save(run, cursor)
    run.checkpoints.wait()
    return Outcome(cursor, None, loss)


def advance(cursor: Cursor, fed: LoadedStep, result: StepResult) -> Cursor:
    """The cursor after one attempt: a skipped one consumes samples but is no step."""
    cursor = replace(cursor, attempt=cursor.attempt + 1, sample=fed.next_sample)
    if not result.applied:
        return cursor
    return replace(cursor, step=cursor.step + 1, tokens=cursor.tokens + result.valid_tokens)


def _due(every: int, step: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _record(run: Run, cursor: Cursor, fed: LoadedStep, result: StepResult, *, lr: float) -> dict[str, Any]:
    """The metrics of one attempt; what is not known is left out."""
    record: dict[str, Any] = {"step": cursor.step + 1, "attempt": cursor.attempt + 1}
    record["monitor/verdict"] = OK if result.applied else SKIP
    record["lr"] = lr
    record["tokens/total"] = cursor.tokens + (result.valid_tokens if result.applied else 0)
    record["time/step_seconds"] = result.seconds
    if result.signals is None:
        return record
    signals = result.signals
    record["loss/train"] = signals.loss
    if run.plan.config.model.z_loss:
        record["loss/z"] = signals.z_loss
        record["loss/total"] = signals.loss + signals.z_loss
    record["norm/grad"] = signals.norm
    record["logit/max"], record["logit/max_log_z"] = signals.max_logit, signals.max_log_z
    speed = len(fed.samples) * run.plan.config.train.sequence_length / result.seconds
    record["speed/tokens_per_second"] = speed
    if run.peak_flops:
        record["speed/mfu"] = speed * run.flops_per_token / run.peak_flops
    record["memory/peak_bytes"] = int(signals.maxima[1])
    return record


def _evaluate(run: Run, record: dict[str, Any]) -> HeldOutLoss | None:
    settings = run.plan.config.evaluate
    if settings.batches == 0:
        return None
    loss = evaluate(
        run.engine,
        run.held_out,
        micro_batch=run.plan.batches.micro_batch,
        batches=settings.batches,
    )
    if loss is not None:
        record["loss/eval"] = loss.mean
        if len(loss.sources) > 1:
            record.update({f"loss/eval/{name}": value for name, value in loss.sources.items()})
    return loss


def _skipped(run: Run, cursor: Cursor, fed: LoadedStep, result: StepResult, before: int) -> int:
    """Report an attempt without an update; RuntimeError when there were too many in a row."""
    if result.signals is None:
        why = "no target of the batch is valid"
    else:
        why = f"loss {result.signals.loss:.4g} and norm {result.signals.norm:.4g} are not finite"
    first = fed.samples[0]
    sources = run.loader.locate(first)
    where = f"{sources[0].path}, record {sources[0].record}" if sources else "nowhere"
    log.warning(
        f"attempt {cursor.attempt} applied no update: {why}; samples {first} to {fed.samples[-1]}, "
        f"from {where}"
    )
    if before + 1 >= MOST_SKIPPED:
        raise RuntimeError(f"{before + 1} attempts in a row applied no update, the last because {why}")
    return before + 1


def _save(run: Run, cursor: Cursor) -> None:
    path = run.checkpoints.save(run.engine, cursor, run.extra)
    run.metrics.note(f"saved {path}")
