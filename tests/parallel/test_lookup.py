"""Rows of the embedding and their gradient, against sums in fp64."""

import pytest
import torch
from torch import Tensor

from parallel.lookup import rows_of
from parallel.mesh import build_mesh
from parallel.tensor import TensorParallel, VocabularyMatrix
from tests.layouts import LAYOUTS
from tests.spawn import Ranks

DTYPES = [torch.float32, torch.bfloat16]
# Of the sum, rounded once. Before, sums in fp32 are off by some 2^-24 of all that was added.
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8}
SUM = 1e-6


def check(numbers: Tensor, rows: int, width: int, dtype: torch.dtype, layout: str = "contiguous") -> None:
    source = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, width, generator=source).to(dtype).requires_grad_()
    upstream = LAYOUTS[layout](torch.randn(*numbers.shape, width, generator=source).to(dtype))
    found = rows_of(numbers, weight)
    assert torch.equal(found, weight.detach()[numbers])
    found.backward(upstream)
    assert weight.grad is not None and weight.grad.dtype == dtype
    wanted, added = torch.zeros(2, rows, width, dtype=torch.float64)
    for sums, part in ((wanted, upstream.double()), (added, upstream.double().abs())):
        sums.index_put_((numbers.flatten(),), part.reshape(-1, width), accumulate=True)
    assert ((weight.grad - wanted).abs() <= ROUNDING[dtype] * wanted.abs() + SUM * added).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 17, 127, 4097])
@pytest.mark.parametrize("width", [20, 96])
def test_the_gradient_is_the_sum_over_the_places_of_a_token(
    count: int, width: int, dtype: torch.dtype
) -> None:
    # Few tokens, so that each stands at many places.
    check(torch.randint(5, (count,), generator=torch.Generator().manual_seed(count)), 250, width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_any_layout_of_what_comes_back(layout: str, dtype: torch.dtype) -> None:
    check(torch.randint(9, (3, 41), generator=torch.Generator().manual_seed(1)), 250, 20, dtype, layout)
    check(torch.randint(9, (41, 3), generator=torch.Generator().manual_seed(1)).t(), 250, 20, dtype, layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_vocabulary(dtype: torch.dtype) -> None:
    check(torch.tensor([0, 300_006, 150_000, 300_006]), 300_007, 20, dtype)


def test_a_token_everywhere_gets_all_of_its_gradient() -> None:
    """In 16 bit the sum of ones would end at 256."""
    weight = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    rows_of(torch.ones(4096, dtype=torch.long), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0] * 4, [4096.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_token_at_all(dtype: torch.dtype) -> None:
    weight = torch.ones(3, 4, dtype=dtype, requires_grad=True)
    found = rows_of(torch.zeros(2, 0, dtype=torch.long), weight)
    found.sum().backward()
    assert found.shape == (2, 0, 4)
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frozen_matrix_and_no_gradient(dtype: torch.dtype) -> None:
    frozen = torch.ones(3, 4, dtype=dtype)
    assert not rows_of(torch.tensor([1]), frozen).requires_grad
    with torch.no_grad():
        assert not rows_of(torch.tensor([1]), frozen.requires_grad_()).requires_grad


def over_ranks(tp: int) -> tuple[list[list[float]], int]:
    """The gradient of this rank's rows, from a token that is everywhere."""
    mesh = build_mesh(tp=tp, pp=1, device=torch.device("cpu"))
    matrix = VocabularyMatrix("embedding", 7, 2, std=1.0, parallel=TensorParallel(mesh.tp)).bfloat16()
    tokens = torch.tensor([[6] * 1024 + [0] * 512 + [3]])
    matrix.embed(tokens).sum().backward()
    assert matrix.weight.grad is not None
    return matrix.weight.grad.tolist(), matrix.shard.start


def test_each_rank_has_the_gradient_of_its_rows(ranks: Ranks) -> None:
    wanted = {0: 512.0, 3: 1.0, 6: 1024.0}
    for rows, start in ranks.run(2, over_ranks, 2):
        for number, row in enumerate(rows, start):
            assert row == [wanted.get(number, 0.0)] * 2
