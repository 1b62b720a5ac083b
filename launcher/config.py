"""The roots of the configuration, one for each command, and every check that needs more than one section."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from checkpoints.config import Checkpoint
from conf.schema import Difference, differences
from conf.typed import InvalidConfiguration, Problem, config, setting
from launcher.batch import Batches, batches
from launcher.hardware import Hardware
from launcher.heartbeat import Heartbeat
from launcher.monitor import Monitor
from launcher.profile import Profile
from launcher.sections import DEFAULT_STEPS, Evaluate, Fault, Run, Sample, Statistics, Train
from launcher.sinks import Sinks
from megamodel.config import Model
from megamodel.data.config import Data
from megamodel.forced import forced_problems, tokens_problem
from megamodel.kernels.config import Kernels
from megamodel.moe import Routed
from megamodel.optim import Cosine, LearningRate, Optim, Schedule, resolve, updates
from megamodel.tokenizer import TokenizerConfig
from parallel.config import Parallel
from parallel.mesh import data_parallel_size

Format = Literal["text", "json"]
PER_MACHINE = ("hardware", "data.cache", "data.workers", "run.log_level")
FORMAT_HELP = "what the command prints at its end: text for people, or one JSON object"


@config
class Config:
    """A training run."""

    run: Run = setting(factory=Run, on_resume="free", help="the place of the run")
    model: Model = setting(factory=Model, on_resume="must_equal", help="the architecture")
    parallel: Parallel = setting(factory=Parallel, on_resume="free", help="the split over processes")
    data: Data = setting(factory=Data, on_resume="must_equal", help="what is read")
    tokenizer: TokenizerConfig = setting(factory=TokenizerConfig, on_resume="must_equal", help="text to ids")
    train: Train = setting(factory=Train, on_resume="needs_override", help="length, batches, precision")
    optim: Optim = setting(factory=Optim, on_resume="needs_override", help="AdamW")
    schedule: Schedule = setting(factory=Cosine, on_resume="needs_override", help="the learning rate")
    evaluate: Evaluate = setting(factory=Evaluate, on_resume="free", help="the held-out loss")
    checkpoint: Checkpoint = setting(factory=Checkpoint, on_resume="free", help="what is saved when")
    monitor: Monitor = setting(factory=Monitor, on_resume="free", help="what is done about loss spikes")
    heartbeat: Heartbeat = setting(factory=Heartbeat, on_resume="free", help="signs of life of the ranks")
    hardware: Hardware = setting(factory=Hardware, on_resume="free", help="the machine")
    kernels: Kernels = setting(factory=Kernels, on_resume="free", help="forms of operations")
    profile: Profile = setting(factory=Profile, on_resume="free", help="steps to profile")
    sample: Sample = setting(factory=Sample, on_resume="free", help="the text printed at the end")
    statistics: Statistics = setting(factory=Statistics, on_resume="free", help="of the model's inside")
    sinks: Sinks = setting(factory=Sinks, on_resume="free", help="where else the metrics go")
    faults: list[Fault] = setting(
        factory=list,
        on_resume="free",
        help="faults on purpose, for rehearsals: [{kind: lr, step: 40, steps: 8, factor: 30}]",
    )
    resume: str = setting(
        "auto",
        on_resume="free",
        help="auto: go on from the newest good checkpoint in run.dir, if any; none: a new run; or a path",
    )
    resume_override: list[str] = setting(
        factory=list, on_resume="free", help="paths of settings that this resume may change: [optim.lr]"
    )
    dry_run: bool = setting(
        False, on_resume="free", help="build everything, one forward and backward pass on fake data, stop"
    )
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)

    def __post_init__(self) -> None:
        problems = [
            *layout_problems(self),
            *data_problems(self),
            *monitor_problems(self),
            *forced_problems(self.kernels, self.model, tp=self.parallel.tp),
        ]
        if problems:
            raise InvalidConfiguration(problems)


@config
class Prepare:
    """Tokenizer and token files alone."""

    data: Data = setting(factory=Data, on_resume="free", help="what is read")
    tokenizer: TokenizerConfig = setting(factory=TokenizerConfig, on_resume="free", help="text to ids")
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)


class Divided(Protocol):
    """What decides whether a layout divides; the planner asks without a whole run."""

    @property
    def model(self) -> Model: ...
    @property
    def parallel(self) -> Parallel: ...
    @property
    def train(self) -> Train: ...


def layout_problems(tree: Divided) -> Iterator[Problem]:
    """What does not divide by tp or over the stages."""
    tp, pp = tree.parallel.tp, tree.parallel.pp
    attention, layers = tree.model.attention, tree.model.n_layers
    sizes = {"model.attention.n_heads": attention.n_heads}
    if any(own.experts is None for own in tree.model.layers):
        sizes["model.feedforward.d_ff"] = tree.model.feedforward.d_ff
    if isinstance(tree.model.experts, Routed):
        sizes["model.experts.n_experts"] = tree.model.experts.n_experts
        if tree.model.experts.shared_d_ff:
            sizes["model.experts.shared_d_ff"] = tree.model.experts.shared_d_ff
    for path, size in sizes.items():
        if size % tp:
            yield Problem(
                path, f"{path} ({size}) must be divisible by parallel.tp ({tp}); {usable(size, 'tp')}"
            )
    kv = attention.n_kv_heads
    if kv % tp and tp % kv:
        allowed = [
            n
            for n in range(1, attention.n_heads + 1)
            if attention.n_heads % n == 0 and not (kv % n and n % kv)
        ]
        yield Problem(
            "model.attention.n_kv_heads",
            f"model.attention.n_kv_heads ({kv}) must be divisible by parallel.tp ({tp}), or tp by it; "
            f"use parallel.tp in {allowed}",
        )
    length = tree.train.sequence_length
    if tree.parallel.sequence_parallel and length % tp:
        yield Problem(
            "train.sequence_length",
            f"train.sequence_length ({length}) must be divisible by parallel.tp ({tp}) under "
            f"parallel.sequence_parallel=true; use {length // tp * tp or tp} or {-(-length // tp) * tp}",
        )
    if pp > layers:
        yield Problem(
            "parallel.pp", f"parallel.pp ({pp}) is more than model.n_layers ({layers}); use at most {layers}"
        )
    if pp > 1 and tree.model.shares_over_layers:
        yield Problem(
            "parallel.pp",
            f"parallel.pp ({pp}): the table of model.position.kind=buckets is shared by all layers, which "
            "must stand on one stage; use parallel.pp=1 or model.position.shared=false",
        )
    stages = tree.parallel.stage_layers
    if stages is not None and sum(stages) != layers:
        yield Problem(
            "parallel.stage_layers",
            f"parallel.stage_layers {list(stages)} add up to {sum(stages)}, but model.n_layers is {layers}",
        )


def usable(size: int, name: str) -> str:
    return f"use parallel.{name} in {[n for n in range(1, min(size, 64) + 1) if size % n == 0]}"


def data_problems(tree: Config) -> Iterator[Problem]:
    """What the data or a later section cannot have beside the model."""
    tokens = tree.tokenizer.vocab_size
    if tokens is not None and tokens > tree.model.vocab_size:
        yield Problem(
            "tokenizer.vocab_size",
            f"tokenizer.vocab_size ({tokens}) is more than model.vocab_size ({tree.model.vocab_size}); "
            f"use model.vocab_size={tokens}",
        )
    yield from length_problems(tree)
    every, saves = tree.sample.every, tree.checkpoint.every
    if every and (not saves or every % saves):
        yield Problem(
            "sample.every",
            f"sample.every ({every}) must be a multiple of checkpoint.every ({saves}), for a text is written "
            f"by what was saved; use {f'sample.every={saves}' if saves else f'checkpoint.every={every}'}",
        )
    if not tree.resume:
        yield Problem("resume", "resume must be auto, none or the path of a checkpoint")


def length_problems(tree: Divided) -> Iterator[Problem]:
    """A sequence longer than the positions reach."""
    longest = tree.model.longest
    if longest is not None and tree.train.sequence_length > longest:
        yield Problem(
            "train.sequence_length",
            f"train.sequence_length ({tree.train.sequence_length}) is more than model.position.max_positions "
            f"({longest}); learned positions end there",
        )


def monitor_problems(tree: Config) -> Iterator[Problem]:
    """A monitor that could not do what it is there for, and faults that could not fire."""
    saves = tree.checkpoint
    if tree.monitor.action == "rewind" and not saves.snapshot_every and not saves.every:
        yield Problem(
            "monitor.action",
            "monitor=rewind needs states to go back to: set checkpoint.snapshot_every (copies in memory) or "
            "checkpoint.every, or use monitor=skip",
        )


@dataclass(frozen=True)
class Plan:
    """A run's numbers, all settled: what only the number of processes and the device decide."""

    config: Config  # train.steps, global_batch, micro_batch and precision filled in; it is saved
    directory: Path
    data_size: int
    steps: int
    precision: Literal["fp32", "bf16"]
    batches: Batches
    learning_rate: LearningRate

    @property
    def held_out_windows(self) -> int | None:
        """Held-out sequences of each source that an evaluation takes; None: all."""
        batches = self.config.evaluate.batches
        return None if batches is None else batches * self.batches.global_batch


