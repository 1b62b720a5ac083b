"""Every layout that training would accept, judged; the best few, and why the others lose.

A layout is refused here exactly where `train` refuses it: the rules are those of its door.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass

from checkpoints.config import Checkpoint
from conf.typed import InvalidConfiguration, parse
from launcher.batch import accumulation
from launcher.config import layout_problems
from launcher.hardware import Machine
from launcher.plan.layout import RECOMPUTED, Layout, Precision, Recompute
from launcher.plan.memory import Bytes, Memory, Verdict, verdict
from launcher.plan.timing import StepTime, Timing
from launcher.sections import Train
from megamodel.accounting import flops_per_token
from megamodel.config import Model
from megamodel.kernels.config import Kernels
from parallel.config import Parallel
from parallel.mesh import data_parallel_size

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_STAGES = 64  # that the search tries; more are planned when they are given
DEFAULT_BATCH_TOKENS = {"gpu": 4_000_000, "cpu": 16_000}  # of a step, when nothing is given: as Llama 2


@dataclass(frozen=True)
class Wanted:
    """What is given of a layout; None is searched."""

    tp: int | None = None
    pp: int | None = None
    sequence_parallel: bool | None = None
    recompute: Recompute | None = None
    micro_batch: int | None = None
    recompute_every: int = 1
    stage_layers: tuple[int, ...] | None = None
    overlaps: bool = True


@dataclass(frozen=True)
class Split:
    """What the door of training looks at."""

    model: Model
    parallel: Parallel
    train: Train


@dataclass(frozen=True)
class Estimate:
    """One layout: what each stage holds and how long a step takes."""

    layout: Layout
    stages: list[Bytes]
    verdict: Verdict
    time: StepTime
    tokens_per_second: float
    mfu: float


class Planner:
    """One model, one kind of machine, one number of GPUs and sequence length."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        train: Train,
        checkpoint: Checkpoint,
        *,
        gpus: int,
        precision: Precision,
        documents: bool,
        on_cpu: bool,
        kernels: Kernels | None = None,
    ) -> None:
        self.model, self.machine, self.train, self.checkpoint = model, machine, train, checkpoint
        self.gpus = gpus
        self.precision: Precision = precision
        self.timing = Timing(model, machine, train.sequence_length)
        self.memory = Memory(
            model, train.sequence_length, documents=documents, on_cpu=on_cpu, kernels=kernels
        )
        self.flops_per_token = flops_per_token(model, train.sequence_length).training

    def problem(self, wanted: Wanted, tp: int, pp: int, sequence: bool) -> ValueError | None:
        """Why training would refuse this split, in its own words; None: it would not."""
        split = {"tp": tp, "pp": pp, "sequence_parallel": sequence, "stage_layers": wanted.stage_layers}
        try:
            data_parallel_size(self.gpus, tp=tp, pp=pp)
            parallel = parse(Parallel, {key: value for key, value in split.items() if value is not None})
        except ValueError as error:
            return error
        found = list(layout_problems(Split(self.model, parallel, self.train)))
        return InvalidConfiguration(found) if found else None

    def layouts(self, wanted: Wanted) -> Iterator[Layout]:
        """Every layout that fits what is given and that training accepts. ValueError when there is none."""
        refused: Exception | None = None
        count = 0
        for tp, pp, sequence in self._splits(wanted):
            problem = self.problem(wanted, tp, pp, sequence)
            refused = refused or problem  # the first one: of the fewest stages
            if problem is None:
                try:
                    for layout in self._batched(wanted, tp, pp, sequence):
                        count += 1
                        yield layout
                except ValueError as error:
                    refused = refused or error
        if not count:
            raise refused or ValueError(f"gpus={self.gpus}: no layout divides; give parallel.tp and .pp")

    def _splits(self, wanted: Wanted) -> Iterator[tuple[int, int, bool]]:
        most = 2 * self.machine.node_gpus
        tps = [wanted.tp] if wanted.tp else [n for n in divisors(self.gpus) if n <= most]
        for tp in tps:
            rest = self.gpus // tp if self.gpus % tp == 0 else self.gpus
            stages = [n for n in divisors(rest) if n <= min(MOST_STAGES, self.model.n_layers)]
            for pp in [wanted.pp] if wanted.pp else stages:
                choices = [False, True] if tp > 1 else [False]
                given = wanted.sequence_parallel
                for sequence in choices if given is None else [given]:
                    yield tp, pp, sequence

    def _batched(self, wanted: Wanted, tp: int, pp: int, sequence: bool) -> Iterator[Layout]:
        dp = self.gpus // (tp * pp)
        total = self.global_batch(wanted.micro_batch, dp)
        sizes = [wanted.micro_batch] if wanted.micro_batch else MICRO_BATCHES
        fitting = [size for size in sizes if total % (size * dp) == 0]
        if not fitting:
            try:
                accumulation(total, sizes[0], dp)
            except ValueError as error:  # says what would divide
                raise ValueError(f"{error}{self._way_out()}") from None
        for size in fitting:
            chosen: list[Recompute] = [wanted.recompute] if wanted.recompute else modes()
            for mode in chosen:
                yield Layout(
                    tp=tp,
                    pp=pp,
                    dp=dp,
                    micro_batch=size,
                    accumulation=total // (size * dp),
                    sequence_parallel=sequence,
                    recompute=mode,
                    recompute_every=1 if mode == "none" else wanted.recompute_every,
                    stage_layers=wanted.stage_layers,
                    overlaps=wanted.overlaps,
                    precision=self.precision,
                )

    def global_batch(self, micro_batch: int | None, dp: int) -> int:
        """Sequences of a step: as given, or about 4M tokens in a number that every split divides.

        That is a multiple of the GPUs, of micro_batch and of a power of two, the largest that leaves the
        choice of a multiple within an eighth of the 4M, so that micro-batches can be of several sizes.
        """
        if self.train.global_batch is not None:
            return self.train.global_batch
        if self.train.accumulation is not None:
            return (micro_batch or 1) * self.train.accumulation * dp
        wished = DEFAULT_BATCH_TOKENS[self.memory.place] / self.train.sequence_length
        unit = self.gpus * (micro_batch or 1)
        while 8 * unit <= wished:
            unit *= 2
        return max(1, round(wished / unit)) * unit

    def _way_out(self) -> str:
        """Of a batch that was given, by a saved configuration perhaps, and that does not fit."""
        names = ("micro_batch", "global_batch", "accumulation")
        given = [f"train.{name}=null" for name in names if getattr(self.train, name) is not None]
        return f"; or have them chosen: {' '.join(given)}" if given else ""

    def estimate(self, layout: Layout) -> Estimate:
        """Memory, time and speed of one layout."""
        bounds = self.timing.bounds(layout)
        stages = self.memory.stages(layout, bounds, self.checkpoint)
        counts = self.memory.parameters.of_stages(bounds, layout.tp)
        time = self.timing.step(layout, [count.total for count in counts])
        speed = layout.global_batch * self.train.sequence_length / time.total
        peak = self.machine.flops(layout.precision) * layout.gpus
        return Estimate(
            layout=layout,
            stages=stages,
            verdict=verdict(stages, layout, self.machine.memory_bytes),
            time=time,
            tokens_per_second=speed,
            mfu=speed * self.flops_per_token / peak,
        )

    def search(self, wanted: Wanted) -> list[Estimate]:
        """All layouts, fastest first; after them those that do not fit, that which misses least first."""
        found = [self.estimate(layout) for layout in self.layouts(wanted)]
        return sorted(found, key=preference)


