"""The loop: cursor to batches to one attempt at an update to its record, until the last step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from checkpoints.keeping import HELD_OUT_LOSS
from checkpoints.manager import Manager
from launcher.config import Plan
from launcher.diagnosis import Fingerprint
from launcher.evaluate import HeldOutLoss, evaluate
from launcher.garbage import GarbageCollection
from launcher.guard import KEY
from launcher.heart import Heart
from launcher.layers import LayerStatistics
from launcher.metrics import MetricsWriter, encoded
from launcher.monitor import MOST_SKIPPED, Kind
from launcher.profile import Profiling
from launcher.responding import Responder
from launcher.rundirectory import RunDirectory
from launcher.sampling import Sampler
from launcher.stopping import StopRequest, reason
from megamodel.auxiliary import NAMES
from megamodel.config import Model
from megamodel.data.batch import Cursor
from megamodel.data.held_out import HeldOut
from megamodel.data.loader import LoadedStep
from megamodel.data.prefetch import Prefetcher
from megamodel.moe import Routed
from parallel.engine import Engine, Signals, StepResult
from parallel.heap import give_back

GIVE_BACK_EVERY = 100  # steps
NOTHING = -1.0  # travels for a cost that there was not


@dataclass(frozen=True)
class Run:
    """All that the loop needs, assembled."""

    plan: Plan
    engine: Engine
    feed: Prefetcher
    held_out: HeldOut
    metrics: MetricsWriter
    checkpoints: Manager
    directory: RunDirectory
    responder: Responder
    extra: dict[str, Any]  # goes into every checkpoint beside the cursor
    flops_per_token: float
    peak_flops: float | None  # of all devices together; None: no MFU
    peak_bytes: Callable[[], int]
    stop: StopRequest  # whether to save and stop
    heart: Heart
    sampler: Sampler
    layers: LayerStatistics
    started: float  # unix time at which the command began

    def close(self) -> None:
        """The files, the progress, the thread that reads ahead."""
        self.metrics.close()
        self.responder.events.close()
        self.feed.close()


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: at the last step, or before it by a signal."""

    cursor: Cursor
    stopped_by: str | None
    held_out: HeldOutLoss | None


def train(run: Run, cursor: Cursor) -> Outcome:
    """From the cursor to the last step. Collective; the cursor is the same on all ranks."""
    plan, settings = run.plan, run.plan.config
    loss: HeldOutLoss | None = None
    saved, skipped_in_a_row = cursor.step, 0
    if settings.checkpoint.snapshot_every and cursor.step < plan.steps:
        run.checkpoints.snapshot(run.engine, cursor, _extra(run))  # so that there is always one to go back to
    with (
        GarbageCollection(settings.run.garbage_collect_every) as garbage,
        _profiling(run) as profiling,
    ):
        run.responder.asked = run.stop.asked
        while cursor.step < plan.steps:
            run.heart.beat(cursor.step, "data")
            stage = plan.batches.at(cursor.step)
            fed = run.feed.at(cursor, micro_batch=plan.batches.micro_batch, accumulation=stage.accumulation)
            profiling.before(cursor.step + 1)
            before, (result, lr) = cursor, _attempt(run, cursor, fed, asked=run.stop.asked())
            run.heart.beat(before.step, "monitor")
            kind, recovery = run.responder.decide(before)
            record = _record(run, before, fed, result, lr=lr, kind=kind)
            cursor = advance(before, fed, result)
            run.directory.step = cursor.step
            profiling.after(cursor.step)
            taken = result.applied and _due(settings.evaluate.every, cursor.step, plan.steps)
            if taken:
                loss = _evaluate(run, record)
            _write(run, record, applied=result.applied)
            cursor = run.responder.respond(before, cursor, fed, result, recovery)
            skipped_in_a_row = 0 if result.applied or recovery else skipped_in_a_row + 1
            if skipped_in_a_row == MOST_SKIPPED:
                run.responder.give_up(before, cursor, skipped_in_a_row)
            asked = int(result.maxima[0])
            if _keep(run, cursor, result, asked=asked, loss=loss if taken else None):
                saved = cursor.step
                _sample(run, cursor, asked=asked)
            if asked:
                _finish(run, cursor)
                return Outcome(cursor, reason(asked), loss)
            run.checkpoints.check()
            garbage.step(cursor.attempt)
            if cursor.attempt % GIVE_BACK_EVERY == 0:
                give_back()
    if saved != cursor.step:
        _save(run, cursor, {})
    _finish(run, cursor)
    return Outcome(cursor, None, loss)


