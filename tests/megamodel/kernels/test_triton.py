"""Norms, rotations and activations in Triton against the definitions in fp64: values and every gradient.

B batch, S sequence length, H heads, E head width.
"""

import pytest
import torch
from torch import Tensor

from megamodel.activation import ACTIVATIONS
from megamodel.kernels import reference
from tests.megamodel.kernels.agreement import (
    BF16,
    DEVICE,
    DTYPES,
    FP32,
    NORMS,
    agree,
    angles,
    close,
    draw,
    leaf,
    norm_options,
    tolerance,
    triton_module,
    vectors,
)

triton_norm = triton_module("norm")
triton_rotate = triton_module("rotate")
triton_gate = triton_module("gate")


# Under the interpreter numpy speaks of the infinities that the formulas, and some tests, go through.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

# Norms ------------------------------------------------------------------------------------------------------


@DTYPES
@NORMS
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (3, 17), (127, 127), (17, 4097), (4097, 3), (1, 127), (0, 17)]
)
def test_norm(
    rows: int, width: int, kind: str, offset: float, rounds_first: bool, bias: bool, dtype: torch.dtype
) -> None:
    options = norm_options(kind, offset, rounds_first)
    inputs = (leaf(draw(rows, width, dtype=dtype)), *vectors(width, dtype, bias))
    agree(triton_norm.norm, reference.norm, inputs, tolerance(dtype), **options)


@DTYPES
@NORMS
@pytest.mark.parametrize(("heads", "width"), [(3, 20), (5, 96)])
def test_norm_with_a_gain_for_each_head(
    heads: int, width: int, kind: str, offset: float, rounds_first: bool, bias: bool, dtype: torch.dtype
) -> None:
    options = norm_options(kind, offset, rounds_first)
    product = draw(2, 3, 2 * heads, width, dtype=dtype)
    inputs = (leaf(product[:, :, 1 : heads + 1]), *vectors(heads * width, dtype, bias))
    agree(triton_norm.norm, reference.norm, inputs, tolerance(dtype), **options)


@DTYPES
@NORMS
@pytest.mark.parametrize(("rows", "width"), [(1, 17), (127, 96), (3, 4097), (0, 17)])
def test_add_norm(
    rows: int, width: int, kind: str, offset: float, rounds_first: bool, bias: bool, dtype: torch.dtype
) -> None:
    """x and the residual are slices; their sums are exact in bf16, so that the norms have one input."""
    options = norm_options(kind, offset, rounds_first)
    x = leaf(draw(rows, 2 * width + 8, dtype=dtype, step=1 / 16)[:, 3 : width + 3])
    residual = leaf(draw(rows, width, dtype=dtype, step=1 / 16))
    inputs = (x, residual, *vectors(width, dtype, bias))
    limit = tolerance(dtype)
    agree(triton_norm.add_norm, reference.add_norm, inputs, limit, **options)


def test_add_norm_of_which_one_result_is_used() -> None:
    options = norm_options("rmsnorm", 0.0, True)
    inputs = (leaf(draw(3, 17)), leaf(draw(3, 17)), vectors(17, FP32)[0])
    for result, wanted in ((0, inputs[:2]), (1, inputs)):
        exact = [leaf(t.double()) for t in inputs]
        ours = triton_norm.add_norm(*inputs, None, **options)[result]
        definition = reference.add_norm(*exact, None, **options)[result]
        upstream = draw(3, 17)
        grads = torch.autograd.grad(ours, inputs, upstream, allow_unused=True)
        expected = torch.autograd.grad(definition, exact, upstream.double(), allow_unused=True)
        assert [g is None for g in grads] == [g is None for g in expected]
        assert sum(g is not None for g in grads) == len(wanted)
        for a, b in zip(grads[: len(wanted)], expected, strict=False):
            close(a, b, 1e-5)


@NORMS
def test_norms_round_where_the_definition_does(
    kind: str, offset: float, rounds_first: bool, bias: bool
) -> None:
    """Bit for bit in bf16, but for the few elements that the order of a sum tips over."""
    x, (weight, b) = draw(64, 127, dtype=BF16), vectors(127, BF16, bias)
    options = norm_options(kind, offset, rounds_first)
    ours, definition = (f(x, weight, b, **options) for f in (triton_norm.norm, reference.norm))
    assert (ours == definition).double().mean() > 0.995
    moved = reference.norm(x, weight, b, **options | {"rounds_first": not rounds_first})
    assert (ours == moved).double().mean() < 0.95


def test_norm_of_mixed_dtypes() -> None:
    """An fp32 gain on a bf16 stream, and no gain at all."""
    x = leaf(draw(9, 33, dtype=BF16))
    options = norm_options("rmsnorm", 0.0, True)
    agree(triton_norm.norm, reference.norm, (x, vectors(33, FP32)[0], None), 2**-7, **options)
    agree(triton_norm.norm, reference.norm, (x, None, None), 2**-7, **options)


