"""What doctor makes of facts: an odd version, a clock, a disk, a slow node, a wrong value."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.doctor import as_json, as_text, free_bytes
from launcher.health import Facts, Row, examine, spans
from parallel.mesh import build_mesh
from parallel.probe import marks, partners, wrong_collectives, wrong_transfers
from tests.spawn import Ranks

PARAMETERS = 1_000_000


def facts(count: int = 8) -> list[Facts]:
    """Two nodes of four, tp 2 within them, everything well."""
    return [
        Facts(
            rank=rank,
            host="ab"[rank // 4],
            local_size=4,
            versions={"python": "3.11", "torch": "2.13"},
            forms={"norm": "triton", "attention": "flex"},
            clock=1000.0,
            free_bytes=1 << 40,
            device="H100",
            devices=4,
            groups={"tp": [rank // 2 * 2, rank // 2 * 2 + 1], "world": list(range(count))},
            speeds={"tp": 200e9, "world": 20e9},
            pair_bytes_per_second=10e9,
            flops=500e12,
        )
        for rank in range(count)
    ]


def rows(found: list[Facts]) -> dict[str, Row]:
    return {row.check: row for row in examine(found, parameters=PARAMETERS, slow_factor=0.7)}


def changed(rank: int, **values: Any) -> list[Facts]:
    return [replace(one, **values) if one.rank == rank else one for one in facts()]


def test_all_well() -> None:
    found = rows(facts())
    assert {row.verdict for row in found.values()} == {"ok"}
    assert found["matmul"].found == "500.00 TFLOP/s" and found["all-reduce tp"].found == "200 GB/s"
    assert found["devices"].found == "8 processes on 2 nodes, each with H100"


@pytest.mark.parametrize(
    ("rank", "values", "check", "verdict", "said"),
    [
        (5, {"versions": {"python": "3.11", "torch": "2.11"}}, "versions", "fail", "2.11 on rank 5 (b)"),
        (
            5,
            {"forms": {"norm": "plain", "attention": "flex"}},
            "kernels",
            "fail",
            "norm is triton, but plain on rank 5",
        ),
        (5, {"versions": {"python": "3.11"}}, "versions", "fail", "torch is 2.13, but missing on rank 5 (b)"),
        (6, {"clock": 1003.5}, "clocks", "warn", "rank 6 (b) is +3.5 s off"),
        (1, {"free_bytes": 13_000_000}, "disk", "warn", "rank 1 (a): 13 MB free"),
        (1, {"free_bytes": 11_000_000}, "disk", "fail", "a checkpoint takes 12 MB"),
        (3, {"devices": 2}, "devices", "fail", "rank 3 (a) sees 2 GPUs for 4 processes"),
        (3, {"device": "A100"}, "devices", "warn", "A100 on rank 3 (a)"),
        (7, {"wrong": ["dp bf16 all-reduce"]}, "values", "fail", "wrong on rank 7 (b): dp bf16 all-reduce"),
        (2, {"pair_bytes_per_second": 6.9e9}, "transfer", "warn", "rank 2 (a) 6.9 GB/s"),
        (2, {"flops": 300e12}, "matmul", "warn", "500.00 TFLOP/s in the median, but rank 2 (a) 300.00"),
        (4, {"groups": {"tp": [3, 4], "world": [0]}}, "layout", "warn", "ranks 3 (a), 4 (b) spans 2 nodes"),
    ],
)
def test_what_is_not_well_is_named_with_a_way_out(
    rank: int, values: dict[str, Any], check: str, verdict: str, said: str
) -> None:
    found = rows(changed(rank, **values))
    assert (found[check].verdict, said in found[check].found) == (verdict, True), found[check]
    assert found[check].way_out
    assert [name for name, row in found.items() if row.verdict != "ok"] == [check]


def test_a_slow_group_is_named_by_its_ranks_and_of_two_the_slow_one() -> None:
    slow = [replace(one, speeds={"tp": 100e9 if one.rank in (4, 5) else 200e9}) for one in facts()]
    row = rows(slow)["all-reduce tp"]
    assert row.verdict == "warn" and "but ranks 4-5 (b) 100 GB/s" in row.found
    two = [replace(one, flops=1e12 if one.rank else 2e12) for one in facts(2)]
    assert rows(two)["matmul"].found == "2.00 TFLOP/s in the median, but rank 1 (a) 1.00 TFLOP/s"


def test_spans_and_partners() -> None:
    assert spans([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8"
    for size in range(1, 12):
        for turn in range(2):
            pairs = {rank: partners(rank, size)[turn] for rank in range(size)}
            assert all(
                other is None or (other != rank and pairs[other] == rank) for rank, other in pairs.items()
            )
            assert sum(other is None for other in pairs.values()) == size % 2
        if size >= 4:
            assert all(len({*partners(rank, size)} - {None}) == 2 for rank in range(2 * (size // 2) - 1))


def test_the_table_and_its_json() -> None:
    found = [Row("disk", "ok", "1 GB free"), Row("values", "fail", "wrong", "leave it out")]
    assert as_text(found).splitlines() == [
        "ok    disk    1 GB free",
        "fail  values  wrong",
        "              -> leave it out",
    ]
    read = json.loads(as_json(found))
    assert read["verdict"] == "fail" and read["checks"][1]["way_out"] == "leave it out"
    assert as_json(found[:1]).startswith('{"verdict": "ok"')


def test_the_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    assert abs(free_bytes(tmp_path / "not" / "there") - free_bytes(tmp_path)) < 1 << 30


def probed(broken: str, dtype: Any) -> list[str]:
    """What a rank finds wrong at tp 2 x pp 2; `broken`: a collective that is off by one place on rank 1."""
    from parallel import probe

    mesh = build_mesh(tp=2, pp=2, device=torch.device("cpu"))
    before = {name: getattr(probe, name) for name in ("all_reduce", "gather_rows", "reduce_scatter_rows")}
    if mesh.world.rank == 1 and broken in before:

        def off(x: Any, group: Any) -> Any:
            result = before[broken](x, group)
            result.view(-1)[3] += 1
            return result

        setattr(probe, broken, off)
    try:
        found = [f"tp {name}" for name in wrong_collectives(mesh.tp, mesh.device, dtype)]
        found += [f"world {name}" for name in wrong_collectives(mesh.world, mesh.device, dtype)]
        return found + [f"pp {name}" for name in wrong_transfers(mesh.pp, mesh.device, dtype)]
    finally:
        for name, function in before.items():
            setattr(probe, name, function)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ("none", None),
        ("all_reduce", "all-reduce"),
        ("gather_rows", "all-gather"),
        ("reduce_scatter_rows", "reduce-scatter"),
    ],
)
def test_a_wrong_value_is_seen_where_it_is(broken: str, name: str | None, ranks: Ranks) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = ranks.run(4, probed, broken, dtype)
        assert found[0] == found[2] == found[3] == []
        assert found[1] == ([] if name is None else [f"tp {name}", f"world {name}"])


def test_marks_are_exact_in_every_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert marks(9, torch.device("cpu"), dtype).tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2]


def test_the_command_on_four_processes(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ["doctor", "model=tiny", "parallel.tp=2", "parallel.pp=2", "hardware=cpu", "format=json"]
    results = ranks.launch(4, [*arguments, "slow_factor=0.01", "train.precision=bf16"], tmp_path)
    assert [one.code for one in results] == [0] * 4, results[0].stderr
    read = json.loads(results[0].stdout)
    assert [one.stdout for one in results[1:]] == [""] * 3
    assert {row["check"] for row in read["checks"]} >= {"versions", "values", "all-reduce tp", "matmul"}
    assert read["verdict"] == "ok", read
    assert list(tmp_path.iterdir()) == []  # it writes nothing
    (alone,) = ranks.launch(1, ["doctor", "model=tiny", "hardware=cpu"], tmp_path)
    assert alone.code == 0 and "one process, nothing to check" in alone.stdout, alone.stderr


def test_wrong_input_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    (alone,) = ranks.launch(1, ["doctor", "model=tiny", "parallel.tp=2", "hardware=cpu"], tmp_path)
    assert alone.code == 2 and "1 processes cannot be split" in alone.stderr
    (alone,) = ranks.launch(1, ["doctor", "model=tiny", "slow_factor=2", "hardware=cpu"], tmp_path)
    assert alone.code == 2 and "slow_factor (2.0)" in alone.stderr
