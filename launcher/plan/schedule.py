"""The schedule of a pipeline, simulated: which rank computes what when, and how long it waits.

A virtual stage is a chunk of layers; a rank holds one of them (1f1b, zero_bubble), several in turn
(interleaved), or two in a V (dualpipev). A task is the forward or backward pass of one micro-batch in one
virtual stage; zero_bubble and dualpipev cut backward in two: the gradient of the input, which the stage
before waits for, and that of the weights, which fills the gaps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["1f1b", "interleaved", "zero_bubble", "dualpipev"]
What = Literal["F", "B", "W"]
CHUNKS: dict[Kind, int] = {"1f1b": 1, "interleaved": 2, "zero_bubble": 1, "dualpipev": 2}
INPUT_SHARE = 0.5  # of backward that is the gradient of the input: one of a product's two products


@dataclass(frozen=True)
class Task:
    """What a rank does at once; stage is virtual."""

    what: What
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Span:
    """A task and its time on a rank, in seconds from the start."""

    rank: int
    task: Task
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """A whole step. spans: in the order of their starts on each rank."""

    kind: Kind
    ranks: int
    chunks: int
    spans: list[Span]

    @property
    def seconds(self) -> float:
        """From the first forward to the last backward of all stages together."""
        return max(s.stop for s in self.spans) - min(s.start for s in self.spans)

    @property
    def idle(self) -> list[float]:
        """Share of that time that each rank waits."""
        busy = [0.0] * self.ranks
        for span in self.spans:
            busy[span.rank] += span.stop - span.start
        return [1 - b / self.seconds for b in busy]

    @property
    def mean_idle(self) -> float:
        return sum(self.idle) / self.ranks


@dataclass
class Run:
    """The state of a simulation: when each task ended and each rank is free again."""

    rank_of: list[int]
    duration: Callable[[Task], float]
    transfer: float
    split: bool
    ended: dict[Task, float] = field(default_factory=dict)
    free: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def ready(self, task: Task) -> float | None:
        """When what a task needs is there; None: not yet known."""
        last = len(self.rank_of) - 1
        if task.what == "W":
            needs = [(Task("B", task.stage, task.micro_batch), 0.0)]
        elif task.what == "F":
            needs = [self._from(task, task.stage - 1)] if task.stage else []
        else:
            own = (Task("F", task.stage, task.micro_batch), 0.0)
            needs = [own, self._from(task, task.stage + 1)] if task.stage < last else [own]
        if any(need not in self.ended for need, _ in needs):
            return None
        return max((self.ended[need] + wait for need, wait in needs), default=0.0)

    def _from(self, task: Task, stage: int) -> tuple[Task, float]:
        crosses = self.rank_of[stage] != self.rank_of[task.stage]
        return Task(task.what, stage, task.micro_batch), self.transfer if crosses else 0.0

    def do(self, task: Task, at: float) -> None:
        rank = self.rank_of[task.stage]
        start = max(at, self.free[rank])
        stop = start + self.duration(task)
        self.ended[task], self.free[rank] = stop, stop
        self.spans.append(Span(rank, task, start, stop))


def simulate(
    kind: Kind,
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float = 0.0,
    chunks: int | None = None,
) -> Timeline:
    """forward, backward: seconds of one micro-batch on each rank, all its chunks together.

    ValueError where the schedule cannot run: interleaving needs micro-batches in multiples of the ranks,
    DualPipeV twice as many micro-batches as ranks.
    """
    ranks, v = len(forward), chunks or CHUNKS[kind]
    _check(kind, ranks, micro_batches)
    split = kind in ("zero_bubble", "dualpipev")
    if kind == "dualpipev":
        rank_of = [*range(ranks), *reversed(range(ranks))]
    else:
        rank_of = [rank for _ in range(v) for rank in range(ranks)]

    def duration(task: Task) -> float:
        rank = rank_of[task.stage]
        if task.what == "F":
            return forward[rank] / v
        share = INPUT_SHARE if task.what == "B" else 1 - INPUT_SHARE
        return backward[rank] / v * (share if split else 1.0)

    run = Run(rank_of, duration, transfer, split, free=[0.0] * ranks)
    if split:
        _greedy(run, ranks, v, micro_batches)
    else:
        _in_order(run, [order(kind, rank, ranks, v, micro_batches) for rank in range(ranks)])
    run.spans.sort(key=lambda span: (span.rank, span.start))
    return Timeline(kind, ranks, v, run.spans)


def _check(kind: Kind, ranks: int, micro_batches: int) -> None:
    if kind == "interleaved" and micro_batches % ranks:
        raise ValueError(
            f"timeline=interleaved: {micro_batches} micro-batches must be a multiple of {ranks} stages; "
            f"use {micro_batches // ranks * ranks or ranks} or {-(-micro_batches // ranks) * ranks}"
        )
    if kind == "dualpipev" and micro_batches < 2 * ranks:
        raise ValueError(
            f"timeline=dualpipev: {micro_batches} micro-batches for {ranks} stages; use at least {2 * ranks}"
        )


def order(kind: Kind, rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Task]:
    """What a rank does, one after another: some forward passes, then one forward and one backward in turn."""
    total = micro_batches * chunks
    if kind == "1f1b":
        warm_up = min(ranks - rank - 1, total)
    else:
        warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
    forwards = [_turn(n, rank, ranks, chunks, backward=False) for n in range(total)]
    backwards = [_turn(n, rank, ranks, chunks, backward=True) for n in range(total)]
    tasks = forwards[:warm_up]
    for n in range(total - warm_up):
        tasks += [forwards[warm_up + n], backwards[n]]
    return tasks + backwards[total - warm_up :]


def _turn(number: int, rank: int, ranks: int, chunks: int, *, backward: bool) -> Task:
    """The n-th pass of a rank: `ranks` micro-batches through each chunk before the next group."""
    group, within = divmod(number, ranks * chunks)
    chunk, micro = divmod(within, ranks)
    if backward:
        chunk = chunks - 1 - chunk
    return Task("B" if backward else "F", chunk * ranks + rank, group * ranks + micro)


def _in_order(run: Run, orders: list[list[Task]]) -> None:
    """Every rank does its list; a task starts when its rank is free and what it needs is there."""
    at = [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, tasks in enumerate(orders):
            while at[rank] < len(tasks) and (ready := run.ready(tasks[at[rank]])) is not None:
                run.do(tasks[at[rank]], ready)
                at[rank] += 1
                left -= 1
        assert left < before, "a schedule whose ranks wait for each other"


def _greedy(run: Run, ranks: int, chunks: int, micro_batches: int) -> None:
    """The rank that can start first does the most urgent of what is ready: B, then F, then W.

    A rank lets no new micro-batch in while it holds as many as its stage would under 1F1B, or, in a V, as the
    first one would (2 pp halves): the schedule costs no more memory than that.
    """
    stages = len(run.rank_of)
    following = {(what, s): 0 for what in ("F", "B", "W") for s in range(stages)}
    held = [0] * ranks
    urgency: dict[What, int] = {"B": 0, "F": 1, "W": 2}
    for _ in range(3 * stages * micro_batches):
        options = []
        for (what, stage), micro in following.items():
            task, rank = Task(what, stage, micro), run.rank_of[stage]  # type: ignore[arg-type]
            if micro == micro_batches or (ready := run.ready(task)) is None:
                continue
            limit = ranks * chunks if chunks > 1 else ranks - rank
            if what == "F" and stage < ranks and held[rank] >= limit:
                continue
            start = max(ready, run.free[rank])
            # Of two forward passes the later stage first: it frees memory sooner.
            options.append((start, urgency[task.what], -stage, task, ready))
        assert options, "a schedule whose ranks wait for each other"
        start, _, _, task, ready = min(options, key=lambda option: option[:3])
        rank = run.rank_of[task.stage]
        run.do(task, ready)
        following[task.what, task.stage] += 1
        held[rank] += {"F": 1, "B": -1, "W": 0}[task.what]
