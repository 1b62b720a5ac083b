"""What a run says to people at its beginning and its end."""

import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints.files import Files
from checkpoints.manager import Manager
from checkpoints.weights import load_weights
from conf.schema import Difference
from launcher.config import Config, Plan
from launcher.evaluate import HeldOutLoss
from launcher.train import Outcome
from megamodel.accounting import flops_per_token, parameter_count
from megamodel.data.baselines import baselines
from megamodel.data.batch import Cursor
from megamodel.data.held_out import HeldOut
from megamodel.data.loader import next_samples
from megamodel.data.prepared import Prepared
from megamodel.generate import generate
from megamodel.model import Transformer
from parallel.engine import StepResult
from parallel.mesh import Mesh

MOST_SAMPLE_PARAMETERS = 1_000_000_000  # larger models are not loaded into one process to write a text
MOST_BASELINE_TOKENS = 50_000_000  # the bigram model counts all pairs of the training tokens
SAMPLE_SECONDS = 30.0


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
            (
                f"batch   {batch.global_batch} sequences of {config.train.sequence_length} tokens = "
                f"micro-batch {settled.batches.micro_batch} x accumulation {batch.accumulation} x "
                f"dp {mesh.dp.size}"
            ),
            f"layout  {_layout(settled, mesh, bounds)}",
            _copies(config, host_bytes),
        )
    )


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


def ending(
    settled: Plan, prepared: Prepared, held_out: HeldOut, outcome: Outcome, checkpoints: Manager
) -> str:
    """How it went against the baselines, a text that the model wrote, where everything is."""
    lines = []
    if outcome.stopped_by:
        lines.append(
            f"stopped by {outcome.stopped_by} at step {outcome.cursor.step}; the same command goes on"
        )
    else:
        lines.append(f"finished at step {outcome.cursor.step}")
        if outcome.held_out is not None:
            lines += compared(settled, prepared, held_out, outcome.held_out)
        checkpoint = checkpoints.latest()
        if checkpoint is not None:
            lines += sample(settled.config, prepared, checkpoint, checkpoints.files)
    lines.append(f"run directory  {settled.directory}")
    lines.append(f"curves         tensorboard --logdir {settled.directory / 'tensorboard'}")
    return "\n".join(lines)


def compared(settled: Plan, prepared: Prepared, held_out: HeldOut, loss: HeldOutLoss) -> list[str]:
    """The held-out loss beside both baselines on the same held-out tokens, for each source."""
    batches = settled.config.evaluate.batches
    windows = None if batches is None else batches * settled.batches.micro_batch * settled.data_size
    lines = []
    for name, value in loss.sources.items():
        what = f"held-out loss{f' of {name}' if len(loss.sources) > 1 else ''}"
        if prepared.train[name].count > MOST_BASELINE_TOKENS:
            lines.append(f"{what} {value:.4f} nats per token")
            continue
        found = baselines(
            prepared,
            held_out,
            isolate_documents=settled.config.data.isolate_documents,
            windows=windows,
            source=name,
        )
        lines.append(f"{what} {value:.4f} nats per token, on {found.tokens:,} tokens")
        for baseline, nats in (
            ("unigram entropy", found.unigram_entropy),
            ("bigram baseline", found.bigram_cross_entropy),
        ):
            side = "below" if value < nats else "above"
            lines.append(f"  {baseline} {nats:.4f}: the model is {abs(nats - value):.4f} {side}")
    return lines


def sample(config: Config, prepared: Prepared, checkpoint: Path, files: Files) -> list[str]:
    """A text that the saved model wrote, computed in this process on the CPU."""
    settings = config.sample
    if settings.max_tokens == 0:
        return []
    if parameter_count(config.model) > MOST_SAMPLE_PARAMETERS:
        return ["no sample: the model is too large to be loaded into the main process"]
    model = Transformer(config.model, seed=config.train.seed)
    load_weights(checkpoint, model, files=files)
    tokenizer = prepared.tokenizer
    prompt = [tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id]
    prompt += tokenizer.encode(settings.prompt)
    written: list[int] = []
    deadline = time.monotonic() + SAMPLE_SECONDS
    for token in generate(
        model,
        prompt,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        seed=config.train.seed,
        stop=tokenizer.eos_id,
        context=config.train.sequence_length,
        vocabulary=tokenizer.vocab_size,
    ):
        written.append(token)
        if time.monotonic() > deadline:
            break
    return ["a text that it wrote:", "", settings.prompt + tokenizer.decode(written), ""]


def prepared_facts(prepared: Prepared) -> dict[str, Any]:
    """What `prepare` made, as plain JSON."""
    report = prepared.report
    return {
        "directory": str(prepared.directory),
        "digest": prepared.digest,
        "tokenizer": prepared.tokenizer.hash,
        "vocab_size": prepared.tokenizer.vocab_size,
        "train_tokens": {name: corpus.count for name, corpus in prepared.train.items()},
        "held_out_tokens": {name: corpus.count for name, corpus in prepared.held_out.items()},
        "records": report.lines,
        "written": report.written,
        "skipped": report.skipped,
        "rejected": report.rejected,
        "reasons": report.reasons,
        "examples": report.examples,
    }


def prepared_text(prepared: Prepared) -> str:
    """The same for people."""
    report = prepared.report
    lines = [
        f"prepared in {prepared.directory}",
        (
            f"records  {report.lines:,} = written {report.written:,} + skipped {report.skipped:,} + rejected "
            f"{report.rejected:,}"
        ),
    ]
    for name, corpus in prepared.train.items():
        lines.append(f"{name}  {corpus.count:,} training tokens, {prepared.held_out[name].count:,} held out")
    lines += [f"  {reason}: {count:,}" for reason, count in sorted(report.reasons.items())]
    lines += [f"  {example}" for example in report.examples]
    return "\n".join(lines)
