"""Every model axis at every layout, computed now: `python -m tests.parallel.matrix > docs/layouts.md`.

A cell is the largest relative difference of loss and gradient norm of the first update from one plain-torch
process, over all ranks; or the reason why the door refuses the combination.
"""

import argparse
import sys
from dataclasses import replace

from conf.schema import plain
from conf.typed import InvalidConfiguration, parse
from launcher.config import Config
from tests.parallel.training import Case, one_process, settings, train
from tests.parallel.variants import EVERY
from tests.spawn import Ranks

LAYOUTS = {
    "tp 2": Case(tp=2, steps=1, micro_batch=8),
    "tp 4": Case(tp=4, steps=1, micro_batch=8),
    "tp 2, sequence parallel": Case(tp=2, steps=1, sequence=True, micro_batch=8),
    "pp 2": Case(pp=2, steps=1, micro_batch=4),
    "dp 2": Case(dp=2, steps=1, micro_batch=4),
    "tp 2 x pp 2 x dp 2, sequence parallel": Case(tp=2, pp=2, dp=2, steps=1, sequence=True, micro_batch=2),
}
CLOSE = 1e-5
HEAD = """# Layouts: every axis of the model space, computed

Made by `make layouts`, which trains each model for one update at each layout on gloo processes and compares
loss and gradient norm with one plain-torch process: a cell is the largest relative difference over all ranks,
in fp32, and must be below 1e-5. Where a combination is refused, the cell has the door's reason.
"""


def refusal(case: Case) -> str | None:
    """Why the configuration of a case is turned away, or None."""
    parallel = {"tp": case.tp, "pp": case.pp, "sequence_parallel": case.sequence}
    whole = {"model": plain(settings(case)), "parallel": parallel, "train": {"sequence_length": 16}}
    try:
        parse(Config, whole)
    except InvalidConfiguration as error:
        return str(error).splitlines()[0]
    return None


def cell(ranks: Ranks, case: Case, expected: dict) -> tuple[str, bool]:
    """What stands in the table, and whether it is as it should be."""
    reason = refusal(case)
    if reason is not None:
        return f"refused: {reason}", True
    worst = 0.0
    for result in ranks.run(case.world, train, case):
        for name in ("loss", "norm"):
            worst = max(worst, abs(result[name][0] / expected[name][0] - 1))
    return f"{worst:.0e}", worst < CLOSE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of axes; all of them when left out")
    options = parser.parse_args()
    ranks, fine = Ranks(8), True
    print(f"{HEAD}\n| model | {' | '.join(LAYOUTS)} |\n|{'---|' * (len(LAYOUTS) + 1)}")
    try:
        for name in options.only or EVERY:
            expected = one_process(Case(steps=1, variant=name))
            found = [cell(ranks, replace(layout, variant=name), expected) for layout in LAYOUTS.values()]
            fine = fine and all(good for _, good in found)
            print(f"| {name} | {' | '.join(text for text, _ in found)} |", flush=True)
    finally:
        ranks.close()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
