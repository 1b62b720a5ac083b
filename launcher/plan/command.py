"""`plan`: what a run would need and how fast it would be, before anything is started."""

import json
from dataclasses import dataclass
from pathlib import Path

from checkpoints.config import Checkpoint
from conf.typed import InvalidConfiguration, config, parse, setting
from launcher.batch import ramp_starts
from launcher.config import FORMAT_HELP, Format, length_problems
from launcher.failure import DONE
from launcher.hardware import Hardware, Machine
from launcher.plan import published, search
from launcher.plan.advice import Comment, Serving, active_parameters, budget_tokens, comments, serving
from launcher.plan.calibrate import calibrated
from launcher.plan.layout import Precision, Recompute
from launcher.plan.schedule import CHUNKS, Kind, Timeline, simulate
from launcher.plan.search import Estimate, Planner, Split, Wanted
from launcher.plan.timing import Timing
from launcher.sections import Train
from megamodel.accounting import Flops, flops_per_token, parameter_count
from megamodel.config import Model
from megamodel.data.config import Data
from megamodel.forced import forced_problems
from megamodel.kernels.config import Kernels
from megamodel.optim import Optim
from parallel.config import BUCKET_BYTES, Parallel, check_bucket, nothing_recomputed


@config
class PlannedSplit:
    """The split over GPUs: what is given stays, the rest is searched."""

    tp: int | None = setting(None, on_resume="free", help="tensor-parallel size; null: searched")
    pp: int | None = setting(None, on_resume="free", help="pipeline stages; null: searched")
    sequence_parallel: bool | None = setting(
        None, on_resume="free", help="split activations between the tp regions; null: searched"
    )
    recompute: Recompute | None = setting(
        None, on_resume="free", help="what backward computes again; null: searched"
    )
    recompute_every: int = setting(1, on_resume="free", help="recompute only every n-th block")
    stage_layers: list[int] | None = setting(
        None, on_resume="free", help="blocks of each pipeline stage; null balances by cost"
    )
    bucket_bytes: int = setting(
        BUCKET_BYTES, on_resume="free", help="gradients are summed over dp during backward; 0: after it"
    )

    def __post_init__(self) -> None:
        if min(self.tp or 1, self.pp or 1) < 1 or 0 in (self.tp, self.pp):
            raise ValueError(
                f"parallel.tp ({self.tp}) and parallel.pp ({self.pp}) must be at least 1, or null"
            )
        if self.recompute_every < 1:
            raise ValueError(
                f"parallel.recompute_every ({self.recompute_every}) must be at least 1; 1 is every block"
            )
        if self.recompute_every > 1 and self.recompute == "none":
            raise ValueError(nothing_recomputed(self.recompute_every))
        check_bucket(self.bucket_bytes)
        known = search.modes()
        if self.recompute is not None and self.recompute not in known:
            raise ValueError(
                f"parallel.recompute={self.recompute} is not one that training has; use {' or '.join(known)}"
            )