def preference(estimate: Estimate) -> tuple[int, float]:
    """Smaller is better."""
    return max(estimate.verdict.short_bytes, 0), -estimate.tokens_per_second


def modes() -> list[Recompute]:
    """The modes of recomputation that training knows and this planner too."""
    known = typing.get_args(typing.get_type_hints(Parallel)["recompute"])
    ours: list[Recompute] = list(RECOMPUTED)
    return [mode for mode in ours if mode in known]


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def best(found: list[Estimate], count: int) -> list[Estimate]:
    """The fastest of each (tp, pp), so that the list shows choices and not shades of one."""
    chosen: dict[tuple[int, int], Estimate] = {}
    for estimate in found:
        chosen.setdefault((estimate.layout.tp, estimate.layout.pp), estimate)
    return list(chosen.values())[:count]


def faster_but_too_big(found: list[Estimate]) -> Estimate | None:
    """The fastest of all, when it does not fit."""
    fitting = [e for e in found if e.verdict.fits]
    others = [e for e in found if not e.verdict.fits]
    if not fitting or not others:
        return None
    fastest = max(others, key=lambda e: e.tokens_per_second)
    return fastest if fastest.tokens_per_second > fitting[0].tokens_per_second else None


REASONS = {
    "compute": "less efficient or repeated computation",
    "tensor_parallel": "tensor-parallel communication",
    "pipeline_bubble": "pipeline bubble",
    "pipeline_transfer": "transfers between stages",
    "data_parallel": "reduction of gradients",
    "optimizer": "optimizer",
}


def why_it_loses(estimate: Estimate, winner: Estimate) -> str:
    """Against the winner: what takes longest more; or what does not fit."""
    if estimate is winner:
        return "fastest that fits" if estimate.verdict.fits else str(estimate.verdict)
    if not estimate.verdict.fits and winner.verdict.fits:
        return str(estimate.verdict)
    ours, theirs = estimate.time.parts(), winner.time.parts()
    worst = max(ours, key=lambda part: ours[part] - theirs[part])
    slower = estimate.time.total / winner.time.total - 1
    more = (ours[worst] - theirs[worst]) / winner.time.total
    return f"{slower:+.1%} time: {REASONS[worst]} ({more:+.1%})"


def layout_dict(layout: Layout) -> dict[str, object]:
    """As JSON shows it."""
    return {**dataclasses.asdict(layout), "global_batch": layout.global_batch, "gpus": layout.gpus}
