"""The fused head against the definition in fp64: values, all gradients, awkward shapes, memory."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamodel.choose import choose, chunked, this_machine
from megamodel.data.batch import IGNORE
from megamodel.kernels.config import Kernels
from megamodel.kernels.head import Chunked, VocabularyRows, linear_cross_entropy, projected
from parallel.mesh import build_mesh
from parallel.tensor import VocabularyShard
from tests.spawn import Ranks

FP32, BF16 = torch.float32, torch.bfloat16
FORMS = pytest.mark.parametrize(
    ("dtype", "wide"), [(FP32, False), (BF16, False), (BF16, True)], ids=["fp32", "bf16", "bf16 wide"]
)


def objective_tolerance(dtype: torch.dtype, *, wide: bool) -> float:
    """Relative. bf16 logits are rounded, each by up to 2^-8 of itself, and the loss of a token hangs on few;
    sums are fp32 in every form, and wide logits are fp32 sums of exact products."""
    return 2**-9 if dtype == BF16 and not wide else 1e-5


def gradient_tolerance(dtype: torch.dtype, *, wide: bool) -> float:
    """Of the largest element. bf16: 2^-8 for the rounding of the result, and without `wide` as much again for
    the logits and their gradients, which are rounded one by one."""
    return 1e-5 if dtype == FP32 else 2**-8 if wide else 2**-7


@contextmanager
def no_memory_is_zero_by_chance() -> Iterator[None]:
    """What is reserved and not written is NaN: torch fills it where algorithms have to be deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
    assert got.item() == pytest.approx(want.item(), rel=objective_tolerance(dtype, wide=how.wide), abs=1e-6)
    (2 * want).backward()
    (2 * got).backward()
    for a, b in zip(ours[:3], exact[:3], strict=True):
        if a is not None:
            assert a.grad.dtype == dtype and a.grad.shape == b.grad.shape
            largest = b.grad.abs().max().clamp(min=1e-30)
            assert (a.grad.double() - b.grad).abs().max() / largest < gradient_tolerance(dtype, wide=how.wide)


