"""How rows reach a Triton kernel: the places of strided rows, the size of a tile, the number of warps.

A kernel sees a tensor (..., E) as rows of E neighbours. Up to three leading dimensions of any stride are
walked in place (a slice of a fused product, a transposed head dimension); anything else is copied first.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

WIDEST = 65536  # elements that a program holds in registers
_THREADS = 1024  # of the largest program, on NVIDIA and AMD alike
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Places = tuple[int, int, int, int, int]


@triton.jit
def place(row, middle, inner, step_outer, step_middle, step_inner):
    """Offset of a row: its number is (outer * middle + i) * inner + j. Sizes fit 32 bits, offsets need 64."""
    outer = row // (middle * inner)
    i = row // inner % middle
    j = row % inner
    return outer.to(tl.int64) * step_outer + i.to(tl.int64) * step_middle + j.to(tl.int64) * step_inner


def rows(x: Tensor) -> tuple[Tensor, Places]:
    """x, or a copy of it, and the last five arguments of `place`."""
    assert x.dtype in _FLOATS, f"the Triton kernels take fp32, bf16 and fp16, not {x.dtype}"
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    leading = _merged(x)
    if len(leading) > 3:
        x = x.contiguous()
        leading = _merged(x)
    (_, outer), (middle, step), (inner, last) = [(1, 0)] * (3 - len(leading)) + leading
    return x, (middle, inner, outer, step, last)


def _merged(x: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions before the last, neighbours made one where they can be."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def count(x: Tensor) -> int:
    """Rows of x (..., E)."""
    number = x.numel() // x.shape[-1] if x.shape[-1] else 0
    assert number < 2**31 - WIDEST, f"{number} rows are more than 32 bits count"
    return number


def block(width: int) -> int:
    """The power of two that holds a row."""
    if width > WIDEST:
        raise ValueError(
            f"a Triton kernel holds a row in registers, {WIDEST} elements at most; {width} are too many: "
            "use the definition in plain torch for this operation"
        )
    return triton.next_power_of_2(width)


def tile_rows(columns: int, elements: int) -> int:
    """Rows of a tile of at most so many elements, one at least: a power of two."""
    return 1 << max(elements // columns, 1).bit_length() - 1


def warps(elements: int) -> int:
    """Warps for a tile, a power of two: 16 elements a thread until the program is as large as it may be."""
    lanes = 64 if torch.version.hip else 32
    wanted = max(1, min(elements // (16 * lanes), _THREADS // lanes))
    return 1 << wanted.bit_length() - 1


def programs(x: Tensor, num_warps: int, tiles: int) -> int:
    """Programs that share the tiles where each keeps a partial sum; the same on the same device."""
    if not x.is_cuda:
        return min(tiles, 4)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    return min(tiles, processors * max(1, 32 // num_warps))