def _write(run: Run, record: dict[str, Any], *, applied: bool) -> None:
    """The record of an attempt, with the time at which it is written."""
    record["time/wall"] = time.time()
    line = run.metrics.write(record, applied=applied)
    run.layers.write({name: line[name] for name in ("step", "attempt", "segment")})


def _sample(run: Run, cursor: Cursor, *, asked: int) -> None:
    """A text of the state that was just saved, where one is due; that of the last state comes at the end."""
    if asked or cursor.step == run.plan.steps or not run.sampler.due(cursor.step):
        return
    run.heart.beat(cursor.step, "save")
    run.checkpoints.wait()
    text = run.sampler.write(cursor, run.checkpoints.latest() if run.sampler.is_main else None)
    if text is not None:
        run.metrics.text("sample", text, step=cursor.step)
        run.metrics.note(f"step {cursor.step}  a text that it wrote: {text!r}")


def _profiling(run: Run) -> Profiling:
    mesh, settings = run.engine.mesh, run.plan.config.profile
    cuda = mesh.device.type == "cuda"
    return Profiling(settings, run.directory.path, rank=mesh.world.rank, cuda=cuda)


def _attempt(run: Run, cursor: Cursor, fed: LoadedStep, *, asked: int) -> tuple[StepResult, float]:
    """One attempt, judged by the monitor, and the learning rate it was made with."""
    guard, faults = run.responder.guard, run.responder.faults
    guard.expect(cursor)
    guard.fed(cursor, fed.samples, fed.next_sample)
    run.responder.fire(cursor, fed)
    lr = run.plan.learning_rate.at(cursor.step) * guard.lr_factor(cursor.step) * faults.lr_factor(cursor)
    every = guard.settings.fingerprint_every
    wanted = every > 0 and (cursor.step + 1) % every == 0
    taken: list[Fingerprint] = []

    def on_gradients(found: list[tuple[str, Tensor, Tensor]]) -> None:
        faults.gradients(cursor, found, rank=run.engine.mesh.world.rank)
        if wanted:
            taken.append(Fingerprint.of(found))

    layers = run.layers.due(cursor.step + 1)

    def judge(signals: Signals) -> bool:
        if layers:
            run.layers.look(run.engine)
        return guard.judge(signals)

    run.heart.beat(cursor.step, "train_step")
    result = run.engine.train_step(
        faults.batches(cursor, fed.batches, data_rank=run.engine.mesh.dp.rank),
        lr=lr,
        tried=cursor.step + 1,
        judge=judge,
        maxima=(asked, run.peak_bytes(), *_costs(run, cursor)),
        on_gradients=on_gradients if wanted or faults.faults else None,
    )
    if result.signals is not None:
        run.heart.worked(result.work_seconds)
    run.responder.note(cursor, result, lr=lr, taken=taken[0] if taken else None)
    return result, lr


def _keep(run: Run, cursor: Cursor, result: StepResult, *, asked: int, loss: HeldOutLoss | None) -> bool:
    """Snapshot and save what is due after an attempt; whether it was saved. loss: taken at this very step."""
    run.heart.beat(cursor.step, "save")
    settings = run.plan.config.checkpoint
    every = settings.snapshot_every
    if result.applied and every and cursor.step % every == 0:
        run.checkpoints.snapshot(run.engine, cursor, _extra(run))
    if not asked and not (result.applied and _due(settings.every, cursor.step, run.plan.steps)):
        return False
    if asked and run.responder.guard.suspects:
        # The copies in memory end with this process, and what is saved now may prove to be bad.
        run.checkpoints.save_copy(run.responder.guard.trusted)
    _save(run, cursor, {HELD_OUT_LOSS: encoded(loss.mean)} if loss else {})
    return True


def _extra(run: Run) -> dict[str, Any]:
    """What goes into a checkpoint beside the cursor."""
    return {**run.extra, KEY: run.responder.guard.as_json()}


def _save(run: Run, cursor: Cursor, more: dict[str, Any]) -> None:
    guard = run.responder.guard
    protect = guard.pending(cursor.step)
    run.checkpoints.save(run.engine, cursor, _extra(run) | more, protect=protect, trusted=guard.trusted)


def _finish(run: Run, cursor: Cursor) -> None:
    """Until the last save is complete; raises what the writing raised."""
    run.heart.beat(cursor.step, "save")
    run.checkpoints.wait()
    _costs(run, cursor)