def test_a_row_too_wide_for_the_registers_is_refused() -> None:
    with pytest.raises(ValueError, match="65537 are too many: use the definition in plain torch"):
        triton_norm.norm(draw(1, 65537), None, None, **norm_options("rmsnorm", 0.0, True))


# Rotation ---------------------------------------------------------------------------------------------------

PAIRS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
TURNS = pytest.mark.parametrize(
    ("batch", "length", "heads", "width", "rotated"),
    [(1, 1, 3, 20, 20), (2, 3, 17, 20, 10), (2, 3, 1, 96, 96), (1, 127, 1, 96, 24), (1, 0, 3, 20, 10)],
)


@DTYPES
@PAIRS
@TURNS
def test_rotate(
    batch: int, length: int, heads: int, width: int, rotated: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """x: some heads of a product; upstream: heads before tokens, as attention has them."""
    x = leaf(draw(batch, length, heads + 4, width, dtype=dtype)[:, :, 1 : heads + 1])
    cos, sin = angles(batch, length, rotated)

    def upstream(y: Tensor) -> Tensor:
        return draw(batch, heads, length, width, dtype=y.dtype).transpose(1, 2)

    agree(triton_rotate.rotate, reference.rotate, (x, cos, sin), tolerance(dtype), upstream,
          interleaved=interleaved)  # fmt: skip
    assert torch.equal(
        triton_rotate.rotate(x, cos, sin, interleaved=interleaved)[..., rotated:], x[..., rotated:]
    )


@DTYPES
@NORMS
@PAIRS
@pytest.mark.parametrize(
    ("batch", "length", "heads", "width", "rotated"),
    [(1, 1, 3, 20, 20), (2, 17, 3, 20, 10), (1, 3, 1, 96, 24), (1, 0, 3, 20, 10)],
)
def test_norm_rotate(
    batch: int, length: int, heads: int, width: int, rotated: int, interleaved: bool,
    kind: str, offset: float, rounds_first: bool, bias: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """A gain of each head's own with the LayerNorms, one for all with the others."""
    x = leaf(draw(batch, length, heads + 4, width, dtype=dtype)[:, :, 1 : heads + 1])
    cos, sin = angles(batch, length, rotated)
    weight, b = vectors(width * (heads if bias else 1), dtype, bias)
    options = norm_options(kind, offset, rounds_first) | {"interleaved": interleaved}
    limit = tolerance(dtype)
    agree(triton_rotate.norm_rotate, reference.norm_rotate, (x, weight, b, cos, sin), limit, **options)


# Activations ------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(3, 17), (127, 3), (1, 4097), (0, 17)])
def test_gate_and_activate(rows: int, width: int, name: str, dtype: torch.dtype) -> None:
    """Both are slices of one product, as the layer makes them."""
    product = 3 * draw(rows, 2 * width, dtype=dtype)
    up, gate = (leaf(t) for t in product.chunk(2, -1))
    agree(triton_gate.gate, reference.gate, (gate, up), tolerance(dtype), activation=name)
    agree(triton_gate.activate, reference.activate, (gate,), tolerance(dtype), activation=name)


@DTYPES
def test_the_clamped_gate(dtype: torch.dtype) -> None:
    gate, up = leaf(8 * draw(17, 127, dtype=dtype)), leaf(8 * draw(127, 17, dtype=dtype).T.flip(0))
    with torch.no_grad():
        gate[0, :3], up[0, :3] = torch.tensor([7.0, 7.0, -7.0]), torch.tensor([7.0, -7.0, 7.0])
    agree(triton_gate.gate, reference.gate, (gate, up), tolerance(dtype), activation="silu", clamp=7.0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_that_are_not_finite_stay_so(name: str) -> None:
    """What torch makes of NaN and infinity, a kernel makes too: a spike must not be hidden."""
    x = torch.tensor([torch.nan, torch.inf, 1.0], device=DEVICE)
    exact = reference.activate(x.double(), activation=name)  # torch's fp32 makes NaN of gelu(inf) on a CPU
    ours = triton_gate.activate(x, activation=name).double()
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=0, equal_nan=True)
    exact = reference.gate(x.double(), x.double(), activation="silu", clamp=7.0)
    ours = triton_gate.gate(x, x, activation="silu", clamp=7.0).double()
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["elu", "selu"])
def test_small_negative_numbers_keep_their_digits(name: str) -> None:
    x = -torch.logspace(-6, 1, 64, device=DEVICE)
    expected = reference.activate(x.double(), activation=name)
    torch.testing.assert_close(triton_gate.activate(x, activation=name).double(), expected, rtol=1e-6, atol=0)