@FORMS
@pytest.mark.parametrize("tokens", [1, 3, 17, 127])
@pytest.mark.parametrize("width", [20, 96])
@pytest.mark.parametrize("chunks", [1, 4])
def test_it_equals_the_definition(
    dtype: torch.dtype, wide: bool, tokens: int, width: int, chunks: int
) -> None:
    workspace = 4 * 250 * max(1, -(-tokens // chunks))
    compare(made(tokens, width, 250), dtype, Chunked(workspace, wide=wide), VocabularyRows(250))


@FORMS
def test_bias_scale_and_cap(dtype: torch.dtype, wide: bool) -> None:
    rows = VocabularyRows(250, scale=0.25, softcap=1.5)
    compare(made(17, 20, 250, bias=True, factor=4.0), dtype, Chunked(4 * 250 * 5, wide=wide), rows)


def test_a_vocabulary_of_300_007() -> None:
    compare(made(5, 20, 300_007), FP32, Chunked(4 * 300_007 * 2), VocabularyRows(300_007))


@FORMS
def test_4097_tokens_in_a_hundred_chunks(dtype: torch.dtype, wide: bool) -> None:
    """Which are added up in fp32, where a sum of the weight's size is no larger than the workspace."""
    compare(made(4097, 20, 250), dtype, Chunked(4 * 250 * 20, wide=wide), VocabularyRows(250))


@pytest.mark.parametrize("wide", [False, True])
def test_logits_of_200_in_bf16(wide: bool) -> None:
    x = torch.full((1, 4, 16), 200 / 16, dtype=torch.float64)
    weight = torch.ones(50, 16, dtype=torch.float64)
    weight[25:] = -1
    targets = torch.tensor([[0, 30, 49, IGNORE]])
    compare([x, weight, None, targets], BF16, Chunked(wide=wide), VocabularyRows(50))


@no_memory_is_zero_by_chance()
def test_no_token_and_no_valid_target_give_zero() -> None:
    x, weight, _, targets = made(6, 20, 250)
    for n, ids in ((0, targets[:, :0]), (6, torch.full_like(targets, IGNORE))):
        hidden, matrix = x[:, :n].float().requires_grad_(), weight.float().requires_grad_()
        found = linear_cross_entropy(
            projected(hidden, matrix, None, VocabularyRows(250)), ids, torch.tensor(1.0), z_weight=1e-3
        )
        found[0].backward()
        assert found[0].item() == 0.0
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
    assert alone.item() == pytest.approx(objective.item(), rel=1e-6) and not alone.requires_grad


@FORMS
@no_memory_is_zero_by_chance()
def test_inputs_may_be_slices_and_nothing_around_them_is_read_or_gets_a_gradient(
    dtype: torch.dtype, wide: bool
) -> None:
    """NaN around x, around the weight and the bias, and in the padding behind the true rows of both."""
    tensors = made(17, 20, 250, bias=True)
    rows = VocabularyRows(250, scale=0.5, softcap=2.0)
    inside = [(slice(None), slice(1, 18), slice(2, 22)), (slice(3, 253), slice(4, 24)), (slice(2, 252),)]
    shapes = [(1, 19, 24), (260, 28), (259,)]
    around = [torch.full(shape, torch.nan, dtype=dtype) for shape in shapes]
    for large, part, tensor in zip(around, inside, tensors[:3], strict=True):
        large[part] = tensor.to(dtype)
        large.requires_grad_()
    x, weight, bias = around[0][inside[0]], around[1][3:259, 4:24], around[2][2:258]  # 6 rows of padding
    how = Chunked(4 * 256 * 3, wide=wide)
    objective, *_ = linear_cross_entropy(
        projected(x, weight, bias, rows), tensors[3], torch.tensor(1.0), z_weight=1e-3, how=how
    )
    objective.backward()
    exact = [t.detach()[part].double().requires_grad_() for t, part in zip(around, inside, strict=True)]
    want = definition([*exact, tensors[3]], rows, 1.0, 1e-3)
    want.backward()
    assert objective.item() == pytest.approx(want.item(), rel=objective_tolerance(dtype, wide=wide))
    for large, part, tensor in zip(around, inside, exact, strict=True):
        assert large.grad is not None and tensor.grad is not None
        error = (large.grad[part].double() - tensor.grad).abs().max() / tensor.grad.abs().max()
        assert error < gradient_tolerance(dtype, wide=wide)
        outside = large.grad.clone()
        outside[part] = 0
        assert torch.equal(outside, torch.zeros_like(outside))
        kept = large.detach().clone()
        kept[part] = torch.nan
        assert kept.isnan().all()


def test_what_is_given_is_left_as_it_was_and_is_not_shared_with_the_gradients() -> None:
    x, weight, bias, targets = made(17, 20, 250, bias=True)
    given = [t.float() for t in (x, weight, bias)]
    ours = [t.clone().requires_grad_() for t in given]
    same = targets.clone()
    projection = projected(ours[0], ours[1], ours[2], VocabularyRows(250, softcap=2.0))
    objective, *_ = linear_cross_entropy(projection, targets, torch.tensor(1.0), how=Chunked(4 * 250 * 5))
    (3 * objective).backward()  # what is made in the forward pass is multiplied in place
    assert torch.equal(targets, same)
    for before, after in zip(given, ours, strict=True):
        assert torch.equal(before, after.detach())
        assert after.grad is not None
        assert after.grad.untyped_storage().data_ptr() != after.untyped_storage().data_ptr()


class Messages(TorchDispatchMode):
    """All that torch.distributed is asked for, by whatever function: (what, shape of each tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            first = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            name = function.overloadpacket.__name__
            self.sent += [(name, tuple(x.shape)) for x in first]
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Split:
    """What one rank has: the objective, gradients of x (its share of the sum) and of its rows, messages."""

    objective: Tensor
    of_x: Tensor
    of_rows: Tensor
    padding: Tensor
    sent: list[tuple[str, tuple[int, ...]]]
    operations: list[str]


@no_memory_is_zero_by_chance()
def split(vocabulary: int, dtype: torch.dtype, wide: bool, trains: bool = True) -> Split:
    group = build_mesh(tp=2, pp=1, device=torch.device("cpu")).tp
    shard = VocabularyShard(vocabulary, group)
    x, weight, _, targets = made(17, 20, vocabulary)
    mine = torch.full((shard.rows, 20), torch.nan, dtype=dtype)  # the padding is never read
    mine[: shard.true_rows] = weight[shard.start : shard.start + shard.true_rows].to(dtype)
    hidden = x.to(dtype).requires_grad_(trains)
    mine.requires_grad_(trains)
    rows = VocabularyRows(shard.true_rows, shard.start, group, softcap=3.0)
    how = Chunked((4 if wide else dtype.itemsize) * shard.rows * 5, wide=wide)
    operations: list[str] = []
    reduce = dist.all_reduce

    def noted(x: Tensor, op: Any = dist.ReduceOp.SUM, **more: Any) -> Any:
        operations.append("max" if op == dist.ReduceOp.MAX else "sum" if op == dist.ReduceOp.SUM else "other")
        return reduce(x, op=op, **more)

    with patch.object(dist, "all_reduce", noted), Messages() as messages:
        objective, *_ = linear_cross_entropy(
            projected(hidden, mine, None, rows), targets, torch.tensor(0.5), z_weight=1e-3, how=how
        )
        if trains:
            objective.backward()
    zero = torch.zeros(0)
    grads = [zero if t.grad is None else t.grad for t in (hidden, mine)]
    true = shard.true_rows
    return Split(objective.detach(), grads[0], grads[1][:true], grads[1][true:], messages.sent, operations)


@FORMS
@pytest.mark.parametrize("vocabulary", [250, 60, 129])
def test_split_over_tp_it_equals_one_process(
    vocabulary: int, dtype: torch.dtype, wide: bool, ranks: Ranks
) -> None:
    """60: the second rank has no row at all."""
    results = ranks.run(2, split, vocabulary, dtype, wide)
    x, weight, _, targets = made(17, 20, vocabulary)
    exact = [x.to(dtype).double().requires_grad_(), weight.to(dtype).double().requires_grad_(), None, targets]
    want = definition(exact, VocabularyRows(vocabulary, softcap=3.0), 0.5, 1e-3)
    want.backward()
    for result in results:
        assert result.objective.item() == pytest.approx(
            want.item(), rel=objective_tolerance(dtype, wide=wide)
        )
        assert torch.equal(result.padding, torch.zeros_like(result.padding))
    assert results[0].objective == results[1].objective
    of_x = results[0].of_x.double() + results[1].of_x.double()
    of_weight = torch.cat([result.of_rows for result in results])
    assert of_weight.dtype == dtype
    limit = gradient_tolerance(dtype, wide=wide)
    # Of x there are two summands, each of which was rounded.
    for found, like, roundings in ((of_x, exact[0], 2), (of_weight.double(), exact[1], 1)):
        assert found.shape == like.grad.shape
        assert (found - like.grad).abs().max() / like.grad.abs().max() < roundings * limit


@FORMS
@pytest.mark.parametrize("trains", [True, False])
def test_a_chunk_costs_one_maximum_and_one_sum_over_tp(
    dtype: torch.dtype, wide: bool, trains: bool, ranks: Ranks
) -> None:
    """Of (n) and (2, n) numbers, and nothing in the backward pass: logits stay where they are."""
    for result in ranks.run(2, split, 250, dtype, wide, trains):
        sizes = [5, 5, 5, 2]
        assert result.sent == [("allreduce_", shape) for n in sizes for shape in ((n,), (2, n))]
        assert result.operations == ["max", "sum"] * len(sizes)


class Bytes(TorchDispatchMode):
    """The most bytes of any tensor of floating-point numbers that is made, those of some shapes left out."""

    def __init__(self, *left_out: tuple[int, ...]) -> None:
        super().__init__()
        self.left_out, self.largest = left_out, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor) and x.is_floating_point() and tuple(x.shape) not in self.left_out:
                self.largest = max(self.largest, x.numel() * x.element_size())
        return made


@FORMS
@pytest.mark.parametrize("trains", [True, False])
def test_the_setting_bounds_what_is_held_of_logits_and_is_used_up(
    dtype: torch.dtype, wide: bool, trains: bool
) -> None:
    """Vocabulary 4,096 and 512 tokens: 8 MiB of logits in fp32. The weight, which is larger than a workspace
    of 1 MiB, has copies and gradients of its own size; nothing else is larger than the workspace."""
    x, weight, _, targets = made(512, 320, 4096)
    choices = choose(Kernels(), this_machine(torch.device("cpu")), "bf16")
    for workspace in (1 << 20, 2 << 20):
        how = chunked(choices, Kernels(workspace_bytes=workspace))
        assert how is not None
        hidden, matrix = (t.to(dtype).requires_grad_(trains) for t in (x, weight))
        with Bytes((4096, 320), (320, 4096)) as seen:
            projection = projected(hidden, matrix, None, VocabularyRows(4096))
            objective, *_ = linear_cross_entropy(
                projection, targets, torch.tensor(1.0), how=replace(how, wide=wide)
            )
            if trains:
                objective.backward()
        assert seen.largest == workspace


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "wide"), [(FP32, False), (BF16, True)])
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