def _costs(run: Run, cursor: Cursor) -> tuple[float, float]:
    """Seconds that training stood still for checkpoints and that a write took; tells what was completed."""
    costs, metrics = run.checkpoints.take(), run.metrics
    for written in costs.written:
        facts = {"path": str(written.path), "seconds": written.seconds, "reason": "complete"}
        run.responder.events.write("save", cursor, attempt=cursor.attempt, step=cursor.step, **facts)
        speed = f", {written.bytes / max(written.seconds, 1e-9) / 2**20:,.0f} MiB/s" if written.bytes else ""
        metrics.note(f"saved {written.path} ({written.seconds:.2f} s{speed})")
    stall = NOTHING if costs.stall_seconds is None else costs.stall_seconds
    # Of the main rank, which ends last: told by each, one write would be in the records of two steps.
    told = costs.written if run.engine.mesh.is_main else []
    return stall, told[-1].seconds if told else NOTHING


def advance(cursor: Cursor, fed: LoadedStep, result: StepResult) -> Cursor:
    """The cursor after one attempt: a skipped one consumes samples but is no step."""
    cursor = replace(cursor, attempt=cursor.attempt + 1, sample=fed.next_sample)
    if not result.applied:
        return cursor
    return replace(cursor, step=cursor.step + 1, tokens=cursor.tokens + result.valid_tokens)


def _due(every: int, step: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _record(
    run: Run, cursor: Cursor, fed: LoadedStep, result: StepResult, *, lr: float, kind: Kind
) -> dict[str, Any]:
    """The metrics of one attempt; what is not known is left out."""
    record: dict[str, Any] = {"step": cursor.step + 1, "attempt": cursor.attempt + 1}
    record["monitor/verdict"] = int(kind if result.applied else max(kind, Kind.SKIP))
    record["monitor/rewinds"] = run.responder.guard.budget.used
    record["monitor/skipped_samples"] = sum(stop - start for start, stop in cursor.skipped)
    record["lr"] = lr
    record["tokens/total"] = cursor.tokens + (result.valid_tokens if result.applied else 0)
    record["time/step_seconds"] = result.seconds
    record["time/sample_seconds"] = run.sampler.take()  # of what was written after the attempt before
    if cursor.attempt == run.responder.started:
        record["time/startup_seconds"] = time.time() - run.started - result.seconds
    record["memory/peak_bytes"] = int(result.maxima[1])
    # Of what was saved after earlier attempts: the record of an attempt is written before its save.
    for name, seconds in zip(("stall", "write"), result.maxima[2:], strict=True):
        if seconds != NOTHING:
            record[f"time/checkpoint_{name}_seconds"] = seconds
    if result.signals is None:
        return record
    signals = result.signals
    record |= _losses(run.plan.config.model, signals)
    record["norm/grad"] = signals.norm
    record["logit/max"], record["logit/max_log_z"] = signals.max_logit, signals.max_log_z
    speed = len(fed.samples) * run.plan.config.train.sequence_length / result.seconds
    record["speed/tokens_per_second"] = speed
    if run.peak_flops:
        record["speed/mfu"] = speed * run.flops_per_token / run.peak_flops
    return record


def _losses(model: Model, signals: Signals) -> dict[str, float]:
    """loss/train, each further loss that the model has, and their sum."""
    weights = [model.z_loss]
    if isinstance(model.experts, Routed):
        weights += [model.experts.balance_loss, model.experts.router_z_loss]
    values = (signals.z_loss, *signals.auxiliary)
    further = {
        name: value
        for name, weight, value in zip(("loss/z", *NAMES), weights, values, strict=False)
        if weight
    }
    if not further:
        return {"loss/train": signals.loss}
    return {"loss/train": signals.loss, **further, "loss/total": signals.loss + sum(further.values())}


def _evaluate(run: Run, record: dict[str, Any]) -> HeldOutLoss | None:
    settings = run.plan.config.evaluate
    if settings.batches == 0:
        return None
    run.heart.beat(record["step"], "evaluate")
    start = time.perf_counter()
    loss = evaluate(
        run.engine,
        run.held_out,
        micro_batch=run.plan.batches.micro_batch,
        windows=run.plan.held_out_windows,
    )
    record["time/evaluate_seconds"] = time.perf_counter() - start
    if loss is not None:
        record["loss/eval"] = loss.mean
        if len(loss.sources) > 1:
            record.update({f"loss/eval/{name}": value for name, value in loss.sources.items()})
    return loss
