"""What a run says to people at its beginning and its end."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints.manager import Manager
from conf.schema import Difference
from launcher.config import Config, Plan
from launcher.evaluate import HeldOutLoss
from launcher.forms import chosen, told
from launcher.rundirectory import RunDirectory
from launcher.sampling import record_sample, sample
from launcher.train import Outcome
from megamodel.accounting import flops_per_token, parameter_count
from megamodel.data.baselines import baselines
from megamodel.data.batch import Cursor
from megamodel.data.held_out import HeldOut
from megamodel.data.loader import next_samples
from megamodel.data.prepared import LEFT_OUT, Prepared
from megamodel.kernels.compiler import LIMIT, Compiled
from parallel.engine import StepResult
from parallel.mesh import Mesh

MOST_BASELINE_TOKENS = 50_000_000  # the bigram model counts all pairs of the training tokens
BASELINES = {"unigram entropy": "unigram_entropy", "bigram baseline": "bigram_cross_entropy"}


def compiled_text(made: Compiled) -> str:
    """What torch.compile did in this process."""
    text = f"torch.compile made {made.graphs} graphs, with {made.breaks} breaks"
    if made.beyond_limit:
        text += f"; more than {LIMIT} forms of a block were asked for, the rest ran uncompiled"
    return text


def beginning(
    settled: Plan,
    mesh: Mesh,
    bounds: Sequence[int],
    prepared: Prepared,
    cursor: Cursor,
    *,
    host_bytes: int,
) -> str:
    """What is about to be trained, on what, how, and where it goes."""
    config = settled.config
    train = sum(corpus.count for corpus in prepared.train.values())
    held_out = sum(corpus.count for corpus in prepared.held_out.values())
    isolated = (
        "documents isolated"
        if config.data.isolate_documents
        else "documents not isolated: a token sees the documents before its own in the same window"
    )
    batch = settled.batches.at(cursor.step)
    start = f"going on at step {cursor.step}" if cursor.step else "a fresh run"
    return "\n".join(
        (
            f"{start} of {settled.steps} steps in {settled.directory}",
            (
                f"model   {parameter_count(config.model):,} parameters, vocabulary "
                f"{config.model.vocab_size}, {settled.precision}"
            ),
            f"data    {train:,} training tokens, {held_out:,} held out, {isolated}",
            *_left_out(prepared),
            (
                f"batch   {batch.global_batch} sequences of {config.train.sequence_length} tokens = "
                f"micro-batch {settled.batches.micro_batch} x accumulation {batch.accumulation} x "
                f"dp {mesh.dp.size}"
            ),
            f"layout  {_layout(settled, mesh, bounds)}",
            f"kernels {told(chosen(settled, mesh.device))}",
            _copies(config, host_bytes),
            _monitor(config),
        )
    )


def _monitor(config: Config) -> str:
    """What is done about loss spikes, and what keeps them away."""
    found = ", ".join(prevention(config)) or "nothing"
    return f"monitor {config.monitor.action}; against spikes beforehand: {found}"


def prevention(config: Config) -> list[str]:
    """What in a configuration keeps the loss from spiking in the first place."""
    model = config.model
    known = {
        "z-loss": model.z_loss > 0,
        "QK-norm": getattr(getattr(model.attention, "qk_norm", None), "scope", "none") != "none",
        "soft-cap of attention": getattr(model.attention, "softcap", None) is not None,
        "soft-cap of logits": model.logits.softcap is not None,
        "clipping": config.optim.clip_norm > 0,
    }
    return [name for name, there in known.items() if there]


def _left_out(prepared: Prepared) -> list[str]:
    """The records that did not become documents, counted, with examples; nothing when there are none."""
    report = prepared.report
    if report.skipped + report.rejected == 0:
        return []
    counts = f"{report.lines:,} = written {report.written:,} + skipped {report.skipped:,}"
    where = f"all that are left out: {prepared.directory / LEFT_OUT}"
    line = f"records {counts} + rejected {report.rejected:,}; {where}"
    return [line, *[f"  {example}" for example in report.examples]]


def _copies(config: Config, host_bytes: int) -> str:
    """How much host memory copies of the state take, and what they are for."""
    settings = config.checkpoint
    reasons = ["a save in the background"] if settings.background else []
    if settings.snapshot_every:
        reasons.append(f"{settings.snapshots} snapshots, one every {settings.snapshot_every} steps")
    why = "for " + " and ".join(reasons) if reasons else "as nothing is saved in the background"
    return f"copies  at most {host_bytes / 2**20:,.1f} MiB of host memory on the main process, {why}"


def overridden(settled: Plan, cursor: Cursor, changed: Sequence[Difference]) -> str:
    """What a resume changes by resume_override, and what the next update therefore is made with."""
    lines = [f"resume_override: {d.path} was {d.old} and is {d.new}" for d in changed]
    sample = int(next_samples(cursor, 1)[0])
    rate = settled.learning_rate.at(cursor.step)
    lines.append(f"  update {cursor.step + 1} has learning rate {rate:.6g} and begins at sample {sample}")
    return "\n".join(lines)


def _layout(settled: Plan, mesh: Mesh, bounds: Sequence[int]) -> str:
    text = f"tp {mesh.tp.size} x pp {mesh.pp.size} x dp {mesh.dp.size} on {mesh.device.type}"
    if settled.config.parallel.sequence_parallel:
        text += ", sequence parallel"
    if mesh.pp.size > 1:
        count = [b - a for a, b in itertools.pairwise(bounds)]
        # The embedding stands before the first block, the last norm and the head behind the last one.
        text += f", blocks by stage {[count[0] - 1, *count[1:-1], count[-1] - 2]}"
    return text


def dry_run_text(
    settled: Plan,
    mesh: Mesh,
    bounds: Sequence[int],
    result: StepResult,
    peak_bytes: int,
    *,
    host_bytes: int,
) -> str:
    """That everything could be built, and what it took."""
    assert result.signals is not None
    config = settled.config
    expected = math.log(config.model.vocab_size)
    flops = flops_per_token(config.model, config.train.sequence_length).training
    return "\n".join(
        (
            f"dry run: {_layout(settled, mesh, bounds)}",
            f"model    {parameter_count(config.model):,} parameters, {flops / 1e6:,.1f} MFLOP a token",
            (
                f"one forward and backward pass on random tokens: loss {result.signals.loss:.4f} "
                f"(ln V = {expected:.4f}), norm {result.signals.norm:.4f}, {result.seconds:.2f} s"
            ),
            _copies(config, host_bytes),
            f"peak memory of the main process {peak_bytes / 2**20:,.0f} MiB; nothing was written",
        )
    )


def ended(
    settled: Plan, prepared: Prepared, held_out: HeldOut, outcome: Outcome, checkpoints: Manager
) -> dict[str, Any]:
    """How it went, as plain JSON: state, step, stopped_by, run_dir, checkpoint, held_out by source, sample.

    held_out: {loss, tokens, unigram_entropy, bigram_cross_entropy}, the baselines on the same tokens and
    absent for a corpus that is too large to count pairs of.
    """
    checkpoint = checkpoints.latest()
    facts: dict[str, Any] = {
        "state": "stopped" if outcome.stopped_by else "finished",
        "step": outcome.cursor.step,
        "stopped_by": outcome.stopped_by,
        "run_dir": str(settled.directory),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "held_out": {},
        "sample": None,
    }
    if outcome.stopped_by:
        return facts
    if outcome.held_out is not None:
        facts["held_out"] = compared(settled, prepared, held_out, outcome.held_out)
    if checkpoint is not None:
        text = sample(settled.config, prepared, checkpoint, checkpoints.files)
        facts["sample"] = text
        if text is not None:
            record_sample(
                RunDirectory(settled.directory).samples_file, outcome.cursor, settled.config.sample, text
            )
    return facts


def ending(facts: dict[str, Any]) -> str:
    """The same for people: against the baselines, a text that the model wrote, where everything is."""
    lines = [f"finished at step {facts['step']}"]
    if facts["stopped_by"]:
        lines = [f"stopped by {facts['stopped_by']} at step {facts['step']}; the same command goes on"]
    for name, found in facts["held_out"].items():
        what = f"held-out loss{f' of {name}' if len(facts['held_out']) > 1 else ''}"
        lines.append(f"{what} {found['loss']:.4f} nats per token, on {found['tokens']:,} tokens")
        for words, key in (
            ("unigram entropy", "unigram_entropy"),
            ("bigram baseline", "bigram_cross_entropy"),
        ):
            if key in found:
                gap = found[key] - found["loss"]
                side = "below" if gap > 0 else "above"
                lines.append(f"  {words} {found[key]:.4f}: the model is {abs(gap):.4f} {side}")
    if facts["sample"] is not None:
        lines += ["a text that it wrote:", "", facts["sample"], ""]
    lines.append(f"run directory  {facts['run_dir']}")
    lines.append(f"curves         tensorboard --logdir {Path(facts['run_dir']) / 'tensorboard'}")
    return "\n".join(lines)


def compared(
    settled: Plan, prepared: Prepared, held_out: HeldOut, loss: HeldOutLoss
) -> dict[str, dict[str, float]]:
    """The held-out loss of each source beside both baselines on the same held-out tokens."""
    facts: dict[str, dict[str, float]] = {}
    for name, value in loss.sources.items():
        facts[name] = {"loss": value, "tokens": loss.tokens}
        if prepared.train[name].count > MOST_BASELINE_TOKENS:
            continue
        found = baselines(
            prepared,
            held_out,
            isolate_documents=settled.config.data.isolate_documents,
            windows=settled.held_out_windows,
            source=name,
        )
        facts[name] |= {
            "tokens": found.tokens,
            "unigram_entropy": found.unigram_entropy,
            "bigram_cross_entropy": found.bigram_cross_entropy,
        }
    return facts
