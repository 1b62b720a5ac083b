"""What crosses a stage border, and its gradient, under tensor and sequence parallelism."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamodel.model import Transformer
from tests.parallel.training import Case, build, global_batch, micro_batches, settings
from tests.spawn import Ranks


def watched(layer: nn.Module, seen: dict[str, Tensor]) -> None:
    """Keep the x that a layer is given, and the gradient that comes back to it."""

    def before(module: nn.Module, inputs: Any) -> None:
        x = inputs[0][0] if isinstance(inputs[0], tuple) else inputs[0]
        seen["x"] = x.detach().clone()
        x.register_hook(lambda gradient: seen.__setitem__("gradient", gradient.clone()))

    layer.register_forward_pre_hook(before)


def crossing(case: Case) -> tuple[int, int, int, dict[str, Tensor]]:
    """(stage, tp rank, number of the stage's first layer, what it was given and gave back)."""
    engine = build(case)
    mesh, seen = engine.mesh, dict[str, Tensor]()
    first = engine.bounds[mesh.pp.rank]
    if mesh.pp.rank:
        watched(engine.module.forward_funcs[0], seen)
    engine.train_step(micro_batches(case, 1, mesh.dp.rank), lr=0.0, tried=1)
    return mesh.pp.rank, mesh.tp.rank, first, seen


@pytest.mark.parametrize("sequence", [False, True])
def test_values_at_a_stage_border_equal_one_process(sequence: bool, ranks: Ranks) -> None:
    case = Case(tp=2, pp=2, sequence=sequence, micro_batch=8, z_loss=0.0)
    found = [answer for answer in ranks.run(4, crossing, case) if answer[0] == 1]
    model, seen = Transformer(settings(case), seed=7), dict[str, Tensor]()
    watched(model.layers[found[0][2]], seen)
    batch = global_batch(case, 1)
    model.clock.step = 1
    logits = model(batch.tokens, batch.positions, batch.samples)
    F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
    assert len(found) == 2
    for _, tp_rank, _, own in found:
        for name in ("x", "gradient"):
            whole = seen[name]
            part = whole.chunk(2, dim=1)[tp_rank] if sequence else whole
            assert own[name].shape == part.shape
            scale = float(part.abs().max())
            torch.testing.assert_close(own[name], part, rtol=1e-5, atol=1e-5 * scale)
