"""Cross-entropy and z-loss against fp64 autograd and, split over tp, against one process."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megamodel.data.batch import IGNORE
from megamodel.kernels.head import VocabularyRows, projected
from megamodel.loss import Loss, cross_entropy
from parallel.mesh import build_mesh
from parallel.tensor import VocabularyShard
from tests.spawn import Ranks


def batch(vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(3, 7, vocabulary, generator=generator, dtype=torch.float64) * 4).to(dtype)
    targets = torch.randint(vocabulary, (3, 7), generator=generator)
    targets[0, :5] = IGNORE
    return logits, targets


def definition(
    logits: torch.Tensor, targets: torch.Tensor, weight: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over valid tokens of cross-entropy and of weight (log Z)^2, and the gradient, in fp64."""
    x = logits.double().requires_grad_()
    loss = F.cross_entropy(x.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    log_z = x.logsumexp(-1)[targets != IGNORE]
    z_loss = weight * log_z.square().sum()
    (loss + z_loss).backward()
    assert x.grad is not None
    return loss.detach(), z_loss.detach(), x.grad


@pytest.mark.parametrize("vocabulary", [2, 250, 257])
def test_loss_z_loss_and_gradient_equal_fp64_autograd(vocabulary: int) -> None:
    logits, targets = batch(vocabulary)
    expected, expected_z, expected_grad = definition(logits, targets, 1e-2)
    logits.requires_grad_()
    loss, log_z, _ = cross_entropy(logits, targets)
    z_loss = 1e-2 * log_z.square().sum()
    (loss.sum() + z_loss).backward()
    assert logits.grad is not None
    torch.testing.assert_close(loss.sum().double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(z_loss.double(), expected_z, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad.double(), expected_grad, rtol=1e-5, atol=1e-6)


def test_z_loss_off_is_bit_equal_to_weight_zero() -> None:
    logits, targets = batch(250)
    plain = logits.clone().requires_grad_()
    cross_entropy(plain, targets)[0].sum().backward()
    weighted = logits.clone().requires_grad_()
    loss = Loss(z_weight=0.0)
    total = loss(weighted, (targets, torch.tensor(1.0)))
    total.backward()
    assert torch.equal(total, cross_entropy(logits, targets)[0].sum())
    assert plain.grad is not None and weighted.grad is not None
    assert torch.equal(plain.grad, weighted.grad)
    assert loss.z_sum is None


def test_shifting_all_logits_shifts_log_z_by_as_much_and_the_loss_not_at_all() -> None:
    logits, targets = batch(250)
    loss, log_z, largest = cross_entropy(logits, targets)
    moved, moved_log_z, moved_largest = cross_entropy(logits + 3.5, targets)
    valid = targets != IGNORE
    torch.testing.assert_close(moved_log_z[valid], log_z[valid] + 3.5, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(moved, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moved_largest[valid], largest[valid] + 3.5, rtol=0, atol=1e-5)


def test_logits_of_200_in_bf16_are_finite_and_exact() -> None:
    logits = torch.full((1, 1, 4), -200.0, dtype=torch.bfloat16)
    logits[..., 2] = 200.0
    logits.requires_grad_()
    loss, log_z, largest = cross_entropy(logits, torch.tensor([[0]]))
    loss.sum().backward()
    assert loss.item() == 400.0 and log_z.item() == 200.0 and largest.item() == 200.0
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == [-1.0, 0.0, 1.0, 0.0]


def test_a_batch_without_valid_targets_adds_zero_even_when_its_logits_are_not_finite() -> None:
    logits = torch.full((2, 3, 5), float("nan"), requires_grad=True)
    loss = Loss(z_weight=1e-2)
    total = loss(logits, (torch.full((2, 3), IGNORE), torch.tensor(2.0)))
    total.backward()
    assert total.item() == 0.0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


def test_sums_of_each_row_are_kept_for_explaining() -> None:
    logits, targets = batch(250)
    loss = Loss(z_weight=0.0)
    loss(logits, (targets, torch.tensor(0.5)))
    rows = loss.per_sample[0]
    expected = [
        F.cross_entropy(logits[b].double(), targets[b], ignore_index=IGNORE, reduction="sum")
        for b in range(3)
    ]
    torch.testing.assert_close(rows[:, 0], torch.stack(expected), rtol=1e-6, atol=0)
    assert rows[:, 1].tolist() == [2, 7, 7]


def split_loss(vocabulary: int, tp: int) -> tuple[Any, ...]:
    """On each rank: loss, log Z and the gradient of its columns."""
    mesh = build_mesh(tp=tp, pp=1, device=torch.device("cpu"))
    shard = VocabularyShard(vocabulary, mesh.tp)
    logits, targets = batch(vocabulary)
    mine = logits[..., shard.start : shard.start + shard.true_rows].clone().requires_grad_()
    loss, log_z, largest = cross_entropy(mine, targets, start=shard.start, group=mesh.tp)
    (loss.sum() + 1e-2 * log_z.square().sum()).backward()
    assert mine.grad is not None
    return tuple(x.detach().numpy() for x in (loss, log_z, largest, mine.grad))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocabulary", [250, 257])
def test_split_over_tp_it_equals_one_process(vocabulary: int, tp: int, ranks: Ranks) -> None:
    """257 over 4 ranks of 128 padded rows leaves the third rank one row and the fourth none."""
    logits, targets = batch(vocabulary)
    _, _, gradient = definition(logits, targets, 1e-2)
    loss, log_z, largest = cross_entropy(logits, targets)
    results = ranks.run(tp, split_loss, vocabulary, tp)
    for result in results:
        np.testing.assert_allclose(result[0], loss.numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result[1], log_z.numpy(), rtol=1e-5)
        np.testing.assert_array_equal(result[2], largest.numpy())
    joined = np.concatenate([result[3] for result in results], axis=-1)
    np.testing.assert_allclose(joined, gradient.numpy(), rtol=1e-5, atol=1e-6)


def test_a_whole_head_multiplies_16_bit_operands_in_fp32_where_asked() -> None:
    """Logits around 200, which bf16 knows to within a half."""
    source = torch.Generator().manual_seed(4)
    x = torch.randn(2, 9, 64, generator=source).bfloat16()
    weight = (10 * torch.randn(50, 64, generator=source)).bfloat16()
    targets = torch.randint(50, (2, 9), generator=source)
    exact = F.cross_entropy(
        (x.double() @ weight.double().t()).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    errors = {}
    for widened in (True, False):
        loss = Loss(z_weight=0.0, widened=widened)
        found = loss(projected(x, weight, None, VocabularyRows(50)), (targets, torch.tensor(1.0)))
        errors[widened] = abs(float(found) - float(exact)) / float(exact)
    assert errors[True] < 1e-6 < 1e-4 < errors[False]