def plan(tree: Config, *, world_size: int, cuda: bool) -> Plan:
    """Settle a configuration for `world_size` processes; ValueError says what does not fit."""
    data_size = data_parallel_size(world_size, tp=tree.parallel.tp, pp=tree.parallel.pp)
    sizes = batches(tree.train, data_size=data_size)
    problem = tokens_problem(tree.kernels, sizes.micro_batch, tree.train.sequence_length)
    if problem:
        raise ValueError(problem)
    step_tokens = sizes.global_batch * tree.train.sequence_length
    steps = tree.train.steps or DEFAULT_STEPS
    if tree.train.tokens is not None:
        steps = updates(tree.train.tokens, step_tokens)
    rate = resolve(tree.schedule, peak=tree.optim.lr, steps=steps, step_tokens=step_tokens)
    precision = tree.train.precision or ("bf16" if cuda else "fp32")
    for fault in tree.faults:
        ranks = data_size if fault.kind == "tokens" else world_size
        if fault.rank >= ranks:
            what = "data ranks" if fault.kind == "tokens" else "processes"
            raise ValueError(f"faults: {fault.kind} on rank {fault.rank}, but there are {ranks} {what}")
    directory = run_directory(tree)
    settled = dataclasses.replace(
        tree,
        train=dataclasses.replace(
            tree.train,
            steps=None if tree.train.tokens is not None else steps,
            global_batch=sizes.global_batch,
            micro_batch=sizes.micro_batch,
            accumulation=None,
            precision=precision,
        ),
    )
    return Plan(
        config=settled,
        directory=directory,
        data_size=data_size,
        steps=steps,
        precision=precision,
        batches=sizes,
        learning_rate=rate,
    )


