"""Gradients that are summed over dp while backward goes on: the same numbers, in buffers that soon go."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel.gradients import Gradients, split_groups
from parallel.mesh import build_mesh
from parallel.piece import Fill, Piece, tag
from tests.parallel.training import Case, build, logical_state, micro_batches, train
from tests.spawn import Ranks

LAYOUTS = {
    "dp": Case(dp=2),
    "dp, bf16": Case(dp=2, precision="bf16"),
    "pp and dp, tied": Case(pp=2, dp=2, tied=True),
    "tp and dp, over the sequence": Case(tp=2, dp=2, sequence=True, kv_heads=1),
}


def parameter(name: str, *shape: int, summed: bool = False) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape))
    tag(made, [Piece(name, shape, (0,) * len(shape), shape, summed=summed)], Fill(0.0, 0.0))
    return made


def bits(state: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], bytes]:
    """Each stretch by what it is; buckets change how a parameter is cut, so by element."""
    found = {}
    for name, kind, shape, box, start, values in state:
        numbers = np.arange(int(np.prod(shape))).reshape(shape)[box].reshape(-1)
        for number, value in zip(numbers[start : start + values.size], values, strict=True):
            found[name, kind, int(number)] = value.tobytes()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_whenever_they_are_summed(layout: str, ranks: Ranks) -> None:
    """Two data ranks: a sum of two numbers has no order. Norms are added up in another one."""
    early = ranks.run(LAYOUTS[layout].world, train, replace(LAYOUTS[layout], clip=0.0))
    late = ranks.run(LAYOUTS[layout].world, train, replace(LAYOUTS[layout], clip=0.0, bucket_bytes=0))
    ours: dict[Any, bytes] = {}
    theirs: dict[Any, bytes] = {}
    for one, other in zip(early, late, strict=True):
        assert one["loss"] == other["loss"]
        np.testing.assert_allclose(one["norm"], other["norm"], rtol=1e-6)
        ours |= bits(one["state"])
        theirs |= bits(other["state"])
    assert ours == theirs


def progress(case: Case, at: int) -> tuple[list[bool], list[bool], int]:
    """Which buckets were sent when the gradient of a layer's norm came in the last backward pass of a step,
    in their order; which may be sent early; and how many elements their buffers had after the step."""
    engine = build(case)
    seen: list[bool] = []
    reduction = engine.partition.reduction
    layer = next(p for n, p in engine.module.named_parameters() if n.startswith(f"{at}.") and p.dim() == 1)
    layer.register_post_accumulate_grad_hook(
        lambda p: seen.extend([bucket.sent for bucket in reduction._order])
    )
    engine.train_step(micro_batches(case, 1, engine.mesh.dp.rank), lr=1e-3, tried=1)
    held = sum(b.flat.numel() for b in reduction._buckets if b.flat is not None)
    return seen[-len(reduction._order) :], [not b.late for b in reduction._order], held


def test_buckets_go_out_during_backward(ranks: Ranks) -> None:
    """When the first block's norm gets its gradient, those of the last blocks are on their way."""
    for sent, early, held in ranks.run(2, progress, Case(dp=2), 1):
        assert all(early), "without tp and tied weights nothing has to wait"
        assert sum(sent) > len(sent) // 2
        assert sent == sorted(sent, reverse=True), "all ranks send in the same order"
        assert held == 0


def test_what_is_a_sum_over_tp_waits(ranks: Ranks) -> None:
    for sent, early, _ in ranks.run(4, progress, Case(tp=2, dp=2, sequence=True), 1):
        assert not all(early) and any(early)
        assert not any(s for s, may in zip(sent, early, strict=True) if not may)


def uneven() -> tuple[list[float], list[float]]:
    """Rank 1 has no gradient for the first parameter to be sent; both ranks' own parts of the means."""
    mesh = build_mesh(tp=1, pp=1, device=torch.device("cpu"))
    rank = mesh.dp.rank
    first, second = parameter("first", 2), parameter("second", 2)
    reduction = Gradients([[first], [second]], [1, 1], mesh.dp, tied=[])
    reduction.begin(1, overlap=True)
    (second * (rank + 1)).sum().backward()
    if rank == 0:
        (first * 6).sum().backward()
    reduction.average()
    found = [reduction.averaged(p, start=0, length=1, at=0).tolist() for p in (first, second)]
    reduction.close()
    dist.barrier()
    return found[0], found[1]


