"""A rank's part of the cross-entropy in Triton against the definition in fp64."""

import pytest
import torch
from torch import Tensor

from megamodel.data.batch import IGNORE
from megamodel.kernels import reference
from tests.megamodel.kernels.agreement import (
    BF16,
    DEVICE,
    DTYPES,
    FP32,
    close,
    draw,
    leaf,
    tolerance,
    triton_module,
)

triton_entropy = triton_module("entropy")


# Under the interpreter numpy speaks of the infinities that the formulas, and some tests, go through.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def scores(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits in rows of a padded width; targets of this part, of others, and none."""
    logits = 3 * draw(rows, columns + 6, dtype=dtype)[:, 2 : columns + 2]
    targets = torch.arange(rows, device=DEVICE) * 7919 % (2 * columns)
    targets[2::3] = IGNORE
    return logits, targets


@DTYPES
@pytest.mark.parametrize(
    ("rows", "columns", "start"),
    [(1, 1, 0), (3, 17, 5), (127, 250, 0), (17, 4097, 5), (2, 300_007, 70_000), (0, 17, 0)],
)
def test_entropy(rows: int, columns: int, start: int, dtype: torch.dtype) -> None:
    logits, targets = scores(rows, columns, dtype)
    expected = reference.entropy(logits.double(), targets, start=start)
    for ours, exact in zip(triton_entropy.entropy(logits, targets, start=start), expected, strict=True):
        assert ours.dtype == FP32
        close(ours, exact, 1e-5)


@pytest.mark.parametrize("columns", [17, 4097, 9000])
def test_logits_far_below_zero(columns: int) -> None:
    """All of a row at -200, or all of its first 4096: the largest so far begins at no number at all."""
    logits, targets = scores(3, columns, FP32)
    logits[1] -= 200
    logits[2, :4096] -= 200
    expected = reference.entropy(logits.double(), targets, start=0)
    for ours, exact in zip(triton_entropy.entropy(logits, targets, start=0), expected, strict=True):
        close(ours, exact, 1e-5)


@pytest.mark.slow
def test_entropy_of_many_rows() -> None:
    """A program a row: quick on a GPU, not in the interpreter."""
    test_entropy(4097, 3, 2, FP32)
    test_entropy_gradient(4097, 3, None, BF16)


@DTYPES
@pytest.mark.parametrize("softcap", [None, 12.0])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (3, 17), (127, 250), (17, 4097), (2, 300_007), (0, 17)]
)
def test_entropy_gradient(rows: int, columns: int, softcap: float | None, dtype: torch.dtype) -> None:
    """Over the logits, with a coefficient for each row or one for all, and not beside them."""
    logits, targets = scores(rows, columns, dtype)
    if softcap is not None:
        logits.clamp_(-softcap, softcap)
    log_z = logits.double().logsumexp(1) + 0.5  # other ranks have logits too
    c_loss, c_z = draw(rows), draw(1).expand(rows)
    arguments = (targets, log_z.float(), c_loss, c_z)
    expected = reference.entropy_gradient(logits.double(), *arguments, start=3, softcap=softcap)
    buffer = torch.full((rows + 2, columns + 5), 7.5, dtype=dtype, device=DEVICE)
    inside = buffer[1 : rows + 1, 2 : columns + 2]
    inside.copy_(logits)
    returned = triton_entropy.entropy_gradient(inside, *arguments, start=3, softcap=softcap)
    assert returned.data_ptr() == inside.data_ptr()
    close(inside, expected, tolerance(dtype))
    inside.fill_(7.5)
    assert (buffer == 7.5).all()


def test_logits_of_200_in_bf16() -> None:
    logits = (200 + 4 * draw(5, 250)).to(BF16)
    targets = torch.arange(5, device=DEVICE)
    exact = logits.double()
    largest, total, picked = triton_entropy.entropy(logits, targets, start=0)
    log_z = largest + total.log()
    close(log_z, exact.logsumexp(1), 1e-6)
    close(log_z - picked, exact.logsumexp(1) - exact.diagonal(), 1e-5)
    ones = torch.ones(5, device=DEVICE)
    triton_entropy.entropy_gradient(logits, targets, log_z, ones, 0 * ones, start=0, softcap=None)
    close(logits, exact.softmax(1) - torch.eye(5, 250, device=DEVICE), 2**-7)


def test_all_targets_ignored_and_rows_that_are_not_finite() -> None:
    logits = torch.tensor([[torch.nan, 1.0], [torch.inf, -torch.inf], [1.0, 2.0]], device=DEVICE)
    targets = torch.full((3,), IGNORE, device=DEVICE)
    assert triton_entropy.entropy(logits, targets, start=0)[2].tolist() == [0.0, 0.0, 0.0]
    bad = torch.full((3,), torch.nan, device=DEVICE)
    assert not triton_entropy.entropy_gradient(logits, targets, bad, bad, bad, start=0, softcap=1.0).any()


def test_rows_with_infinite_and_missing_logits() -> None:
    """Masked logits of -inf before and after the first finite one, a row of nothing else, and no column."""
    logits = torch.full((3, 9000), -torch.inf, device=DEVICE)
    logits[0, 8999], logits[1, 0], targets = 2.0, 3.0, torch.zeros(3, dtype=torch.int64, device=DEVICE)
    largest, total, picked = triton_entropy.entropy(logits, targets, start=0)
    assert largest.tolist() == [2.0, 3.0, -torch.inf] and total.tolist() == [1.0, 1.0, 0.0]
    assert picked.tolist() == [-torch.inf, 3.0, -torch.inf]
    nothing = triton_entropy.entropy(logits[:, :0], targets, start=0)
    assert [t.tolist() for t in nothing] == [[-torch.inf] * 3, [0.0] * 3, [0.0] * 3]
    logits[2, 0] = torch.nan
    assert triton_entropy.entropy(logits, targets, start=0)[1][2].isnan()


def test_a_graph_through_the_cross_entropy_is_refused() -> None:
    logits, targets = leaf(draw(2, 5)), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(AssertionError, match="no gradient"):
        triton_entropy.entropy(logits, targets, start=0)
    same = (torch.zeros(2, device=DEVICE),) * 3
    with pytest.raises(AssertionError, match="replaces the logits"):
        triton_entropy.entropy_gradient(logits, targets, *same, start=0, softcap=None)


@pytest.mark.gpu
def test_more_logits_than_32_bits_count() -> None:
    rows, columns = 7200, 300_007
    assert rows * columns > 2**31
    logits = torch.zeros(rows, columns, dtype=BF16, device=DEVICE)
    logits[-1] = draw(columns, dtype=BF16)
    targets = torch.full((rows,), columns - 1, device=DEVICE)
    expected = reference.entropy(logits[-1:].double(), targets[-1:], start=0)
    found = triton_entropy.entropy(logits, targets, start=0)
    for ours, exact in zip(found, expected, strict=True):
        close(ours[-1:], exact, 1e-5)
    log_z, ones = found[0] + found[1].log(), torch.ones(rows, device=DEVICE)
    arguments = (targets[-1:], log_z[-1:], ones[-1:], ones[-1:])
    exact = reference.entropy_gradient(logits[-1:].double(), *arguments, start=0, softcap=None)
    triton_entropy.entropy_gradient(logits, targets, log_z, ones, ones, start=0, softcap=None)
    close(logits[-1:], exact, 2**-7)
