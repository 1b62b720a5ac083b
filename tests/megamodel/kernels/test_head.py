"""The fused head against the definition in fp64: values, all gradients, awkward shapes, memory."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamodel.data.batch import IGNORE
from megamodel.kernels.head import Chunked, VocabularyRows, linear_cross_entropy, projected
from parallel.mesh import build_mesh
from parallel.tensor import VocabularyShard
from tests.spawn import Ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}


def made(tokens: int, width: int, vocabulary: int, *, bias: bool = False, factor: float = 1.0) -> list[Any]:
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    x = torch.randn(1, tokens, width, generator=generator, dtype=torch.float64) * factor
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * width**-0.5
    vector = torch.randn(vocabulary, generator=generator, dtype=torch.float64) if bias else None
    targets = torch.randint(vocabulary, (1, tokens), generator=generator)
    if tokens > 2:
        targets[0, tokens // 2] = IGNORE
    return [x, weight, vector, targets]


def definition(tensors: list[Any], rows: VocabularyRows, coefficient: float, z: float) -> Tensor:
    x, weight, bias, targets = tensors
    logits = F.linear(x, weight, bias) * rows.scale
    if rows.softcap is not None:
        logits = rows.softcap * torch.tanh(logits / rows.softcap)
    log_z = logits.logsumexp(-1)
    valid = targets != IGNORE
    loss = log_z - logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return coefficient * ((loss + z * log_z.square()) * valid).sum()


def compare(
    tensors: list[Any], dtype: torch.dtype, how: Chunked, rows: VocabularyRows, z: float = 1e-3
) -> None:
    """Objective and gradients, relative to the largest element of each, at the rounded inputs."""
    rounded = [None if t is None else t.to(dtype) if t.is_floating_point() else t for t in tensors]
    exact = [t.double().requires_grad_() if t is not None and t.is_floating_point() else t for t in rounded]
    ours = [t.clone().requires_grad_() if t is not None and t.is_floating_point() else t for t in rounded]
    want = definition(exact, rows, 0.37, z)
    projection = projected(ours[0], ours[1], ours[2], rows)
    got, *_ = linear_cross_entropy(projection, ours[3], torch.tensor(0.37), z_weight=z, how=how)
    assert got.dtype == torch.float32
    assert float(got) == pytest.approx(float(want), rel=max(TOLERANCE[dtype], 1e-6), abs=1e-6)
    (2 * want).backward()
    (2 * got).backward()
    for a, b in zip(ours[:3], exact[:3], strict=True):
        if a is not None:
            assert a.grad.dtype == dtype and a.grad.shape == b.grad.shape
            largest = b.grad.abs().max().clamp(min=1e-30)
            assert (a.grad.double() - b.grad).abs().max() / largest < max(TOLERANCE[dtype], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 17, 127])
@pytest.mark.parametrize("width", [20, 96])
@pytest.mark.parametrize("chunks", [1, 4])
def test_it_equals_the_definition(dtype: torch.dtype, tokens: int, width: int, chunks: int) -> None:
    rows = VocabularyRows(250)
    workspace = 4 * 250 * max(1, -(-tokens // chunks))
    for wide in (False, True):
        compare(made(tokens, width, 250), dtype, Chunked(workspace, wide=wide), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_scale_and_cap(dtype: torch.dtype) -> None:
    rows = VocabularyRows(250, scale=0.25, softcap=1.5)
    compare(made(17, 20, 250, bias=True, factor=4.0), dtype, Chunked(4 * 250 * 5), rows)


def test_a_vocabulary_of_300_007() -> None:
    compare(made(5, 20, 300_007), torch.float32, Chunked(4 * 300_007 * 2), VocabularyRows(300_007))


def test_4097_tokens() -> None:
    compare(made(4097, 20, 250), torch.float32, Chunked(1 << 20), VocabularyRows(250))


def test_logits_of_200_in_bf16() -> None:
    x = torch.full((1, 4, 16), 200 / 16, dtype=torch.float64)
    weight = torch.ones(50, 16, dtype=torch.float64)
    weight[25:] = -1
    targets = torch.tensor([[0, 30, 49, IGNORE]])
    compare([x, weight, None, targets], torch.bfloat16, Chunked(), VocabularyRows(50))


def test_no_token_and_no_valid_target_give_zero() -> None:
    x, weight, _, targets = made(6, 20, 250)
    for n, ids in ((0, targets[:, :0]), (6, torch.full_like(targets, IGNORE))):
        hidden, matrix = x[:, :n].float().requires_grad_(), weight.float().requires_grad_()
        found = linear_cross_entropy(
            projected(hidden, matrix, None, VocabularyRows(250)), ids, torch.tensor(1.0), z_weight=1e-3
        )
        found[0].backward()
        assert float(found[0]) == 0.0
        assert not hidden.grad.any() and not matrix.grad.any()  # type: ignore[union-attr]


def test_an_ignored_token_may_be_no_number() -> None:
    x, weight, _, targets = made(6, 20, 250)
    x[0, 3] = torch.nan
    targets[0, 3] = IGNORE
    hidden, matrix = x.float().requires_grad_(), weight.float().requires_grad_()
    objective, loss, *_ = linear_cross_entropy(
        projected(hidden, matrix, None, VocabularyRows(250)), targets, torch.tensor(1.0)
    )
    objective.backward()
    assert objective.isfinite() and loss.isfinite().all()
    assert not hidden.grad[0, 3].any() and hidden.grad[0, 2].any()  # type: ignore[index]


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight, _, targets = made(17, 20, 250)
    hidden, frozen = x.float().requires_grad_(), weight.float()
    objective, *_ = linear_cross_entropy(
        projected(hidden, frozen, None, VocabularyRows(250)), targets, torch.tensor(1.0)
    )
    objective.backward()
    assert hidden.grad is not None and frozen.grad is None
    with torch.no_grad():
        alone, *_ = linear_cross_entropy(
            projected(hidden, frozen, None, VocabularyRows(250)), targets, torch.tensor(1.0)
        )
    assert float(alone) == pytest.approx(float(objective), rel=1e-6) and not alone.requires_grad


def test_padding_rows_get_no_gradient_and_inputs_may_be_slices() -> None:
    """Guard values around x and behind the true rows stay; their gradient is zero."""
    x, weight, _, targets = made(17, 20, 250)
    around = torch.full((1, 19, 24), 7.0)
    around[:, 1:18, 2:22] = x.float()
    padded = torch.full((256, 20), 1e4)
    padded[:250] = weight.float()
    around.requires_grad_()
    padded.requires_grad_()
    projection = projected(around[:, 1:18, 2:22], padded, None, VocabularyRows(250))
    objective, *_ = linear_cross_entropy(projection, targets, torch.tensor(1.0), how=Chunked(4 * 256 * 3))
    objective.backward()
    exact = [x.clone().requires_grad_(), weight.clone().requires_grad_(), None, targets]
    definition(exact, VocabularyRows(250), 1.0, 0.0).backward()
    assert not padded.grad[250:].any() and (padded[250:] == 1e4).all()  # type: ignore[index]
    inside = around.grad[:, 1:18, 2:22]  # type: ignore[index]
    torch.testing.assert_close(inside.double(), exact[0].grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(padded.grad[:250].double(), exact[1].grad, rtol=1e-4, atol=1e-6)  # type: ignore[index]
    outside = around.grad.clone()  # type: ignore[union-attr]
    outside[:, 1:18, 2:22] = 0
    assert not outside.any()


def split(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """One rank's objective, gradient of x (summed by the region's entry) and gradient of its rows."""
    group = build_mesh(tp=2, pp=1, device=torch.device("cpu")).tp
    shard = VocabularyShard(vocabulary, group)
    x, weight, _, targets = made(17, 20, vocabulary)
    mine = torch.zeros(shard.rows, 20, dtype=dtype)
    mine[: shard.true_rows] = weight[shard.start : shard.start + shard.true_rows].to(dtype)
    hidden = x.to(dtype).requires_grad_()
    mine.requires_grad_()
    rows = VocabularyRows(shard.true_rows, shard.start, group, softcap=3.0)
    how = Chunked(4 * shard.rows * 5)
    objective, *_ = linear_cross_entropy(
        projected(hidden, mine, None, rows), targets, torch.tensor(0.5), z_weight=1e-3, how=how
    )
    objective.backward()
    assert hidden.grad is not None and mine.grad is not None
    return objective.detach(), hidden.grad, mine.grad[: shard.true_rows]


@pytest.mark.parametrize("vocabulary", [250, 60, 129])
def test_split_over_tp_it_equals_one_process(vocabulary: int, ranks: Ranks) -> None:
    """60: the second rank has no row at all."""
    results = ranks.run(2, split, vocabulary, torch.float32)
    x, weight, _, targets = made(17, 20, vocabulary)
    exact = [x.requires_grad_(), weight.requires_grad_(), None, targets]
    want = definition(exact, VocabularyRows(vocabulary, softcap=3.0), 0.5, 1e-3)
    want.backward()
    for objective, _, _ in results:
        assert float(objective) == pytest.approx(float(want), rel=1e-5)
    torch.testing.assert_close((results[0][1] + results[1][1]).double(), exact[0].grad, rtol=1e-4, atol=1e-6)
    rows = torch.cat([results[0][2], results[1][2]])
    torch.testing.assert_close(rows.double(), exact[1].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, False), (torch.bfloat16, True)])
def test_the_workspace_at_a_large_vocabulary(dtype: torch.dtype, wide: bool) -> None:
    """8,192 tokens, vocabulary 128,256, in a process of its own: peak RSS over inputs and gradients is under
    10 % of the logits in fp32 (4.2 GB)."""
    program = f"""
import torch
from pathlib import Path
from megamodel.kernels.head import *
def status(field):
    return next(int(l.split()[1]) * 1024 for l in Path('/proc/self/status').read_text().splitlines()
                if l.startswith(field + ':'))
torch.set_num_threads(1)
def run(tokens, vocabulary, width):
    x = torch.randn(1, tokens, width, dtype={dtype}).requires_grad_()
    w = (torch.randn(vocabulary, width) * 0.02).to({dtype}).requires_grad_()
    t = torch.randint(vocabulary, (1, tokens))
    before = status('VmRSS')
    Path('/proc/self/clear_refs').write_text('5')
    how = Chunked(wide={wide})
    objective, *_ = linear_cross_entropy(projected(x, w, None, VocabularyRows(vocabulary)), t,
                                         torch.tensor(1.0), z_weight=1e-4, how=how)
    objective.backward()
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in (x, w))
    return status('VmHWM') - before - gradients
run(64, 1000, 64)
print(run(8192, 128256, 64))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    extra = int(done.stdout)
    assert 0 < extra < 0.1 * 8192 * 128256 * 4
