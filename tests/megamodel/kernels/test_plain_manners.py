"""What the plain forms keep to on a CPU: any layout of inputs and gradients, frozen weights, no graph."""

import pytest
import torch
from torch import Tensor

from megamodel.kernels import reference
from tests.megamodel.kernels import exact, plain
from tests.megamodel.kernels.agreement import (
    DTYPES,
    FP32,
    LAYOUTS,
    Function,
    agree,
    close,
    leaf,
    norm_options,
    storages,
)
from tests.megamodel.kernels.plain import Turn, documents, draw, limit, vectors

BATCH, LENGTH, HEADS, WIDTH = SHAPE = (2, 3, 4, 20)
OPTIONS = norm_options("layernorm", 0.0, False)
TURN = Turn(*documents(BATCH, LENGTH), WIDTH, 0.5, True)

Pair = tuple[Function, Function]  # ours, the definition


def normed(ours: Function, definition: Function) -> Pair:
    return lambda *a: ours(*a, **OPTIONS), lambda *a: definition(*a, **OPTIONS)


def normed_and_turned() -> Pair:
    ours, definition = normed(plain.norm, reference.norm)
    return lambda *a: TURN.ours(ours(*a)), lambda *a: TURN.definition(definition(*a))


def clamped() -> Pair:
    how = {"clamp": 1.0, "alpha": 1.702}
    return lambda *a: plain.clamped(*a, **how), lambda *a: exact.clamped(*a, **how)


def activated(activation: str) -> Pair:
    how = {"activation": activation}
    return lambda x: plain.activate(x, **how), lambda x: exact.activate(x, **how)


def gated(activation: str) -> Pair:
    how = {"activation": activation}
    return lambda *a: plain.gate(*a, **how), lambda *a: exact.gated(*a, **how)


# Name -> (both forms, inputs like x (B, S, H, E), whether gain and bias (E) follow them)
OPERATIONS: dict[str, tuple[Pair, int, bool]] = {
    "norm": (normed(plain.norm, reference.norm), 1, True),
    "add_norm": (normed(plain.add_norm, reference.add_norm), 2, True),
    "rotate": ((TURN.ours, TURN.definition), 2, False),
    "norm_rotate": (normed_and_turned(), 1, True),
    "gate": (gated("silu"), 2, False),
    "clamped": (clamped(), 2, False),
    **{name: (activated(name), 1, False) for name in exact.ACTIVATIONS},
}
# In bf16: of a sum, its norm, the product with the gain, and the turn or the sum with the bias.
ROUNDINGS = 4
EVERY = pytest.mark.parametrize("name", OPERATIONS)


def inputs_of(name: str, dtype: torch.dtype = FP32) -> list[Tensor]:
    """Multiples of 1/16, so that sums of two are exact in bf16."""
    _, count, affine = OPERATIONS[name]
    x = [leaf(draw(*SHAPE, dtype=dtype, step=1 / 16)) for _ in range(count)]
    return [*x, *(torch.nn.Parameter(v) for v in vectors(WIDTH, dtype) if v is not None)] if affine else x


@DTYPES
@EVERY
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_inputs_and_upstream_gradients(name: str, layout: str, dtype: torch.dtype) -> None:
    (ours, definition), _, _ = OPERATIONS[name]
    inputs = inputs_of(name, dtype)
    agree(ours, definition, inputs, limit(dtype, ROUNDINGS), LAYOUTS[layout])
    strided = [leaf(LAYOUTS[layout](t)) if t.ndim == 4 else t for t in inputs]
    agree(ours, definition, strided, limit(dtype, ROUNDINGS), LAYOUTS[layout])


@EVERY
def test_frozen_inputs(name: str) -> None:
    """Each of the inputs alone wants a gradient, then each alone wants none: they get the same."""
    (ours, definition), _, _ = OPERATIONS[name]
    inputs = inputs_of(name)
    frozen = [t.detach() if t.ndim == 4 else torch.nn.Parameter(t, requires_grad=False) for t in inputs]
    for i in range(len(inputs)):
        agree(ours, definition, [*frozen[:i], inputs[i], *frozen[i + 1 :]], limit(FP32, 1))
        if len(inputs) > 1:
            agree(ours, definition, [*inputs[:i], frozen[i], *inputs[i + 1 :]], limit(FP32, 1))


@DTYPES
@EVERY
def test_without_a_graph(name: str, dtype: torch.dtype) -> None:
    """And nothing is written into the inputs, which are heads of a larger tensor, nor beside them."""
    (ours, definition), _, _ = OPERATIONS[name]
    inputs = [leaf(LAYOUTS["some heads"](t)) if t.ndim == 4 else t for t in inputs_of(name, dtype)]
    kept = [s.clone() for s in storages(inputs)]
    with torch.no_grad():
        results, expected = ours(*inputs), definition(*(t.double() for t in inputs))
    results, expected = ((r,) if isinstance(r, Tensor) else r for r in (results, expected))
    for mine, other in zip(results, expected, strict=True):
        assert mine.dtype == dtype and mine.grad_fn is None
        close(mine, other, limit(dtype, ROUNDINGS))
    assert all(torch.equal(now, before) for now, before in zip(storages(inputs), kept, strict=True))
