"""How turns are ordered and compared. Pure: no clock, no process."""

from collections.abc import Mapping, Sequence
from statistics import median


def order(entries: Sequence[str], round_number: int) -> list[str]:
    """The entries of one round, rotated by one each round, so that no entry always has the first place."""
    shift = round_number % len(entries)
    return [*entries[shift:], *entries[:shift]]


def pairwise_ratio(rounds: Sequence[Mapping[str, float]], ours: str, theirs: str) -> float:
    """Median over the rounds of ours / theirs: what changes with the minute falls out of each ratio."""
    return median(values[ours] / values[theirs] for values in rounds)


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: how much a number is worth."""
    return (max(values) - min(values)) / median(values)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, numbers to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)
