"""Activations and gated activations in Triton, in fp32 between one load and one store.

Rows of F elements in tiles of ROWS x COLUMNS. Saved for the backward pass: the inputs, nothing else.
"""

# pyright: reportIndexIssue=false
# A decorator that may not be installed is unknown to the type checker: kernel[grid] looks wrong to it.

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamodel.activation import ACTIVATIONS, ActivationName
from megamodel.kernels.triton_rows import count, place, rows, tile_rows, warps

_ELEMENTS = 2048  # of a tile
_COLUMNS = 1024  # of a tile at most


@triton.jit
def _expm1(x):
    """exp(x) - 1 for x <= 0, without cancellation near 0."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    return tl.where(x > -0.25, series, tl.exp(x) - 1)


@triton.jit
def _erf_bell(x):
    """(Phi(x), x phi(x)) of the standard normal distribution."""
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476), x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _value_and_slope(x, NAME: tl.constexpr):
    """act(x) and act'(x), fp32; a NaN stays one. What a caller drops is not computed."""
    if NAME == "identity":
        y, slope = x, tl.zeros_like(x) + 1.0
    elif NAME == "sigmoid":
        y = tl.sigmoid(x)
        slope = y * (1 - y)
    elif NAME == "silu":
        s = tl.sigmoid(x)
        y, slope = x * s, s + x * s * (1 - s)
    elif NAME == "gelu":
        below, bell = _erf_bell(x)
        y, slope = x * below, below + bell
    elif NAME == "gelu_tanh":  # 1 + tanh(u) = 2 sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y, slope = x * s, s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif NAME == "elu":
        y, slope = tl.where(x <= 0, _expm1(x), x), tl.where(x <= 0, tl.exp(x), 1.0)
    elif NAME == "selu":
        y = tl.where(x <= 0, 1.7580993408473766 * _expm1(x), 1.0507009873554805 * x)
        slope = tl.where(x <= 0, 1.7580993408473766 * tl.exp(x), 1.0507009873554805)
    elif NAME == "relu2":
        y = tl.where(x <= 0, 0.0, x * x)
        slope = tl.where(x <= 0, 0.0, 2 * x)
    else:
        tl.static_assert(NAME == "relu")
        y, slope = tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)
    return y, slope


@triton.jit
def _tile(number, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows of this program, its columns, which elements exist, their offsets in an output)."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (r < number)[:, None] & (column < width)
    row = tl.where(r < number, r, 0)
    return row, column, there, row.to(tl.int64)[:, None] * width + column