@config
class Plan:
    """The planner."""

    model: Model = setting(factory=Model, on_resume="free", help="the architecture")
    parallel: PlannedSplit = setting(factory=PlannedSplit, on_resume="free", help="the split over GPUs")
    kernels: Kernels = setting(factory=Kernels, on_resume="free", help="forms of operations")
    data: Data = setting(factory=Data, on_resume="free", help="data.isolate_documents costs a mask")
    train: Train = setting(factory=Train, on_resume="free", help="length, batches, precision")
    optim: Optim = setting(factory=Optim, on_resume="free", help="AdamW")
    checkpoint: Checkpoint = setting(factory=Checkpoint, on_resume="free", help="copies in host memory")
    hardware: Hardware = setting(factory=Hardware, on_resume="free", help="the GPU and its links")
    gpus: int = setting(8, on_resume="free", help="GPUs, or processes on a CPU")
    tokens: float | None = setting(
        None,
        on_resume="free",
        help="tokens to train on; null: those of train, or 20 for each active parameter",
    )
    best: int = setting(5, on_resume="free", help="layouts that are shown when they are searched")
    serve_rows: int = setting(1, on_resume="free", help="sequences served at once, for the cache's size")
    picture: str | None = setting(
        None, on_resume="free", help="draw the timeline of the pipeline into this .png, .svg or .html"
    )
    timeline: Kind = setting("1f1b", on_resume="free", help="the schedule that is drawn; training has 1f1b")
    published: bool = setting(
        False, on_resume="free", help="instead: predictions beside the published speeds of known runs"
    )
    published_file: str | None = setting(
        None, on_resume="free", help="another table of published runs, with the columns of published.csv"
    )
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.best < 1 or self.serve_rows < 1:
            raise ValueError(
                f"gpus ({self.gpus}), best ({self.best}) and serve_rows ({self.serve_rows}) must be positive"
            )
        if self.tokens is not None and not self.tokens > 0:
            raise ValueError(f"tokens ({self.tokens}) must be above 0, such as 15e12")
        if self.picture is not None and Path(self.picture).suffix not in (".png", ".svg", ".html"):
            raise ValueError(f"picture={self.picture} must end in .png, .svg or .html")
        problems = [
            *length_problems(Split(self.model, parse(Parallel, {}), self.train)),
            *forced_problems(self.kernels, self.model, tp=self.parallel.tp or 1),
        ]
        if problems:
            raise InvalidConfiguration(problems)


@dataclass(frozen=True)
class Cost:
    """Of a budget of tokens."""

    tokens: float
    why: str
    days: float
    gpu_hours: float
    money: float


@dataclass(frozen=True)
class Report:
    """All that is known; what is printed or given as JSON."""

    tree: Plan
    machine: Machine
    parameters: int
    active: int
    flops: Flops
    found: list[Estimate]
    searched: bool
    cost: Cost
    comments: list[Comment]
    serving: Serving

    @property
    def winner(self) -> Estimate:
        return self.found[0]


def plan(tree: Plan) -> int:
    """Plan, print, draw."""
    from launcher.plan import show

    if tree.published or tree.published_file:
        rows = compared(Path(tree.published_file) if tree.published_file else published.FILE)
        print(json.dumps(show.published_json(rows)) if tree.format == "json" else show.published_text(rows))
        return DONE
    report = made(tree)
    if tree.picture is not None:
        draw(report, Path(tree.picture))
    if tree.format == "json":
        print(json.dumps(show.as_json(report), allow_nan=False))
    else:
        show.print_report(report)
    return DONE


def made(tree: Plan) -> Report:
    """The report of a configuration; ValueError says what does not fit together."""
    on_cpu = tree.hardware.device == "cpu"
    machine = calibrated(tree.gpus) if on_cpu and tree.hardware.machine is None else tree.hardware.machine
    if machine is None:
        raise ValueError(
            f"hardware.device={tree.hardware.device} says nothing of the machine to plan for; use "
            f"hardware={', '.join(machines())} or cpu, or a YAML file of your own with --config-dir"
        )
    if tree.gpus % machine.node_gpus and tree.gpus > machine.node_gpus:
        raise ValueError(
            f"gpus ({tree.gpus}) must be whole nodes of {machine.node_gpus} ({machine.name}), or fewer than "
            f"one; use {tree.gpus // machine.node_gpus * machine.node_gpus} or "
            f"{-(-tree.gpus // machine.node_gpus) * machine.node_gpus}, or set hardware.machine.node_gpus"
        )
    precision: Precision = tree.train.precision or ("fp32" if on_cpu else "bf16")
    planner = Planner(
        tree.model,
        machine,
        tree.train,
        tree.checkpoint,
        gpus=tree.gpus,
        precision=precision,
        documents=tree.data.isolate_documents,
        kernels=tree.kernels,
        on_cpu=on_cpu,
    )
    found = planner.search(wanted(tree))
    flops = flops_per_token(tree.model, tree.train.sequence_length)
    return Report(
        tree=tree,
        machine=machine,
        parameters=parameter_count(tree.model),
        active=active_parameters(tree.model),
        flops=flops,
        found=found,
        searched=len(found) > 1,
        cost=cost(tree, machine, found[0]),
        comments=comments(tree.model, tree.optim),
        serving=serving(tree.model, machine, length=tree.train.sequence_length, rows=tree.serve_rows),
    )


