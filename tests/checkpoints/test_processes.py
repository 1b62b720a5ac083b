"""The same over gloo, in two processes that share nothing but the disk and the process group."""

import errno
from pathlib import Path
from typing import Any

import torch

from checkpoints.config import Checkpoint
from checkpoints.files import LocalFiles
from checkpoints.manager import Manager
from megamodel.data.batch import Cursor
from parallel.exchange import Alone, exchange_over, together
from parallel.mesh import SINGLE, Group, build_mesh, single_mesh
from tests.checkpoints.fake import FakeEngine, holds, make_mesh, model, reference
from tests.spawn import Ranks


class FullDisk(LocalFiles):
    def create(self, path: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


def talk() -> dict[str, Any]:
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"))
    exchange = exchange_over(mesh.world)
    rank = exchange.rank
    long = {"rank": rank, "text": "é" * (rank * 5000)}
    return {
        "everyone": exchange.everyone(long),
        "gather": exchange.gather(long),
        "share": exchange.share({"from": rank, "x": [1.5, None]}),
        "failure": failure(lambda: together(exchange, lambda: 1 // (1 - rank))),
        "fine": together(exchange, lambda: rank),
    }


def failure(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def save_and_load(run_dir: str) -> dict[str, Any]:
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"))
    values = reference(model())
    engine = FakeEngine(model(), mesh)
    engine.fill(values, 7)
    full = FullDisk() if mesh.world.rank == 1 else LocalFiles()
    refused = failure(
        lambda: Manager(Path(run_dir), Checkpoint(background=False), mesh, files=full).save(
            engine, Cursor(), {}
        )
    )
    manager = Manager(Path(run_dir), Checkpoint(background=False), mesh)
    path = manager.save(engine, Cursor(attempt=8, step=7), {"a": 1})
    for memory in engine.memory.values():
        memory.zero_()
    found = manager.restore(engine, "auto")
    assert found
    data = (path / "rank-00001.safetensors").read_bytes()
    exchange_over(mesh.world).everyone(None)
    if mesh.world.rank == 0:
        (path / "rank-00001.safetensors").write_bytes(data[:-1] + b"!")
    exchange_over(mesh.world).everyone(None)
    damaged = failure(lambda: manager.restore(engine, "auto"))
    exchange_over(mesh.world).everyone(None)
    if mesh.world.rank == 0:
        (path / "rank-00001.safetensors").write_bytes(data)
    return {
        "holds": holds(engine, values),
        "cursor": (found.cursor.step, found.optimizer_step, found.extra),
        "refused": refused,
        "damaged": damaged,
    }


def test_messages(ranks: Ranks) -> None:
    first, second = ranks.run(2, talk)
    told = [{"rank": 0, "text": ""}, {"rank": 1, "text": "é" * 5000}]
    assert first["everyone"] == second["everyone"] == first["gather"] == told
    assert second["gather"] == []
    assert first["share"] == second["share"] == {"from": 0, "x": [1.5, None]}
    assert second["failure"].startswith("ZeroDivisionError")
    assert first["failure"].startswith("OtherRankFailed: rank 1 failed: ZeroDivisionError")
    assert (first["fine"], second["fine"]) == (0, 1)


def test_two_processes(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, save_and_load, str(tmp_path))
    for answer in (first, second):
        assert answer["holds"]
        assert answer["cursor"] == (7, 7, {"a": 1})
        assert answer["damaged"].startswith("ValueError: no checkpoint in")
        assert "rank-00001.safetensors is damaged" in answer["damaged"]
    assert second["refused"].startswith("OSError") and "rank 1" in first["refused"]
    # and in this process, without a process group, at one rank
    engine = FakeEngine(model(), single_mesh())
    assert Manager(tmp_path, Checkpoint(background=False), engine.mesh).restore(engine, "auto")
    assert holds(engine, reference(model()))


def test_one_rank_needs_no_process_group() -> None:
    exchange = exchange_over(SINGLE)
    assert isinstance(exchange, Alone)
    assert exchange.everyone(1) == exchange.gather(1) == [exchange.share(1)] == [1]
    assert make_mesh(0, 1, 1, 1).world == Group((0,), 0, None)