@triton.jit
def _activate(
    x, middle, inner, step_outer, step_middle, step_inner,
    y, number, width, NAME: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, there, out = _tile(number, width, ROWS, COLUMNS)
    at = place(row, middle, inner, step_outer, step_middle, step_inner)[:, None] + column
    value, _ = _value_and_slope(tl.load(x + at, mask=there, other=0.0).to(tl.float32), NAME)
    tl.store(y + out, value.to(y.dtype.element_ty), mask=there)


@triton.jit
def _activate_backward(
    x, middle, inner, step_outer, step_middle, step_inner,
    dy, middle_y, inner_y, step_outer_y, step_middle_y, step_inner_y,
    dx, number, width, NAME: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, there, out = _tile(number, width, ROWS, COLUMNS)
    at = place(row, middle, inner, step_outer, step_middle, step_inner)[:, None] + column
    _, slope = _value_and_slope(tl.load(x + at, mask=there, other=0.0).to(tl.float32), NAME)
    at = place(row, middle_y, inner_y, step_outer_y, step_middle_y, step_inner_y)[:, None] + column
    d = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
    tl.store(dx + out, (d * slope).to(dx.dtype.element_ty), mask=there)


@triton.jit
def _gated(g, u, clamp, alpha, NAME: tl.constexpr, CLAMPS: tl.constexpr):
    """(act(gate), its slope, what up brings, whether up passes): the result is the first times the third."""
    if CLAMPS:
        open_gate, open_up = g <= clamp, (u >= -clamp) & (u <= clamp)
        g = tl.where(g > clamp, clamp, g)
        u = tl.where(u > clamp, clamp, tl.where(u < -clamp, -clamp, u)) + 1
        s = tl.sigmoid(alpha * g)
        value, slope = g * s, tl.where(open_gate, s + alpha * g * s * (1 - s), 0.0)
        passes = tl.where(open_up, 1.0, 0.0)
    else:
        value, slope = _value_and_slope(g, NAME)
        passes = tl.zeros_like(u) + 1.0
    return value, slope, u, passes


@triton.jit
def _gate(
    gate, middle, inner, step_outer, step_middle, step_inner,
    up, middle_u, inner_u, step_outer_u, step_middle_u, step_inner_u,
    y, number, width, clamp, alpha,
    NAME: tl.constexpr, CLAMPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, there, out = _tile(number, width, ROWS, COLUMNS)
    at = place(row, middle, inner, step_outer, step_middle, step_inner)[:, None] + column
    g = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    at = place(row, middle_u, inner_u, step_outer_u, step_middle_u, step_inner_u)[:, None] + column
    u = tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    value, _, u, _ = _gated(g, u, clamp, alpha, NAME, CLAMPS)
    tl.store(y + out, (value * u).to(y.dtype.element_ty), mask=there)


@triton.jit
def _gate_backward(
    gate, middle, inner, step_outer, step_middle, step_inner,
    up, middle_u, inner_u, step_outer_u, step_middle_u, step_inner_u,
    dy, middle_y, inner_y, step_outer_y, step_middle_y, step_inner_y,
    dgate, dup, number, width, clamp, alpha,
    NAME: tl.constexpr, CLAMPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, there, out = _tile(number, width, ROWS, COLUMNS)
    at = place(row, middle, inner, step_outer, step_middle, step_inner)[:, None] + column
    g = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    at = place(row, middle_u, inner_u, step_outer_u, step_middle_u, step_inner_u)[:, None] + column
    u = tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    at = place(row, middle_y, inner_y, step_outer_y, step_middle_y, step_inner_y)[:, None] + column
    d = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
    value, slope, u, passes = _gated(g, u, clamp, alpha, NAME, CLAMPS)
    tl.store(dgate + out, (d * u * slope).to(dgate.dtype.element_ty), mask=there)
    tl.store(dup + out, (d * value * passes).to(dup.dtype.element_ty), mask=there)


def _launch(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid, and the sizes and warps of a tile."""
    width = x.shape[-1]
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    height = tile_rows(columns, _ELEMENTS)
    grid = (triton.cdiv(count(x), height), triton.cdiv(width, columns))
    return grid, {"ROWS": height, "COLUMNS": columns, "num_warps": warps(height * columns)}


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, name: ActivationName) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            grid, sizes = _launch(x)
            read, places = rows(x)
            _activate[grid](read, *places, y, count(x), x.shape[-1], NAME=name, **sizes)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            grid, sizes = _launch(x)
            (read, places), (given, given_places) = rows(x), rows(dy)
            _activate_backward[grid](
                read, *places, given, *given_places, dx, count(x), x.shape[-1], NAME=ctx.name, **sizes
            )
        return dx, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, gate: Tensor, up: Tensor, name: ActivationName, clamp: float | None, alpha: float
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name, ctx.clamp, ctx.alpha = name, clamp, alpha
        y = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
        if gate.numel():
            grid, sizes = _launch(gate)
            (read, places), (other, other_places) = rows(gate), rows(up)
            _gate[grid](
                read, *places, other, *other_places, y, count(gate), gate.shape[-1], clamp or 0.0, alpha,
                NAME=name, CLAMPS=clamp is not None, **sizes,
            )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        gate, up = ctx.saved_tensors
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        if gate.numel():
            grid, sizes = _launch(gate)
            (read, places), (other, other_places), (given, given_places) = rows(gate), rows(up), rows(dy)
            _gate_backward[grid](
                read, *places, other, *other_places, given, *given_places,
                dgate, dup, count(gate), gate.shape[-1], ctx.clamp or 0.0, ctx.alpha,
                NAME=ctx.name, CLAMPS=ctx.clamp is not None, **sizes,
            )  # fmt: skip
        return dgate, dup, None, None, None


def gate(
    gate: Tensor, up: Tensor, *, activation: ActivationName, clamp: float | None = None, alpha: float = 1.702
) -> Tensor:
    """As `reference.gate`, rounded once, at the end."""
    assert activation in ACTIVATIONS and gate.shape == up.shape, (activation, gate.shape, up.shape)
    return _Gate.apply(gate, up, activation, clamp, alpha)  # type: ignore[return-value]


def activate(x: Tensor, *, activation: ActivationName) -> Tensor:
    """As `reference.activate`."""
    assert activation in ACTIVATIONS, activation
    return _Activate.apply(x, activation)  # type: ignore[return-value]