def test_a_gradient_that_only_some_ranks_have(ranks: Ranks) -> None:
    for first, second in ranks.run(2, uneven):
        assert first == [3.0]  # (6 + nothing) / 2
        assert second == [1.5]


def test_a_gradient_after_its_sum_is_an_error(ranks: Ranks) -> None:
    for message in ranks.run(2, twice):
        assert "first" in message and "after its sum was sent" in message


def twice() -> str:
    mesh = build_mesh(tp=1, pp=1, device=torch.device("cpu"))
    first = parameter("first", 2)
    reduction = Gradients([[first]], [1], mesh.dp, tied=[])
    reduction.begin(1, overlap=True)
    first.sum().backward()
    message = ""
    try:
        first.sum().backward()
    except RuntimeError as error:
        message = str(error)
    reduction.average()
    reduction.close()
    return message


def test_groups_are_cut_from_the_end_and_keep_their_settings() -> None:
    matrices = [parameter(f"w{i}", 4, 4) for i in range(4)]
    norm, shared = parameter("norm", 4, summed=True), parameter("tied", 4, 4)
    plain = parameter("bias", 4)
    optimizer = torch.optim.AdamW(
        [
            {"params": [shared, *matrices], "weight_decay": 0.1},
            {"params": [norm, plain], "weight_decay": 0.0},
        ]
    )
    split_groups(optimizer, bucket_bytes=128, tied=[shared])
    names = [
        [next(n for n, p in known.items() if p is q) for q in g["params"]]
        for known in [
            {"w0": matrices[0], "w1": matrices[1], "w2": matrices[2], "w3": matrices[3]}
            | {"norm": norm, "tied": shared, "bias": plain}
        ]
        for g in optimizer.param_groups
    ]
    assert names == [["w3", "w2"], ["w1", "w0"], ["tied"], ["bias"], ["norm"]]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1, 0.1, 0.0, 0.0]


def tied_masters(case: Case) -> tuple[int, int, dict[tuple[str, int], bytes]]:
    """(stage, data rank, masters and moments of the tied matrix that it holds, owned or not)."""
    engine = build(case)
    for step in (1, 2, 3):
        engine.train_step(micro_batches(case, step, engine.mesh.dp.rank), lr=1e-3, tried=step)
    found = {
        (s.kind, s.flat_start): s.tensor.detach().numpy().tobytes()
        for s in engine.state()
        if s.piece.name == "embedding.weight"
    }
    return engine.mesh.pp.rank, engine.mesh.dp.rank, found


@pytest.mark.parametrize("bucket_bytes", [0, 4096])
def test_both_stages_keep_the_same_tied_matrix_bit_by_bit(bucket_bytes: int, ranks: Ranks) -> None:
    """Of three data ranks sums have an order, and each stage takes them in its own group."""
    case = Case(pp=2, dp=3, tied=True, global_batch=6, bucket_bytes=bucket_bytes)
    stages: list[dict[int, Any]] = [{}, {}]
    for stage, data_rank, found in ranks.run(6, tied_masters, case):
        stages[stage][data_rank] = found
    assert stages[0] == stages[1] and all(stages[0].values())


def looked_at(case: Case, at: tuple[int, ...]) -> tuple[list[float], list[tuple[Any, ...]]]:
    """Losses and state where gradients are looked at in some steps; held-out losses are taken between."""
    engine = build(case)
    losses = []
    for step in (1, 2, 3, 4):
        seen: list[str] = []
        result = engine.train_step(
            micro_batches(case, step, engine.mesh.dp.rank),
            lr=1e-3,
            tried=step,
            on_gradients=(lambda found, seen=seen: seen.extend(n for n, *_ in found)) if step in at else None,
        )
        assert result.signals is not None and bool(seen) == (step in at)
        losses.append(result.signals.loss)
        engine.evaluate(micro_batches(case, 99, engine.mesh.dp.rank))
    return losses, logical_state(engine)


def test_to_look_at_gradients_in_some_steps_changes_nothing(ranks: Ranks) -> None:
    never, sometimes = (ranks.run(2, looked_at, Case(dp=2), at) for at in ((), (2, 3)))
    for (losses, state), (ours, theirs) in zip(never, sometimes, strict=True):
        assert losses == ours and bits(state) == bits(theirs)
