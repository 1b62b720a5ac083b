"""An engine is freed with the process group it lived in."""

from pathlib import Path

from tests.parallel.training import Case, train
from tests.spawn import Ranks


def _gloo_threads() -> int:
    names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
    return sum(name.read_text().startswith("gloo") for name in names)


def test_engines_leave_no_threads(ranks: Ranks) -> None:
    case = Case(tp=2, pp=2, dp=2, steps=1)
    counts = []
    for _ in range(3):
        ranks.run(case.world, train, case)
        counts.append(ranks.run(case.world, _gloo_threads))
    # A leaked engine keeps the threads of its eight groups; those of the last one may still be there.
    assert max(counts[2]) < max(counts[0]) + 8
