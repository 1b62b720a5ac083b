"""Rotary embedding in Triton, alone and after the norm of each head (QK-norm).

B batch, S sequence length, H heads, E head width, R rotated width. A row is one head of one token; a tile
holds of ROWS rows the pairs (a, b), PAIRS of each, and the rest that is not turned. The gradient of a turn is
the turn back, so the rotation saves nothing but its cos and sin.
"""

# pyright: reportIndexIssue=false
# A decorator that may not be installed is unknown to the type checker: kernel[grid] looks wrong to it.

from dataclasses import dataclass

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamodel.kernels.triton_norm import Form, affine, dense, form, gain_of, groups_of, partial, summed
from megamodel.kernels.triton_rows import block, count, place, programs, rows, tile_rows, warps


@triton.jit
def _load(
    x, at, there, rotated, width,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows at offsets `at` (ROWS) -> a, b (ROWS, PAIRS) and the rest (ROWS, REST), as they are stored."""
    at, there = at[:, None], there[:, None]
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(x + at + column, mask=there & (column < rotated), other=0.0)
        a, b = tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
    else:
        column = tl.arange(0, PAIRS)[None, :]
        half = rotated // 2
        a = tl.load(x + at + column, mask=there & (column < half), other=0.0)
        b = tl.load(x + at + half + column, mask=there & (column < half), other=0.0)
    column = rotated + tl.arange(0, REST)[None, :]
    return a, b, tl.load(x + at + column, mask=there & (column < width), other=0.0)


@triton.jit
def _store(
    y, at, there, a, b, rest, rotated, width,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The inverse of _load, rounded to y's dtype."""
    at, there = at[:, None], there[:, None]
    kind: tl.constexpr = y.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(y + at + column, tl.interleave(a, b).to(kind), mask=there & (column < rotated))
    else:
        column = tl.arange(0, PAIRS)[None, :]
        half = rotated // 2
        tl.store(y + at + column, a.to(kind), mask=there & (column < half))
        tl.store(y + at + half + column, b.to(kind), mask=there & (column < half))
    column = rotated + tl.arange(0, REST)[None, :]
    tl.store(y + at + column, rest.to(kind), mask=there & (column < width))


@triton.jit
def _angles(
    cos, sin, row, there, heads, length,
    step_batch, step_token, step_batch_s, step_token_s, half,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """cos and sin of the token of each row: (ROWS, PAIRS)."""
    token = row // heads
    batch, place_in_text = (token // length).to(tl.int64), (token % length).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    mask = there[:, None] & (pair < half)
    c = tl.load(cos + (batch * step_batch + place_in_text * step_token)[:, None] + pair, mask=mask, other=0.0)
    at = (batch * step_batch_s + place_in_text * step_token_s)[:, None]
    return c.to(tl.float32), tl.load(sin + at + pair, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotate(
    x, middle, inner, step_outer, step_middle, step_inner,
    cos, sin, step_batch, step_token, step_batch_s, step_token_s,
    y, number, heads, length, width, rotated,
    BACK: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = r < number
    row = tl.where(there, r, 0)
    c, s = _angles(
        cos, sin, row, there, heads, length,
        step_batch, step_token, step_batch_s, step_token_s, rotated // 2, PAIRS,
    )  # fmt: skip
    if BACK:
        s = -s
    at = place(row, middle, inner, step_outer, step_middle, step_inner)
    a, b, rest = _load(x, at, there, rotated, width, ROWS, PAIRS, REST, INTERLEAVED)
    a, b = a.to(tl.float32), b.to(tl.float32)
    at = row.to(tl.int64) * width
    a, b = a * c - b * s, b * c + a * s
    _store(y, at, there, a, b, rest, rotated, width, PAIRS, REST, INTERLEAVED)


@triton.jit
def _normalised(a, b, rest, there, rotated, width, eps, CENTRES: tl.constexpr, PAIRS: tl.constexpr,
                REST: tl.constexpr):  # fmt: skip
    """fp32 parts of rows -> the same centred, the mean and 1 / root of each row."""
    mean = (tl.sum(a, 1) + tl.sum(b, 1) + tl.sum(rest, 1)) / width
    if CENTRES:
        paired = there[:, None] & (tl.arange(0, PAIRS)[None, :] < rotated // 2)
        unpaired = there[:, None] & (tl.arange(0, REST)[None, :] < width - rotated)
        a = tl.where(paired, a - mean[:, None], 0.0)
        b = tl.where(paired, b - mean[:, None], 0.0)
        rest = tl.where(unpaired, rest - mean[:, None], 0.0)
    square = (tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)) / width
    return a, b, rest, 1.0 / tl.sqrt(square + eps)


@triton.jit
def _forward(
    x, middle, inner, step_outer, step_middle, step_inner,
    cos, sin, step_batch, step_token, step_batch_s, step_token_s,
    weight, bias, y, number, heads, length, width, rotated, eps, offset,
    CENTRES: tl.constexpr, GAIN: tl.constexpr, BIAS: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """number: rows of a group; program (tile, group)."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = r < number
    row = tl.where(there, r, 0) * groups + group
    at = place(row, middle, inner, step_outer, step_middle, step_inner)
    a, b, rest = _load(x, at, there, rotated, width, ROWS, PAIRS, REST, INTERLEAVED)
    a, b, rest, scale = _normalised(
        a.to(tl.float32), b.to(tl.float32), rest.to(tl.float32), there, rotated, width, eps,
        CENTRES, PAIRS, REST,
    )  # fmt: skip
    wa, wb, wr, ba, bb, br = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    only = tl.zeros((1,), tl.int64) + group * width
    if GAIN:
        wa, wb, wr = _load(weight, only, only >= 0, rotated, width, 1, PAIRS, REST, INTERLEAVED)
    if BIAS:
        ba, bb, br = _load(bias, only, only >= 0, rotated, width, 1, PAIRS, REST, INTERLEAVED)
    kind: tl.constexpr = y.dtype.element_ty
    a = affine(a * scale[:, None], wa, ba, offset, y, GAIN, BIAS, ROUNDS_FIRST).to(kind).to(tl.float32)
    b = affine(b * scale[:, None], wb, bb, offset, y, GAIN, BIAS, ROUNDS_FIRST).to(kind).to(tl.float32)
    rest = affine(rest * scale[:, None], wr, br, offset, y, GAIN, BIAS, ROUNDS_FIRST)
    c, s = _angles(
        cos, sin, row, there, heads, length,
        step_batch, step_token, step_batch_s, step_token_s, rotated // 2, PAIRS,
    )  # fmt: skip
    at = row.to(tl.int64) * width
    a, b = a * c - b * s, b * c + a * s
    _store(y, at, there, a, b, rest, rotated, width, PAIRS, REST, INTERLEAVED)


@triton.jit
def _zeros(ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr):
    pairs = tl.zeros((ROWS, PAIRS), tl.float32)
    return pairs, pairs, tl.zeros((ROWS, REST), tl.float32)


@triton.jit
def _backward(
    x, middle, inner, step_outer, step_middle, step_inner,
    dy, middle_y, inner_y, step_outer_y, step_middle_y, step_inner_y,
    cos, sin, step_batch, step_token, step_batch_s, step_token_s,
    weight, dx, dweight, dbias, number, heads, length, width, rotated, eps, offset,
    CENTRES: tl.constexpr, GAIN: tl.constexpr, GAIN_GRADIENT: tl.constexpr, BIAS_GRADIENT: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Turns back, then the norm's gradient; the statistics are taken again. Sums as triton_norm's."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    only = tl.zeros((1,), tl.int64) + group * width
    if GAIN:
        wa, wb, wr = _load(weight, only, only >= 0, rotated, width, 1, PAIRS, REST, INTERLEAVED)
        wa, wb = gain_of(wa, offset, ROUNDS_FIRST), gain_of(wb, offset, ROUNDS_FIRST)
        wr = gain_of(wr, offset, ROUNDS_FIRST)
    ga, gb, gr = _zeros(ROWS, PAIRS, REST)
    sa, sb, sr = _zeros(ROWS, PAIRS, REST)
    kind: tl.constexpr = x.dtype.element_ty if ROUNDS_FIRST else tl.float32
    for tile in range(tl.program_id(0), tl.cdiv(number, ROWS), tl.num_programs(0)):
        r = tile * ROWS + tl.arange(0, ROWS)
        there = r < number
        row = tl.where(there, r, 0) * groups + group
        c, s = _angles(
            cos, sin, row, there, heads, length,
            step_batch, step_token, step_batch_s, step_token_s, rotated // 2, PAIRS,
        )  # fmt: skip
        at = place(row, middle_y, inner_y, step_outer_y, step_middle_y, step_inner_y)
        da, db, dr = _load(dy, at, there, rotated, width, ROWS, PAIRS, REST, INTERLEAVED)
        da, db, dr = da.to(tl.float32), db.to(tl.float32), dr.to(tl.float32)
        da, db = da * c + db * s, db * c - da * s
        at = place(row, middle, inner, step_outer, step_middle, step_inner)
        a, b, rest = _load(x, at, there, rotated, width, ROWS, PAIRS, REST, INTERLEAVED)
        a, b, rest, scale = _normalised(
            a.to(tl.float32), b.to(tl.float32), rest.to(tl.float32), there, rotated, width, eps,
            CENTRES, PAIRS, REST,
        )  # fmt: skip
        scale = tl.where(there, scale, 0.0)[:, None]
        a, b, rest = a * scale, b * scale, rest * scale
        if GAIN_GRADIENT:
            ga += da * a.to(kind).to(tl.float32)
            gb += db * b.to(kind).to(tl.float32)
            gr += dr * rest.to(kind).to(tl.float32)
        if BIAS_GRADIENT:
            sa, sb, sr = sa + da, sb + db, sr + dr
        if GAIN:
            da, db, dr = da * wa, db * wb, dr * wr
        along = (tl.sum(da * a, 1) + tl.sum(db * b, 1) + tl.sum(dr * rest, 1))[:, None] / width
        if CENTRES:
            level = (tl.sum(da, 1) + tl.sum(db, 1) + tl.sum(dr, 1))[:, None] / width
            da, db, dr = da - level, db - level, dr - level
        da, db, dr = (da - a * along) * scale, (db - b * along) * scale, (dr - rest * along) * scale
        at = row.to(tl.int64) * width
        _store(dx, at, there, da, db, dr, rotated, width, PAIRS, REST, INTERLEAVED)
    line = tl.zeros((1,), tl.int64) + (group * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width
    _sum_up(dweight, line, ga, gb, gr, rotated, width, GAIN_GRADIENT, PAIRS, REST, INTERLEAVED)
    _sum_up(dbias, line, sa, sb, sr, rotated, width, BIAS_GRADIENT, PAIRS, REST, INTERLEAVED)


@triton.jit
def _sum_up(
    out, line, a, b, rest, rotated, width,
    WANTED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The sum over a program's rows, into its line."""
    if WANTED:
        a, b, rest = tl.sum(a, 0)[None, :], tl.sum(b, 0)[None, :], tl.sum(rest, 0)[None, :]
        _store(out, line, line >= 0, a, b, rest, rotated, width, PAIRS, REST, INTERLEAVED)


@dataclass(frozen=True)
class _Shape:
    """x (B, S, H, E) and how it is cut into tiles."""

    heads: int
    length: int
    width: int
    rotated: int

    @property
    def blocks(self) -> dict[str, int]:
        """Sizes of the parts of a tile."""
        pairs, rest = block(self.rotated // 2), block(max(self.width - self.rotated, 1))
        return {"ROWS": tile_rows(2 * pairs + rest, 2048), "PAIRS": pairs, "REST": rest}

    @property
    def num_warps(self) -> int:
        sizes = self.blocks
        return warps(sizes["ROWS"] * (2 * sizes["PAIRS"] + sizes["REST"]))


def _shape(x: Tensor, cos: Tensor, sin: Tensor) -> _Shape:
    assert cos.shape == sin.shape == (*x.shape[:2], cos.shape[-1]), (x.shape, cos.shape, sin.shape)
    assert 0 < 2 * cos.shape[-1] <= x.shape[-1], (x.shape, cos.shape)
    return _Shape(x.shape[2], x.shape[1], x.shape[3], 2 * cos.shape[-1])


def _angle_places(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
    """Both with neighbouring columns, and their strides over (B, S)."""
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    return cos, sin, (cos.stride(0), cos.stride(1), sin.stride(0), sin.stride(1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    shape, number = _shape(x, cos, sin), count(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if number:
        read, places = rows(x)
        cos, sin, steps = _angle_places(cos, sin)
        sizes = shape.blocks
        _rotate[(triton.cdiv(number, sizes["ROWS"]),)](
            read, *places, cos, sin, *steps,
            y, number, shape.heads, shape.length, shape.width, shape.rotated,
            BACK=back, INTERLEAVED=interleaved, **sizes, num_warps=shape.num_warps,
        )  # fmt: skip
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        cos, sin = ctx.saved_tensors
        return _turned(dy, cos, sin, ctx.interleaved, back=True), None, None, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        settings: Form,
        interleaved: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, cos, sin)
        ctx.settings, ctx.interleaved = settings, interleaved
        shape, groups = _shape(x, cos, sin), groups_of(x, weight, bias)
        y, number = torch.empty(x.shape, dtype=x.dtype, device=x.device), count(x) // groups
        if number:
            read, places = rows(x)
            cos, sin, steps = _angle_places(cos, sin)
            sizes = shape.blocks
            _forward[(triton.cdiv(number, sizes["ROWS"]), groups)](
                read, *places, cos, sin, *steps, dense(weight, read), dense(bias, read), y,
                number, shape.heads, shape.length, shape.width, shape.rotated, settings.eps, settings.offset,
                CENTRES=settings.centres, GAIN=weight is not None, BIAS=bias is not None,
                ROUNDS_FIRST=settings.rounds_first, INTERLEAVED=interleaved, **sizes,
                num_warps=shape.num_warps,
            )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, bias, cos, sin = ctx.saved_tensors
        settings: Form = ctx.settings
        wanted = ctx.needs_input_grad[1:3]
        shape, groups = _shape(x, cos, sin), groups_of(x, weight, bias)
        sizes, number = shape.blocks, count(x) // groups
        parts = programs(x, shape.num_warps, triton.cdiv(number, sizes["ROWS"]))
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dweight, dbias = (partial(x, groups, parts, each) for each in wanted)
        if number:
            read, places = rows(x)
            given, given_places = rows(dy)
            cos, sin, steps = _angle_places(cos, sin)
            _backward[(parts, groups)](
                read, *places, given, *given_places, cos, sin, *steps,
                dense(weight, read), dx, dweight, dbias,
                number, shape.heads, shape.length, shape.width, shape.rotated, settings.eps, settings.offset,
                CENTRES=settings.centres, GAIN=weight is not None,
                GAIN_GRADIENT=wanted[0], BIAS_GRADIENT=wanted[1], ROUNDS_FIRST=settings.rounds_first,
                INTERLEAVED=ctx.interleaved, **sizes, num_warps=shape.num_warps,
            )  # fmt: skip
        sums = summed(dweight, weight, wanted[0]), summed(dbias, bias, wanted[1])
        return dx, *sums, None, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """As `reference.rotate`; no gradient for cos and sin."""
    return _Rotate.apply(x, cos, sin, interleaved)  # type: ignore[return-value]


def norm_rotate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    kind: str,
    eps: float,
    offset: float,
    rounds_first: bool,
    interleaved: bool,
) -> Tensor:
    """As `reference.norm_rotate`, in one pass; saves x, no statistics: a row is in registers anyway."""
    settings = form(kind, eps, offset, rounds_first)
    return _NormRotate.apply(x, weight, bias, cos, sin, settings, interleaved)  # type: ignore[return-value]
