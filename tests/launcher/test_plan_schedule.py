"""The simulated pipeline against formulas."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launcher.plan.schedule import Kind, order, simulate
from launcher.plan.timeline import COLOURS, save
from tests.launcher.slow_motion import mean_idle, slow_step
from tests.spawn import Ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 4), (4, 8), (4, 3), (8, 64)])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.5])
def test_the_bubble_of_equal_stages_is_the_formula(ranks: int, micro_batches: int, backward: float) -> None:
    timeline = simulate(
        "1f1b", forward=[1.0] * ranks, backward=[backward] * ranks, micro_batches=micro_batches
    )
    expected = (ranks - 1) / (micro_batches + ranks - 1)
    assert timeline.idle == pytest.approx([expected] * ranks, abs=1e-12)


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    for chunks in (2, 4):
        timeline = simulate(
            "interleaved", forward=[1.0] * 4, backward=[2.0] * 4, micro_batches=16, chunks=chunks
        )
        bubble = timeline.mean_idle / (1 - timeline.mean_idle)
        assert bubble == pytest.approx(3 / (16 * chunks))


def test_unequal_stages_by_hand() -> None:
    """Two stages, two micro-batches: F 1 and 2, B 1 and 2 seconds."""
    timeline = simulate("1f1b", forward=[1.0, 2.0], backward=[1.0, 2.0], micro_batches=2)
    times = {(s.rank, s.task.what, s.task.micro_batch): (s.start, s.stop) for s in timeline.spans}
    assert times == {
        (0, "F", 0): (0, 1),
        (0, "F", 1): (1, 2),
        (1, "F", 0): (1, 3),
        (1, "B", 0): (3, 5),
        (0, "B", 0): (5, 6),
        (1, "F", 1): (5, 7),
        (1, "B", 1): (7, 9),
        (0, "B", 1): (9, 10),
    }
    assert timeline.idle == pytest.approx([0.6, 0.2])


def test_a_transfer_delays_what_waits_for_it() -> None:
    timeline = simulate("1f1b", forward=[1.0] * 2, backward=[1.0] * 2, micro_batches=1, transfer=0.25)
    assert timeline.seconds == 4.5


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zero_bubble", "dualpipev"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_every_pass_once_after_what_it_needs(kind: Kind, ranks: int, micro_batches: int) -> None:
    forward = [1.0 + 0.1 * r for r in range(ranks)]
    timeline = simulate(kind, forward=forward, backward=[2.0] * ranks, micro_batches=micro_batches)
    spans = {(s.task.what, s.task.stage, s.task.micro_batch): s for s in timeline.spans}
    stages = ranks * timeline.chunks
    split = kind in ("zero_bubble", "dualpipev")
    assert len(spans) == len(timeline.spans) == (3 if split else 2) * stages * micro_batches
    for (what, stage, micro), span in spans.items():
        if what == "F" and stage:
            assert span.start >= spans["F", stage - 1, micro].stop - 1e-9
        if what == "B":
            assert span.start >= spans["F", stage, micro].stop - 1e-9
            if stage < stages - 1:
                assert span.start >= spans["B", stage + 1, micro].stop - 1e-9
        if what == "W":
            assert span.start >= spans["B", stage, micro].stop - 1e-9
    for rank in range(ranks):
        own = sorted((s.start, s.stop) for s in timeline.spans if s.rank == rank)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(own))


def test_cutting_backward_in_two_fills_gaps() -> None:
    """ZB-H1 (Qi et al. 2023) leaves (pp - 1)(F + B - W) of 1F1B's (pp - 1)(F + B + W)."""
    kinds: tuple[Kind, ...] = ("1f1b", "zero_bubble", "dualpipev")
    plain, zero, dual = (
        simulate(kind, forward=[1.0] * 4, backward=[2.0] * 4, micro_batches=12) for kind in kinds
    )
    assert plain.seconds == 45.0
    assert zero.seconds == pytest.approx(36 + 3 * (1 + 1 - 1))
    assert dual.seconds <= zero.seconds + 1e-9


def test_one_stage_holds_no_more_than_the_formula() -> None:
    """In flight under 1F1B: min(m, pp - stage)."""
    for rank in range(4):
        held = most = 0
        for task in order("1f1b", rank, 4, 1, 8):
            held += 1 if task.what == "F" else -1
            most = max(most, held)
        assert most == 4 - rank


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4 stages; use 4 or 8"):
        simulate("interleaved", forward=[1.0] * 4, backward=[1.0] * 4, micro_batches=6)
    with pytest.raises(ValueError, match="use at least 8"):
        simulate("dualpipev", forward=[1.0] * 4, backward=[1.0] * 4, micro_batches=7)


def test_the_pictures_show_the_shares(tmp_path: Path) -> None:
    timeline = simulate("1f1b", forward=[1.0] * 3, backward=[2.0] * 3, micro_batches=6)
    for name in ("t.png", "t.svg", "t.html"):
        save(timeline, tmp_path / name)
    pixels = np.asarray(Image.open(tmp_path / "t.png").convert("RGB"))
    row = pixels[48]  # near the top of the first stage, above the numbers
    for what, share in (("F", 6 / 24), ("B", 12 / 24)):
        colour = tuple(bytes.fromhex(COLOURS[what][0][1:]))
        assert (row == colour).all(-1).sum() / (1400 - 180) == pytest.approx(share, rel=0.05)
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 36 and titles[0] == "forward of micro-batch 1: 0 to 1 s"
    assert "http" not in (tmp_path / "t.html").read_text().replace("http://www.w3.org/2000/svg", "")
    with pytest.raises(ValueError, match="cannot be written"):
        save(timeline, tmp_path / "none" / "t.png")


@pytest.mark.parametrize(
    ("forward", "backward"),
    [([0.15, 0.15], [0.30, 0.30]), ([0.12, 0.18], [0.24, 0.36])],
    ids=["equal", "unequal"],
)
def test_real_ranks_in_slow_motion_wait_as_long(
    ranks: Ranks, forward: list[float], backward: list[float]
) -> None:
    """Sleeping is the load here: two processes of the engine against the simulator, and the formula."""
    micro_batches = 4
    spans = ranks.run(2, slow_step, 2, micro_batches, forward, backward)
    for rank, own in enumerate(spans):
        expected = [task.what for task in order("1f1b", rank, 2, 1, micro_batches)]
        assert [what for what, _, _ in own] == expected
    timeline = simulate("1f1b", forward=forward, backward=backward, micro_batches=micro_batches)
    assert mean_idle(spans) == pytest.approx(timeline.mean_idle, rel=0.1)
    if forward[0] == forward[1]:
        assert mean_idle(spans) == pytest.approx(1 / (micro_batches + 1), rel=0.1)
