"""The Triton kernels against the definitions in fp64: values, every gradient, and what they touch.

On a GPU where there is one, else under Triton's interpreter (TRITON_INTERPRET=1), which is slow: small sizes.
B batch, S sequence length, H heads, E head width.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megamodel.activation import ACTIVATIONS
from megamodel.data.batch import IGNORE
from megamodel.kernels import reference

pytest.importorskip("triton", reason="triton is not installed: pip install 'megamodel[gpu]'")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

triton_norm = pytest.importorskip("megamodel.kernels.triton_norm")
triton_rotate = pytest.importorskip("megamodel.kernels.triton_rotate")
triton_gate = pytest.importorskip("megamodel.kernels.triton_gate")
triton_entropy = pytest.importorskip("megamodel.kernels.triton_entropy")
triton_rows = pytest.importorskip("megamodel.kernels.triton_rows")

# Under the interpreter numpy speaks of the infinities that the formulas, and some tests, go through.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
ROOT = Path(__file__).resolve().parents[3]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts fp32 off to bf16 where every GPU rounds to nearest: it is given torch's cast."""
    if DEVICE.type == "cuda":
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def nearest(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        rounded = torch.from_numpy(np.array(data, dtype=np.float32)).to(BF16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", nearest)


def draw(*shape: int, dtype: torch.dtype = FP32, step: float | None = None) -> Tensor:
    """Normal numbers; with a step, multiples of it up to 2 in size, which bf16 holds, and their sums too."""
    generator = torch.Generator().manual_seed(1000 + sum(shape))
    x = torch.randn(*shape, generator=generator)
    x = x if step is None else (x.clamp(-2, 2) / step).round() * step
    return x.to(DEVICE, dtype)


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def tolerance(dtype: torch.dtype, roundings: int = 1) -> float:
    """Of the largest element. Each rounding that the definition asks for is worth 2^-8 in bf16."""
    return 1e-5 if dtype == FP32 else 2**-8 * max(2, roundings)


def close(actual: Tensor, expected: Tensor, limit: float) -> None:
    assert actual.shape == expected.shape
    if expected.numel():
        worst, largest = (actual.double() - expected).abs().max().item(), expected.abs().max().item()
        assert worst <= limit * largest, f"off by {worst:.3e}, largest {largest:.3e}, limit {limit:.1e}"


Function = Callable[..., Any]


def agree(
    ours: Function,
    definition: Function,
    inputs: Sequence[Tensor | None],
    limit: float,
    upstream: Callable[[Tensor], Tensor] = torch.randn_like,
    **options: Any,
) -> None:
    """Values and the gradients of all inputs that want one, against the definition in fp64."""
    exact = [None if t is None else leaf(t.double()) if t.requires_grad else t.double() for t in inputs]
    results, expected = ours(*inputs, **options), definition(*exact, **options)
    results, expected = ((r,) if isinstance(r, Tensor) else r for r in (results, expected))
    for mine, other in zip(results, expected, strict=True):
        close(mine, other, limit)
    given = [upstream(r.detach()) for r in results]
    wanted = [i for i, t in enumerate(inputs) if t is not None and t.requires_grad]
    mine = torch.autograd.grad(results, [inputs[i] for i in wanted], given)
    theirs = torch.autograd.grad(expected, [exact[i] for i in wanted], [g.double() for g in given])
    for i, a, b in zip(wanted, mine, theirs, strict=True):
        assert a.dtype == inputs[i].dtype
        close(a, b, limit)


def vectors(width: int, dtype: torch.dtype, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    weight = leaf(draw(width, dtype=dtype, step=1 / 64))
    return weight, leaf(draw(width, dtype=dtype, step=1 / 16).flip(0)) if bias else None


# Norms ------------------------------------------------------------------------------------------------------

NORMS = pytest.mark.parametrize(
    ("kind", "offset", "rounds_first", "bias"),
    [("rmsnorm", 0.0, True, False), ("rmsnorm", 1.0, False, False), ("layernorm", 0.0, False, True),
     ("layernorm", 1.0, True, True)],
    ids=["llama", "gemma", "layernorm", "layernorm1p"],
)  # fmt: skip


def norm_options(kind: str, offset: float, rounds_first: bool) -> dict[str, Any]:
    return {"kind": kind, "eps": 1e-2, "offset": offset, "rounds_first": rounds_first}


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
    agree(triton_norm.norm, reference.norm, inputs, tolerance(dtype, 3 if rounds_first else 1), **options)


@DTYPES
@NORMS
@pytest.mark.parametrize(("heads", "width"), [(3, 20), (5, 96)])
def test_norm_with_a_gain_for_each_head(
    heads: int, width: int, kind: str, offset: float, rounds_first: bool, bias: bool, dtype: torch.dtype
) -> None:
    options = norm_options(kind, offset, rounds_first)
    product = draw(2, 3, 2 * heads, width, dtype=dtype)
    inputs = (leaf(product[:, :, 1 : heads + 1]), *vectors(heads * width, dtype, bias))
    agree(triton_norm.norm, reference.norm, inputs, tolerance(dtype, 3 if rounds_first else 1), **options)


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
    limit = tolerance(dtype, 3 if rounds_first else 1)
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


def angles(batch: int, length: int, rotated: int) -> tuple[Tensor, Tensor]:
    """cos is one row for the whole batch, expanded; sin is a slice."""
    turn = 3 * draw(1, length, rotated)
    cos, sin = turn[..., : rotated // 2].cos().contiguous(), turn.sin()
    return cos.expand(batch, -1, -1), sin[..., : rotated // 2].expand(batch, -1, -1)


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
    limit = tolerance(dtype, 4 if rounds_first else 2)
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


# Cross-entropy ----------------------------------------------------------------------------------------------


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


# What all of them keep to -----------------------------------------------------------------------------------

OPTIONS = norm_options("layernorm", 0.0, False)


def operations() -> dict[str, tuple[Function, Function, list[Tensor]]]:
    """Name -> (kernel, definition, inputs that want gradients), x (2, 3, 4, 20) first."""
    x = [leaf(draw(2, 3, 4, 20)) for _ in range(2)]
    weight, bias = vectors(20, FP32)
    cos, sin = angles(2, 3, 10)

    def both(name: str, module: Any, call: Callable[[Any], Function]) -> tuple[Function, Function]:
        return call(getattr(module, name)), call(getattr(reference, name))

    def turned(f: Function) -> Function:
        return lambda x: f(x, cos.to(x), sin.to(x), interleaved=False)

    def normed(f: Function) -> Function:
        return lambda *a: f(*a, **OPTIONS)

    def normed_turned(f: Function) -> Function:
        return lambda x, w, b: f(x, w, b, cos.to(x), sin.to(x), interleaved=True, **OPTIONS)

    def silu(f: Function) -> Function:
        return lambda *a: f(*a, activation="silu")

    return {
        "norm": (*both("norm", triton_norm, normed), [x[0], weight, bias]),
        "add_norm": (*both("add_norm", triton_norm, normed), [*x, weight, bias]),
        "rotate": (*both("rotate", triton_rotate, turned), [x[0]]),
        "norm_rotate": (*both("norm_rotate", triton_rotate, normed_turned), [x[0], weight, bias]),
        "gate": (*both("gate", triton_gate, silu), x),
        "activate": (*both("activate", triton_gate, silu), [x[0]]),
    }


OPERATIONS = pytest.mark.parametrize(
    "name", ["norm", "add_norm", "rotate", "norm_rotate", "gate", "activate"]
)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded to all": lambda y: torch.ones((), device=y.device).expand_as(y),
    "expanded over the batch": lambda y: torch.randn_like(y[:1]).expand_as(y),
    "transposed": lambda y: torch.randn_like(y.transpose(0, 3).contiguous()).transpose(0, 3),
    "reversed dimensions": lambda y: torch.randn_like(y.permute(2, 1, 0, 3).contiguous()).permute(2, 1, 0, 3),
    "every second": lambda y: torch.randn_like(torch.cat((y, y), -1))[..., ::2],
}


@OPERATIONS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_inputs_and_upstream_gradients(name: str, layout: str) -> None:
    ours, definition, inputs = operations()[name]
    agree(ours, definition, inputs, 1e-5, LAYOUTS[layout])
    strided = [leaf(LAYOUTS[layout](t)) if t.ndim == 4 else t for t in inputs]
    agree(ours, definition, strided, 1e-5)


def test_five_dimensions_that_cannot_be_walked_are_copied() -> None:
    x = leaf(draw(2, 3, 2, 3, 40).permute(3, 2, 1, 0, 4)[..., :17])
    agree(triton_norm.norm, reference.norm, (x, *vectors(17, FP32)), 1e-5, **OPTIONS)


@OPERATIONS
def test_without_a_graph_and_with_frozen_weights(name: str) -> None:
    ours, definition, inputs = operations()[name]
    with torch.no_grad():
        result = ours(*inputs)
    assert not any(r.requires_grad for r in ((result,) if isinstance(result, Tensor) else result))
    agree(ours, definition, [inputs[0], *(t.detach() for t in inputs[1:])], 1e-5)
    if inputs[1:] and inputs[1].ndim == 1:
        agree(ours, definition, [inputs[0].detach(), inputs[1], *(t.detach() for t in inputs[2:])], 1e-5)


@OPERATIONS
def test_nothing_is_written_outside_the_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer comes from torch.empty: here from the middle of a larger one that must stay as it was."""
    ours, _, inputs = operations()[name]
    kept, untouched = [t.detach().clone() for t in inputs], []
    empty = torch.empty

    def guarded(shape: Any, **options: Any) -> Tensor:
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        buffer = empty(size.numel() + 256, **options).fill_(7.5)
        untouched.append((buffer[:128], buffer[128 + size.numel() :]))
        return buffer[128 : 128 + size.numel()].view(size)

    monkeypatch.setattr(torch, "empty", guarded)
    results = ours(*inputs)
    results = (results,) if isinstance(results, Tensor) else results
    torch.autograd.grad(results, inputs, [torch.ones_like(r) for r in results])
    monkeypatch.undo()
    assert len(untouched) >= 2
    assert all((side == 7.5).all() for sides in untouched for side in sides)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


@pytest.mark.parametrize(
    ("name", "floats"),  # x (2, 3, 4, 20): 480 numbers in 24 rows; gain and bias 20 each; cos and sin 30 each
    [("norm", 480 + 40 + 48), ("add_norm", 480 + 40 + 48), ("rotate", 60), ("norm_rotate", 480 + 40 + 60),
     ("gate", 960), ("activate", 480)],
)  # fmt: skip
def test_what_is_saved_for_the_backward_pass(name: str, floats: int) -> None:
    ours, _, inputs = operations()[name]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()), lambda _: None):
        ours(*inputs)
    assert sum(saved) == floats


def test_rows_are_walked_where_they_lie() -> None:
    """A slice of a product and heads before tokens are not copied; what has no neighbours is."""
    product = draw(2, 3, 12, 20)
    for x in (
        product[:, :, :4],
        product.transpose(1, 2),
        product[:, ::2, 1:5],
        product[:1, 0].expand(5, 12, 20),
    ):
        assert triton_rows.rows(x)[0] is x
    assert triton_rows.rows(product.transpose(2, 3))[0].is_contiguous()
    x = product.transpose(1, 2)  # (2, 12, 3, 20)
    middle, inner, outer, step, last = triton_rows.rows(x)[1]
    assert (middle, inner) == (12, 3) and (outer, step, last) == x.stride()[:3]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["nvidia", "amd"])
def test_every_kernel_compiles_for_gpus_that_are_not_here(target: str, tmp_path: Path) -> None:
    """And loads 16 bytes at once wherever it reads rows of bf16."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.megamodel.kernels.offline", target],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loads = json.loads(done.stdout.splitlines()[-1])
    modules = (triton_norm, triton_rotate, triton_gate, triton_entropy)
    launched = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in modules
        for name in re.findall(r"^ +(?:\w+ = )?(_\w+)\[", Path(module.__file__).read_text(), re.MULTILINE)
    }
    assert len(launched) == 11 and set(loads) == launched
    if target == "nvidia":
        assert {name for name, found in loads.items() if "ld.global.v4.b32" not in found} == set()
