"""RMSNorm and LayerNorm in Triton, also with the residual addition and with a gain for each head.

Rows of E elements; a tile of ROWS rows lies in registers as fp32. A gain of (h E) has h groups of rows:
row r of group g is row r h + g of x (..., h, E). Saved for the backward pass: x and a statistic or two a row.
"""

# pyright: reportIndexIssue=false
# A decorator that may not be installed is unknown to the type checker: kernel[grid] looks wrong to it.

from dataclasses import dataclass

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamodel.kernels.triton_rows import block, count, place, programs, rows, tile_rows, warps


@triton.jit
def gain_of(weight, offset, ROUNDS_FIRST: tl.constexpr):
    """offset + g in fp32, rounded to the gain's dtype where x_hat is rounded first."""
    gain = weight.to(tl.float32) + offset
    if ROUNDS_FIRST:
        gain = gain.to(weight.dtype).to(tl.float32)
    return gain


@triton.jit
def affine(
    x,
    weight,
    bias,
    offset,
    like,
    GAIN: tl.constexpr,
    BIAS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """x_hat in fp32 -> (offset + g) x_hat + b in fp32, rounded on the way to what torch's promotion gives."""
    kind: tl.constexpr = like.dtype.element_ty
    if ROUNDS_FIRST:
        x = x.to(kind).to(tl.float32)
    if GAIN:
        x = x * gain_of(weight, offset, ROUNDS_FIRST)
        if ROUNDS_FIRST and weight.dtype == kind:
            x = x.to(kind).to(tl.float32)
    if BIAS:
        x = x + bias.to(tl.float32)
    return x


@triton.jit
def _forward(
    x, middle, inner, step_outer, step_middle, step_inner,
    residual, middle_r, inner_r, step_outer_r, step_middle_r, step_inner_r,
    total, y, weight, bias, mean, scale,
    number, width, eps, offset,
    ADDS: tl.constexpr, CENTRES: tl.constexpr, GAIN: tl.constexpr, BIAS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """number: rows of a group; program (tile, group)."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    there = (r < number)[:, None] & (column < width)
    row = tl.where(r < number, r, 0) * groups + group
    at = place(row, middle, inner, step_outer, step_middle, step_inner)[:, None] + column
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    out = row.to(tl.int64)[:, None] * width + column
    if ADDS:
        at = place(row, middle_r, inner_r, step_outer_r, step_middle_r, step_inner_r)[:, None] + column
        value += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + out, rounded, mask=there)
        value = rounded.to(tl.float32)
    if CENTRES:
        middle_value = tl.sum(value, 1) / width
        tl.store(mean + row, middle_value, mask=r < number)
        value = tl.where(there, value - middle_value[:, None], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(scale + row, factor, mask=r < number)
    g = tl.load(weight + group * width + column, mask=column < width, other=0.0) if GAIN else 0.0
    b = tl.load(bias + group * width + column, mask=column < width, other=0.0) if BIAS else 0.0
    value = affine(value * factor[:, None], g, b, offset, y, GAIN, BIAS, ROUNDS_FIRST)
    tl.store(y + out, value.to(y.dtype.element_ty), mask=there)


@triton.jit
def _backward(
    x, middle, inner, step_outer, step_middle, step_inner,
    dy, middle_y, inner_y, step_outer_y, step_middle_y, step_inner_y,
    dtotal, middle_t, inner_t, step_outer_t, step_middle_t, step_inner_t,
    dx, weight, mean, scale, dweight, dbias,
    number, width, offset,
    ADDS: tl.constexpr, CENTRES: tl.constexpr, GAIN: tl.constexpr,
    GAIN_GRADIENT: tl.constexpr, BIAS_GRADIENT: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (p, group) takes every P-th tile of its group; dweight and dbias: (groups, P, width) fp32."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, COLUMNS)[None, :]
    gained = tl.zeros((ROWS, COLUMNS), tl.float32)
    shifted = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(number, ROWS), tl.num_programs(0)):
        r = tile * ROWS + tl.arange(0, ROWS)
        there = (r < number)[:, None] & (column < width)
        row = tl.where(r < number, r, 0) * groups + group
        at = place(row, middle, inner, step_outer, step_middle, step_inner)[:, None] + column
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        at = place(row, middle_y, inner_y, step_outer_y, step_middle_y, step_inner_y)[:, None] + column
        d = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        factor = tl.load(scale + row)[:, None]
        if CENTRES:
            value -= tl.load(mean + row)[:, None]
        hat = tl.where(there, value * factor, 0.0)
        if GAIN_GRADIENT:
            gained += d * (hat.to(x.dtype.element_ty).to(tl.float32) if ROUNDS_FIRST else hat)
        if BIAS_GRADIENT:
            shifted += d
        if GAIN:  # read again with each tile, from the cache: registers are what a wide row lacks
            stored = tl.load(weight + group * width + column, mask=column < width, other=0.0)
            d *= gain_of(stored, offset, ROUNDS_FIRST)
        grad = d - hat * (tl.sum(d * hat, 1) / width)[:, None]
        if CENTRES:
            grad -= (tl.sum(d, 1) / width)[:, None]
        grad *= factor
        if ADDS:
            at = place(row, middle_t, inner_t, step_outer_t, step_middle_t, step_inner_t)[:, None] + column
            grad += tl.load(dtotal + at, mask=there, other=0.0).to(tl.float32)
        out = row.to(tl.int64)[:, None] * width + column
        tl.store(dx + out, grad.to(dx.dtype.element_ty), mask=there)
    line = (group * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width + tl.arange(0, COLUMNS)
    if GAIN_GRADIENT:
        tl.store(dweight + line, tl.sum(gained, 0), mask=tl.arange(0, COLUMNS) < width)
    if BIAS_GRADIENT:
        tl.store(dbias + line, tl.sum(shifted, 0), mask=tl.arange(0, COLUMNS) < width)


@dataclass(frozen=True)
class Form:
    """Which norm, and how it is cut into tiles."""

    centres: bool
    eps: float
    offset: float
    rounds_first: bool

    def tiles(self, x: Tensor, groups: int) -> tuple[int, int, int, int]:
        """(rows of a group, rows of a tile, columns of a tile, warps)."""
        columns = block(x.shape[-1])
        height = tile_rows(columns, 2048)
        return count(x) // groups, height, columns, warps(height * columns)


def form(kind: str, eps: float, offset: float, rounds_first: bool) -> Form:
    return Form(kind == "layernorm", eps, offset, rounds_first)


def groups_of(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> int:
    """Groups of rows with a gain of their own: heads, or 1."""
    sizes = {vector.numel() for vector in (weight, bias) if vector is not None} or {x.shape[-1]}
    assert len(sizes) == 1, f"gain and bias differ in size: {sizes}"
    groups = sizes.pop() // x.shape[-1]
    assert groups == 1 or groups == x.shape[-2], f"gains of {groups} heads for x of {tuple(x.shape)}"
    return groups


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, settings: Form
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x + residual or x, y, mean, 1 / root) of all rows; the mean is empty where none is taken."""
    groups = groups_of(x, weight, bias)
    number, height, columns, num_warps = settings.tiles(x, groups)
    total = x
    if residual is not None:
        assert residual.shape == x.shape, (residual.shape, x.shape)
        total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    y = torch.empty(x.shape, dtype=total.dtype, device=x.device)
    mean = torch.empty(count(x) if settings.centres else 0, dtype=torch.float32, device=x.device)
    scale = torch.empty(count(x), dtype=torch.float32, device=x.device)
    if number:
        read, places = rows(x)
        added, added_places = (read, places) if residual is None else rows(residual)
        _forward[(triton.cdiv(number, height), groups)](
            read, *places, added, *added_places,
            total, y, dense(weight, read), dense(bias, read), mean, scale,
            number, x.shape[-1], settings.eps, settings.offset,
            ADDS=residual is not None, CENTRES=settings.centres,
            GAIN=weight is not None, BIAS=bias is not None, ROUNDS_FIRST=settings.rounds_first,
            ROWS=height, COLUMNS=columns, num_warps=num_warps,
        )  # fmt: skip
    return total, y, mean, scale


def run_backward(
    saved: tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor],
    dy: Tensor,
    dtotal: Tensor | None,
    settings: Form,
    needed: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias; the last two where they are needed."""
    x, weight, bias, mean, scale = saved
    groups = groups_of(x, weight, bias)
    number, height, columns, num_warps = settings.tiles(x, groups)
    parts = programs(x, num_warps, triton.cdiv(number, height))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight, dbias = (partial(x, groups, parts, wanted) for wanted in needed)
    if number:
        read, places = rows(x)
        given, given_places = rows(dy)
        passed, passed_places = (given, given_places) if dtotal is None else rows(dtotal)
        _backward[(parts, groups)](
            read, *places, given, *given_places, passed, *passed_places,
            dx, dense(weight, read), mean, scale, dweight, dbias,
            number, x.shape[-1], settings.offset,
            ADDS=dtotal is not None, CENTRES=settings.centres, GAIN=weight is not None,
            GAIN_GRADIENT=needed[0], BIAS_GRADIENT=needed[1], ROUNDS_FIRST=settings.rounds_first,
            ROWS=height, COLUMNS=columns, num_warps=num_warps,
        )  # fmt: skip
    return dx, summed(dweight, weight, needed[0]), summed(dbias, bias, needed[1])


def dense(vector: Tensor | None, instead: Tensor) -> Tensor:
    """A gain or bias in one piece; something to point at where there is none."""
    return instead if vector is None else vector.contiguous()


def partial(x: Tensor, groups: int, parts: int, wanted: bool) -> Tensor:
    """Where each program leaves its sum: no atomics, so the same bits every time."""
    shape = (groups, parts, x.shape[-1]) if wanted else (0,)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def summed(partials: Tensor, vector: Tensor | None, wanted: bool) -> Tensor | None:
    if vector is None or not wanted:
        return None
    return partials.sum(1).view(vector.shape).to(vector.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Form) -> Tensor:
        _, y, mean, scale = run_forward(x, None, weight, bias, settings)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.settings = settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        needed = ctx.needs_input_grad[1:3]
        return *run_backward(ctx.saved_tensors, dy, None, ctx.settings, needed), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Form
    ) -> tuple[Tensor, Tensor]:
        total, y, mean, scale = run_forward(x, residual, weight, bias, settings)
        ctx.save_for_backward(total, weight, bias, mean, scale)
        ctx.settings, ctx.dtypes = settings, (x.dtype, residual.dtype)
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal: Tensor | None, dy: Tensor | None):
        dweight = dbias = None
        if dy is not None:
            needed = ctx.needs_input_grad[2:4]
            dtotal, dweight, dbias = run_backward(ctx.saved_tensors, dy, dtotal, ctx.settings, needed)
        dx, dresidual = (None if dtotal is None else dtotal.to(dtype) for dtype in ctx.dtypes)
        return dx, dresidual, dweight, dbias, None


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
    offset: float,
    rounds_first: bool,
) -> Tensor:
    """As `reference.norm`."""
    return _Norm.apply(x, weight, bias, form(kind, eps, offset, rounds_first))  # type: ignore[return-value]


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
    offset: float,
    rounds_first: bool,
) -> tuple[Tensor, Tensor]:
    """As `reference.add_norm`; the backward pass joins the gradients of both results."""
    settings = form(kind, eps, offset, rounds_first)
    return _AddNorm.apply(x, residual, weight, bias, settings)  # type: ignore[return-value]