def run_directory(tree: Config) -> Path:
    """The directory of the run, a function of the configuration alone: the same on all ranks."""
    return Path("runs") / tree.run.name if tree.run.dir is None else Path(tree.run.dir).expanduser()


def check_resume(saved: Mapping[str, Any], new: Config) -> list[Difference]:
    """What a resumed run changes, all of it allowed; ValueError lists what is not.

    saved: the plain values of the configuration that the run was started with, as its config.yaml holds them.
    new: the settled configuration (`Plan.config`).
    """
    found = differences(saved, new)
    refused = [d for d in found if d.on_resume == "must_equal"]
    asked = [d for d in found if d.on_resume == "needs_override" and not allowed(d.path, new.resume_override)]
    if not refused and not asked:
        return found
    changed = ", ".join(d.path for d in [*refused, *asked])
    lines = [f"this configuration does not continue the run in {run_directory(new)}: {changed}"]
    lines += [
        f"  {d.path} was {d.old} and is {d.new}: it cannot change; use another run.name" for d in refused
    ]
    lines += [f"  {d.path} was {d.old} and is {d.new}: it needs resume_override=[{d.path}]" for d in asked]
    if asked and not refused:
        lines.append(f"to allow all of it: resume_override=[{','.join(d.path for d in asked)}]")
    raise ValueError("\n".join(lines))


def check_same(tree: Config, first: Mapping[str, Any], *, rank: int) -> None:
    """ValueError when this rank was started with another configuration than rank 0.

    first: rank 0's settled configuration as plain values. What differs by machine is left out.
    """
    own = [d for d in differences(first, tree) if not allowed(d.path, PER_MACHINE)]
    if own:
        lines = [f"rank {rank} was started with another configuration than rank 0: {own[0].path}"]
        lines += [f"  {d.path} is {d.old} on rank 0 and {d.new} on rank {rank}" for d in own]
        raise ValueError("\n".join([*lines, "start all processes with the same command"]))


def allowed(path: str, overrides: Sequence[str]) -> bool:
    """Whether a path or a section above it is named."""
    return any(path == name or path.startswith(f"{name}.") for name in overrides)
