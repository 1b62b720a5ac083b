"""The engine under toy layers: masters in bf16, what crosses a stage border, what a non-finite step does."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megamodel.data.batch import IGNORE, Batch
from parallel.engine import Engine, Signals
from parallel.mesh import build_mesh
from parallel.piece import Fill, Piece, tag
from tests.parallel.training import Case, build, logical_state, micro_batches
from tests.spawn import Ranks


class Weight(nn.Module):
    """Four weights at 1.0; gives them out, or multiplies what it receives and keeps it."""

    def __init__(self, name: str, mode: str, offset: float, received: list[Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        tag(self.weight, [Piece(name, (4,), (0,), (4,))], Fill(1.0, 0.0))
        self.mode, self.offset, self.received = mode, offset, received

    def forward(self, stream: tuple[Tensor, Tensor, Tensor]) -> Any:
        x, positions, samples = stream
        if self.mode == "give":
            y = x.to(self.weight.dtype) * self.weight + self.offset
            return y, positions, samples
        if self.mode == "multiply":
            self.received.append(x.detach().clone())
            return x * self.weight, positions, samples
        return self.weight


@dataclass(frozen=True)
class Toy:
    """A layer of the engine."""

    build: Any
    cost: float = 1.0
    is_block: bool = True
    tied: None = None
    apply: None = None


class Sum:
    """The sum of the output as the loss: its gradient is 1."""

    z_sum = None

    def reset(self) -> None:
        self.loss_sum = self.max_logit = self.max_log_z = None

    def __call__(self, output: Any, labels: tuple[Tensor, Tensor]) -> Tensor:
        y = output[0] if isinstance(output, tuple) else output
        total = y.float().sum()
        self.loss_sum = total.detach().double()
        self.max_logit = self.max_log_z = total.detach()
        return total


def toy_engine(layers: list[Toy], *, precision: str, tp: int = 1, pp: int = 1, lr: float = 6e-4) -> Engine:
    return Engine(
        layers,
        Sum(),
        mesh=build_mesh(tp=tp, pp=pp, device=torch.device("cpu")),
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.0),
        precision=precision,  # type: ignore[arg-type]
        micro_batch=1,
        accumulation=1,
        clip_norm=0.0,
    )


def batch(rows: int = 1) -> Batch:
    tokens = torch.arange(10, 14).repeat(rows, 1)
    return Batch(tokens, tokens, torch.arange(4).repeat(rows, 1), torch.arange(rows))


def hundred_updates() -> tuple[list[float], list[float]]:
    """Masters and weights after 100 updates by a gradient of 1 at a learning rate of 6e-4."""
    engine = toy_engine([Toy(lambda: Weight("w", "own", 0.0, []))], precision="bf16")
    for step in range(100):
        engine.train_step([batch()], lr=6e-4, tried=step + 1)
    (master,) = [s.tensor for s in engine.state() if s.kind == "master"]
    (weight,) = engine.module.parameters()
    assert weight.dtype == torch.bfloat16
    return master.tolist(), weight.tolist()


def test_bf16_weights_follow_fp32_masters(ranks: Ranks) -> None:
    """In bf16 alone 1.0 - 6e-4 rounds back to 1.0, for ever."""
    ((masters, weights),) = ranks.run(1, hundred_updates)
    assert masters == pytest.approx([0.94] * 4, abs=1e-5)
    assert weights == [0.94140625] * 4


def border() -> tuple[int, int, Tensor]:
    """Stage 0 sends tokens + 100 x tp rank; what stage 1 receives."""
    mesh = build_mesh(tp=2, pp=2, device=torch.device("cpu"))
    received: list[Tensor] = []
    layers = [
        Toy(lambda: Weight("a", "give", 100.0 * mesh.tp.rank, received)),
        Toy(lambda: Weight("b", "multiply", 0.0, received)),
    ]
    engine = toy_engine(layers, precision="fp32", tp=2, pp=2)
    engine.train_step([batch()], lr=0.0, tried=1)
    return mesh.pp.rank, mesh.tp.rank, received[0] if received else torch.empty(0)


def test_each_tp_rank_receives_what_its_peer_of_the_stage_before_sent(ranks: Ranks) -> None:
    for stage, tp_rank, received in ranks.run(4, border):
        if stage == 1:
            assert received.tolist() == [[10.0 + 100 * tp_rank + i for i in range(4)]]


def poisoned(case: Case, kind: str) -> dict[str, Any]:
    """Three steps, the second of them bad on the last data rank only."""
    engine = build(case)
    for step in (1, 2, 3):
        batches = micro_batches(case, step, engine.mesh.dp.rank)
        if step == 2 and kind == "empty":
            batches = [
                Batch(b.tokens, torch.full_like(b.targets, IGNORE), b.positions, b.samples) for b in batches
            ]
        handle = None
        if step == 2 and kind == "nan" and engine.mesh.dp.rank == case.dp - 1:
            parameter = engine.partition.parameters[0]
            handle = parameter.register_hook(lambda grad: grad * float("nan"))
        before = logical_state(engine)
        result = engine.train_step(batches, lr=1e-3, tried=step)
        if handle is not None:
            handle.remove()
        if step == 2:
            same = all(
                np.array_equal(a[-1], b[-1]) for a, b in zip(before, logical_state(engine), strict=True)
            )
            second = result
    return {"second": second, "same": same, "last": result, "adam_step": engine.adam_step}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_non_finite_gradient_on_one_rank_is_seen_by_all_and_changes_nothing(
    precision: str, ranks: Ranks
) -> None:
    case = Case(pp=2, dp=2, precision=precision)
    results = ranks.run(case.world, poisoned, case, "nan")
    for result in results:
        assert result["second"].signals.non_finite
        assert not result["second"].applied
        assert result["same"], "a skipped update must change no master and no moment"
        assert result["last"].applied and not result["last"].signals.non_finite
        assert result["adam_step"] == 2


def test_a_batch_without_valid_targets_is_no_step(ranks: Ranks) -> None:
    for result in ranks.run(2, poisoned, Case(dp=2), "empty"):
        assert result["second"].signals is None
        assert result["second"].valid_tokens == 0 and not result["second"].applied
        assert result["same"]
        assert result["adam_step"] == 2


def maxima() -> tuple[Signals | None, int]:
    engine = build(Case(dp=2))
    rank = engine.mesh.world.rank
    result = engine.train_step(
        micro_batches(Case(dp=2), 1, rank), lr=1e-3, tried=1, maxima=(rank, 10.0 - rank)
    )
    return result.signals, rank


def test_numbers_of_the_caller_come_back_as_the_largest_of_all_ranks(ranks: Ranks) -> None:
    for signals, _ in ranks.run(2, maxima):
        assert signals is not None
        assert signals.maxima == (1.0, 10.0)


def many_sizes() -> list[float]:
    """One engine, three accumulation counts: the same rows give the same loss and norm."""
    engine = build(Case(global_batch=8, micro_batch=1))
    values = []
    for size in (8, 4, 8):
        rows = micro_batches(Case(global_batch=8), 1, 0)[:size]
        result = engine.train_step(rows, lr=0.0, tried=1, judge=lambda signals: False)
        assert result.signals is not None
        values += [result.signals.loss, result.signals.norm]
    return values


def test_the_batch_may_change_its_size_from_step_to_step(ranks: Ranks) -> None:
    (values,) = ranks.run(1, many_sizes)
    assert values[0] == pytest.approx(values[4], rel=1e-7)
    assert values[1] == pytest.approx(values[5], rel=1e-6)
    assert values[2] != pytest.approx(values[0], rel=1e-4)
