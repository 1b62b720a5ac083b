"""What the checkpoint benchmark makes of its numbers."""

from typing import Any

import pytest

from benchmarks.checkpoint import LOADING, SAVING, merged, printed, summary


def test_the_slower_rank_counts_and_bytes_are_added() -> None:
    assert merged("stall_seconds", [[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
    assert merged("host_bytes", [7, 9]) == 9
    assert merged("state_bytes", [7, 9]) == 16


def test_ratios_are_of_one_round_and_leave_the_first_save_out() -> None:
    def saved(stall: float, write: float) -> dict[str, Any]:
        return {
            "stall_seconds": [99.0, stall, stall],
            "write_seconds": [99.0, write, write],
            "host_bytes": 1,
            "state_bytes": 600,
        }

    rounds = []
    for scale in (1.0, 10.0, 2.0):  # the machine of the second round was slow, for all alike
        results = {entry: saved(4 * scale, 8 * scale) for entry in SAVING}
        results["ours"] = saved(1 * scale, 6 * scale)
        results |= {entry: {"load_seconds": 3 * scale, "host_bytes": 2} for entry in LOADING.values()}
        results["load ours"]["load_seconds"] = 1.5 * scale
        rounds.append(results)
    result = summary(rounds)
    assert result["ratios"] == pytest.approx(
        {
            "stall_to_async_save": 0.25,
            "stall_to_save_checkpoint": 0.25,
            "write_to_copy": 0.75,
            "write_to_async_save": 0.75,
            "load_to_universal": 0.5,
        }
    )
    assert result["entries"]["ours"]["bytes_per_second"] == 600 / 12
    assert "stall_to_async_save" in printed(result)
