"""Where a rewind goes, what it leaves out and when it gives up; the numbers are worked out by hand."""

import dataclasses
import json

import pytest

from launcher.monitor import Kind, Monitor
from launcher.recovery import Budget, Trail, plan_recovery

SETTINGS = Monitor(budget_rewinds=3, margin_steps=4, lr_factor=0.5, lr_steps=100, cooldown_steps=10)


def fed(steps: int, batch: int = 8, first: int = 0) -> Trail:
    trail = Trail()
    for step in range(1, steps + 1):
        trail = trail.fed(step, first + (step - 1) * batch, first + step * batch)
    return trail


def test_the_samples_of_a_step() -> None:
    trail = fed(100)
    assert len(trail.stretches) == 1 and trail.stop == 800
    assert [trail.first_sample(step) for step in (1, 2, 100, 101, -3)] == [0, 8, 792, 800, 0]


def test_a_skipped_attempt_reads_samples_for_the_step_that_it_tried() -> None:
    trail = fed(10).fed(11, 80, 88).fed(11, 88, 96).fed(12, 96, 104).fed(13, 104, 112)
    assert [trail.first_sample(step) for step in (10, 11, 12, 13)] == [72, 80, 96, 104]


def test_batches_that_grow_or_jump_over_a_range() -> None:
    trail = fed(10).fed(11, 80, 96).fed(12, 96, 112).fed(13, 112, 512).fed(14, 512, 528)
    assert [trail.first_sample(step) for step in (11, 12, 13, 14)] == [80, 96, 112, 512]
    assert trail.stop == 528


def test_a_trail_is_bounded_and_goes_through_json() -> None:
    trail = Trail()
    for attempt in range(3000):  # every second attempt is skipped
        trail = trail.fed(attempt // 2 + 1, attempt * 8, attempt * 8 + 8)
    assert len(trail.stretches) <= 512
    assert Trail.from_json(json.loads(json.dumps(trail.as_json()))) == trail
    assert trail.first_sample(1500) == 2998 * 8


def test_the_first_rewind() -> None:
    plan = plan_recovery(
        SETTINGS, Budget(), onset=95, alarm=100, snapshots=[0, 50, 80, 90, 94], trail=fed(100), batch=8
    )
    # Step 91 is the first of the range: its samples begin at 90 x 8, and before it are 90 updates.
    assert plan.kind == Kind.REWIND and plan.snapshot == 90
    assert plan.skipped == (720, 800 + 4 * 8)
    assert (plan.left, plan.budget.used, plan.budget.relapses) == (2, 1, 0)
    assert plan.budget.lr_factor_at(100) == 1.0


def test_the_snapshot_lies_before_the_onset_even_when_none_lies_before_the_margin() -> None:
    def chosen(snapshots: list[int]) -> int | None:
        return plan_recovery(
            SETTINGS, Budget(), onset=95, alarm=100, snapshots=snapshots, trail=fed(100), batch=8
        ).snapshot

    assert chosen([95, 93, 97]) == 93
    assert chosen([92, 94]) == 92
    assert chosen([95, 100]) is None


def test_without_a_snapshot_it_stops_and_says_why() -> None:
    plan = plan_recovery(
        SETTINGS, Budget(), onset=3, alarm=9, snapshots=[3, 5], trail=fed(9), batch=8, reason="jump: loss +2"
    )
    assert plan.kind == Kind.STOP and plan.snapshot is None and plan.skipped is None
    assert plan.reason == "no snapshot from before step 3; the alarm: jump: loss +2"


def test_the_range_begins_with_the_data() -> None:
    plan = plan_recovery(SETTINGS, Budget(), onset=3, alarm=9, snapshots=[0], trail=fed(9), batch=8)
    assert plan.snapshot == 0 and plan.skipped == (0, 72 + 32)


def test_a_relapse_goes_further_skips_more_and_lowers_the_rate() -> None:
    snapshots = [0, 50, 70, 80, 90]
    first = plan_recovery(
        SETTINGS, Budget(), onset=95, alarm=100, snapshots=snapshots, trail=fed(100), batch=8
    )
    # Back at 90 updates the data goes on behind the range; the loss jumps again from step 97 on.
    trail = fed(90).fed(91, 720, 840)  # a batch that jumps over the range of the first
    for step in range(92, 104):
        trail = trail.fed(step, 840 + (step - 92) * 8, 848 + (step - 92) * 8)
    second = plan_recovery(
        SETTINGS, first.budget, onset=97, alarm=103, snapshots=snapshots, trail=trail, batch=8
    )
    assert second.kind == Kind.REWIND and second.snapshot == 80  # before the 90 that did not help
    # The margin is 8 steps now: from step 89 on, to 8 steps after the alarm.
    assert second.skipped == (88 * 8, 936 + 64)
    assert (second.budget.used, second.budget.relapses, second.left) == (2, 1, 1)
    assert [second.budget.lr_factor_at(step) for step in (80, 202, 203)] == [0.5, 0.5, 1.0]
    third = plan_recovery(
        SETTINGS, second.budget, onset=98, alarm=104, snapshots=snapshots, trail=trail, batch=8
    )
    assert third.snapshot == 70 and third.budget.lr_factor_at(70) == 0.25 and third.left == 0
    last = plan_recovery(
        SETTINGS, third.budget, onset=99, alarm=105, snapshots=snapshots, trail=trail, batch=8, reason="x"
    )
    assert last.kind == Kind.STOP and last.reason == "all 3 rewinds are used up; the last alarm: x"
    assert last.budget == third.budget


def test_an_alarm_long_after_is_no_relapse() -> None:
    before = Budget(used=1, relapses=1, alarm=100, snapshot=80, lr_factor=0.5, lr_until=200)
    plan = plan_recovery(
        SETTINGS, before, onset=400, alarm=406, snapshots=[0, 80, 390], trail=fed(406), batch=8
    )
    assert (plan.snapshot, plan.budget.relapses, plan.skipped) == (390, 0, (395 * 8, 410 * 8))
    assert plan.budget.lr_factor_at(390) == 1.0
    close = plan_recovery(
        SETTINGS, before, onset=208, alarm=214, snapshots=[0, 80, 199], trail=fed(214), batch=8
    )
    assert close.budget.relapses == 2 and close.snapshot == 0


def test_without_an_older_snapshot_a_relapse_takes_the_oldest() -> None:
    before = Budget(used=1, alarm=100, snapshot=90)
    plan = plan_recovery(SETTINGS, before, onset=97, alarm=103, snapshots=[90, 92], trail=fed(103), batch=8)
    assert plan.snapshot == 90


def test_no_rewinds_at_all() -> None:
    none = dataclasses.replace(SETTINGS, budget_rewinds=0)
    plan = plan_recovery(none, Budget(), onset=95, alarm=100, snapshots=[0], trail=fed(100), batch=8)
    assert plan.kind == Kind.STOP


@pytest.mark.parametrize("budget", [Budget(), Budget(2, 1, 30, 20, 0.25, 90)])
def test_a_budget_goes_through_json(budget: Budget) -> None:
    assert Budget.from_json(json.loads(json.dumps(budget.as_json()))) == budget