def wanted(tree: Plan) -> Wanted:
    split = tree.parallel
    return Wanted(
        tp=split.tp,
        pp=split.pp,
        sequence_parallel=split.sequence_parallel,
        recompute=split.recompute,
        micro_batch=tree.train.micro_batch,
        recompute_every=split.recompute_every,
        stage_layers=tuple(split.stage_layers) if split.stage_layers else None,
        overlaps=split.bucket_bytes > 0,
    )


def cost(tree: Plan, machine: Machine, estimate: Estimate) -> Cost:
    """Time and money for the tokens of the run."""
    tokens, why = tree.tokens, "tokens"
    if tokens is None and tree.train.steps is not None:
        tokens, why = step_tokens(tree.train, tree.train.steps, estimate.layout.global_batch), "train.steps"
    if tokens is None and tree.train.tokens is not None:
        tokens, why = float(tree.train.tokens), "train.tokens"
    if tokens is None:
        tokens, why = float(budget_tokens(tree.model)), "20 for each active parameter"
    seconds = tokens / estimate.tokens_per_second
    hours = seconds / 3600 * tree.gpus
    return Cost(tokens, why, seconds / 86400, hours, hours * machine.price_per_gpu_hour)


def step_tokens(train: Train, steps: int, global_batch: int) -> float:
    """Tokens of so many updates, the smaller ones of a ramp as they are."""
    starts = ramp_starts(train.ramp, train.sequence_length) if train.ramp else [(0, global_batch)]
    ends = [*(min(start, steps) for start, _ in starts[1:]), steps]
    sequences = sum(max(end - start, 0) * size for (start, size), end in zip(starts, ends, strict=True))
    return float(sequences * train.sequence_length)


def machines() -> list[str]:
    """The presets that have figures."""
    folder = Path(__file__).resolve().parents[2] / "conf" / "hardware"
    return sorted(f.stem for f in folder.glob("*.yaml") if "machine:" in f.read_text(encoding="utf-8"))


def compared(file: Path) -> list[published.Comparison]:
    """Every row of a table of published runs, predicted."""
    from conf.compose import Composer

    composer, found = Composer(Plan, "plan"), []
    try:
        rows = published.rows(file)
    except OSError as error:
        raise ValueError(f"published_file={file} cannot be read: {error}") from None
    known = machines()
    for row in rows:
        if row.gpu not in known:
            raise ValueError(f"{file}: no figures for gpu {row.gpu}; there are {', '.join(known)}")
        hardware = composer.typed(composer.compose([f"hardware={row.gpu}"])).hardware
        found.append(published.compare(row, hardware.machine))
    return found


def draw(report: Report, path: Path) -> None:
    """The timeline of the best layout's pipeline."""
    from launcher.plan import timeline

    timeline.save(timeline_of(report), path)


def timeline_of(report: Report) -> Timeline:
    """The schedule of the best layout, simulated; at most 4 pp micro-batches, which show all there is."""
    layout, tree = report.winner.layout, report.tree
    timing = Timing(tree.model, report.machine, tree.train.sequence_length)
    stages = timing.stages(layout)
    again = [s.communication / 3 for s in stages]
    return simulate(
        tree.timeline,
        forward=[s.forward + part for s, part in zip(stages, again, strict=True)],
        backward=[s.backward + 2 * part for s, part in zip(stages, again, strict=True)],
        micro_batches=min(layout.accumulation // layout.pp * layout.pp or layout.accumulation, 4 * layout.pp),
        transfer=report.winner.time.transfer / max(2 * layout.accumulation, 1),
        chunks=CHUNKS[tree.timeline],
    )
