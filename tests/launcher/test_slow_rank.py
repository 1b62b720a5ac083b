"""One of two ranks is slow on purpose: the log names it."""

import re
import time
from pathlib import Path
from typing import Any

from tests.launcher.test_train import BASE, place
from tests.spawn import Ranks, _command

__all__ = ["place"]


def slowed(rank: int, *command: Any) -> Any:
    """The command line; the forward pass of rank 1 takes 50 ms longer."""
    from launcher import heart
    from megamodel.block import Block

    original, steps = Block.forward, heart.STEPS
    heart.STEPS = 4

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        time.sleep(0.05)
        return original(self, *args, **named)

    if rank == 1:
        Block.forward = forward  # type: ignore[method-assign]
    try:
        return _command(rank, *command)
    finally:
        Block.forward, heart.STEPS = original, steps  # type: ignore[method-assign]


def test_the_slow_rank_of_two_is_named(place: Path, ranks: Ranks) -> None:
    more = ["run.name=slow", "heartbeat.every_seconds=0.1", "heartbeat.straggler_factor=2", "hardware=cpu"]
    results = ranks.bare(2, slowed, [*BASE[:-1], *more], [], str(place))
    assert [result.code for result in results] == [0, 0], results[0].stderr
    log = (place / "runs" / "slow" / "logs" / "rank-0.log").read_text()
    found = re.search(r"rank 1 \(\S+\) is slow: its own work takes ([\d.]+) s a step, ([\d.]+) times", log)
    assert found, log
    # Two blocks of 50 ms each, and what a step takes without them.
    assert float(found[1]) >= 0.1 and float(found[2]) > 2
    assert "rank 0 (" not in re.sub(r"rank 0 of", "", "\n".join(re.findall(r".*is slow.*", log)))
