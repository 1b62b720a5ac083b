"""The size of a batch: global = micro x accumulation x dp, and its growth. Counted in sequences."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.sections import Ramp, Train

DEFAULT_MICRO_BATCH = 4


@dataclass(frozen=True)
class Stage:
    """One size of the batch: from update `from_step` (counted from 0) on."""

    from_step: int
    global_batch: int
    accumulation: int


@dataclass(frozen=True)
class Batches:
    """Every size of the batch of a run, as a function of the step alone."""

    micro_batch: int
    data_size: int
    stages: tuple[Stage, ...]  # by from_step, the first from 0 on

    def at(self, step: int) -> Stage:
        """The size of update `step`, counted from 0."""
        return self.stages[bisect_right([stage.from_step for stage in self.stages], step) - 1]

    @property
    def global_batch(self) -> int:
        """The size that the run is named after: the last one."""
        return self.stages[-1].global_batch


def batches(train: Train, *, data_size: int) -> Batches:
    """Every size of the batch for `data_size` data-parallel ranks.

    Two of global_batch, micro_batch and accumulation give the third; three are checked; of what is missing
    besides, micro_batch is 4 or the largest divisor below, and accumulation 1. ValueError otherwise.
    """
    final = train.global_batch
    if train.ramp:
        if final is not None and final != train.ramp[-1].global_batch:
            raise ValueError(
                f"train.global_batch ({final}) must be that of the last train.ramp entry "
                f"({train.ramp[-1].global_batch}); set train.global_batch=null"
            )
        final = train.ramp[-1].global_batch
    micro = train.micro_batch or derived_micro_batch(train, final, data_size)
    if final is None:
        final = micro * (train.accumulation or 1) * data_size
    if train.accumulation is not None and final != micro * train.accumulation * data_size:
        raise ValueError(
            f"train.global_batch ({final}) must be train.micro_batch ({micro}) x train.accumulation "
            f"({train.accumulation}) x data-parallel ranks ({data_size}) = "
            f"{micro * train.accumulation * data_size}; set one of them to null"
        )
    starts = ramp_starts(train.ramp, train.sequence_length) if train.ramp else [(0, final)]
    stages = tuple(Stage(start, size, accumulation(size, micro, data_size)) for start, size in starts)
    return Batches(micro_batch=micro, data_size=data_size, stages=stages)


def derived_micro_batch(train: Train, final: int | None, data_size: int) -> int:
    """The micro-batch when it is not given."""
    if final is None:
        return DEFAULT_MICRO_BATCH
    if train.accumulation is not None:
        share, rest = divmod(final, train.accumulation * data_size)
        if rest or not share:
            raise ValueError(
                f"train.global_batch ({final}) must be a multiple of train.accumulation "
                f"({train.accumulation}) x dp ({data_size}) = {train.accumulation * data_size}"
            )
        return share
    sizes = [entry.global_batch for entry in train.ramp] or [final]
    fits = [
        m for m in range(1, DEFAULT_MICRO_BATCH + 1) if all(size % (m * data_size) == 0 for size in sizes)
    ]
    return max(fits, default=1)


def accumulation(global_batch: int, micro_batch: int, data_size: int) -> int:
    """Forward passes in one update; ValueError when it is no whole number."""
    count, rest = divmod(global_batch, micro_batch * data_size)
    if rest or not count:
        step = micro_batch * data_size
        below, above = global_batch // step * step, -(-global_batch // step) * step
        nearest = " or ".join(str(size) for size in dict.fromkeys((below, above)) if size)
        raise ValueError(
            f"a global batch of {global_batch} must be a multiple of train.micro_batch ({micro_batch}) x "
            f"data-parallel ranks ({data_size}) = {step}; use {nearest}, or another train.micro_batch"
        )
    return count


def ramp_starts(ramp: Sequence[Ramp], sequence_length: int) -> list[tuple[int, int]]:
    """(first update, size) of each entry, tokens turned into updates of the sizes before, rounded up."""
    starts: list[tuple[int, int]] = []
    tokens = 0  # nominal tokens before the last start
    for entry in ramp:
        if not starts:
            start = entry.from_step if entry.from_step is not None else entry.from_tokens
            if start != 0:
                raise ValueError(f"train.ramp must begin at from_step 0 (it begins at {start})")
            starts.append((0, entry.global_batch))
            continue
        before, size = starts[-1]
        if entry.from_step is not None:
            start = entry.from_step
        else:
            assert entry.from_tokens is not None
            start = before + max(0, -(-(entry.from_tokens - tokens) // (size * sequence_length)))
        if start <= before:
            raise ValueError(
                f"train.ramp: the entry with global_batch {entry.global_batch} begins at update {start}, not "
                f"after the one before ({before}); give rising numbers"
            )
        tokens += (start - before) * size * sequence_length
        starts.append((start, entry.global_batch))
    return starts
