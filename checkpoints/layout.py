"""Slice arithmetic between layouts: no tensors, no files.

A logical tensor is stored in stretches. A stretch is a run of elements of a box, counted row-major inside the
box; a ZeRO partition may begin and end anywhere in it. Every stretch falls apart into a few dense boxes (part
of a row, whole rows, part of a row, at each depth), so whatever one layout stored and another wants meets in
boxes: one strided copy each, never a list of elements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

Index = tuple[int, ...]


@dataclass(frozen=True)
class Stretch:
    """Elements [start, start + count), row-major, of the box (offset, extent) of a tensor of `shape`."""

    shape: Index
    offset: Index
    extent: Index
    start: int
    count: int

    def fault(self) -> str | None:
        """What is impossible about these numbers, or None."""
        if not len(self.shape) == len(self.offset) == len(self.extent):
            return f"shape {self.shape}, offset {self.offset} and extent {self.extent} differ in length"
        for size, offset, extent in zip(self.shape, self.offset, self.extent, strict=True):
            if offset < 0 or extent < 0 or offset + extent > size:
                return f"the box at {self.offset} of {self.extent} is not inside the shape {self.shape}"
        if self.start < 0 or self.count < 0 or self.start + self.count > prod(self.extent):
            return f"elements {self.start} to {self.start + self.count} are not inside a box of {self.extent}"
        return None


@dataclass(frozen=True)
class Dense:
    """A box of a logical tensor that is stored row-major without gaps from `position` in its stretch."""

    offset: Index
    extent: Index
    position: int


@dataclass(frozen=True)
class Region:
    """The box (offset, size) inside an array of `extent` that begins at `position` in its stretch."""

    position: int
    extent: Index
    offset: Index
    size: Index

    @property
    def span(self) -> tuple[int, int]:
        """[first, stop) elements of the stretch that hold the region, gaps between its rows included."""
        first = last = 0
        for extent, offset, size in zip(self.extent, self.offset, self.size, strict=True):
            first = first * extent + offset
            last = last * extent + offset + size - 1
        return self.position + first, self.position + last + 1


@dataclass(frozen=True)
class Move:
    """Copy a box from one stretch to another; both regions have the same size."""

    have: int  # index in the list of stretches that exist
    want: int  # index in the list of stretches that are needed
    source: Region
    target: Region


def _boxes(extent: Index, first: int, stop: int) -> Iterator[tuple[Index, Index]]:
    """(offset, extent) of the dense boxes that elements [first, stop) of an array consist of, in order."""
    if not extent:
        yield (), ()
        return
    row = prod(extent[1:])
    first_row, head = divmod(first, row)
    stop_row, tail = divmod(stop, row)
    if first_row == stop_row:
        yield from _inside(first_row, extent, head, tail)
        return
    if head:
        yield from _inside(first_row, extent, head, row)
        first_row += 1
    if stop_row > first_row:
        yield (first_row, *(0 for _ in extent[1:])), (stop_row - first_row, *extent[1:])
    if tail:
        yield from _inside(stop_row, extent, 0, tail)


def _inside(row: int, extent: Index, first: int, stop: int) -> Iterator[tuple[Index, Index]]:
    for offset, size in _boxes(extent[1:], first, stop):
        yield (row, *offset), (1, *size)


def dense_boxes(stretch: Stretch) -> list[Dense]:
    """The stretch as dense boxes in coordinates of the logical tensor; at most 2 dimensions - 1 of them."""
    found, position = [], 0
    if stretch.count:
        for offset, extent in _boxes(stretch.extent, stretch.start, stretch.start + stretch.count):
            place = tuple(a + b for a, b in zip(stretch.offset, offset, strict=True))
            found.append(Dense(place, extent, position))
            position += prod(extent)
    return found


def overlap(a: Dense, b: Dense) -> tuple[Index, Index] | None:
    """(offset, extent) of what two boxes of one tensor share, or None."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    stop = tuple(min(p + e, q + f) for p, e, q, f in zip(a.offset, a.extent, b.offset, b.extent, strict=True))
    extent = tuple(s - o for o, s in zip(offset, stop, strict=True))
    return (offset, extent) if all(e > 0 for e in extent) else None


def moves(have: Sequence[Stretch], want: Sequence[Stretch]) -> list[Move]:
    """The copies that fill `want` from `have`, stretches of one logical tensor both.

    `have` must not overlap itself (see `cover`). What it lacks is simply not filled: see `filled`.
    """
    sources = [(i, box) for i, stretch in enumerate(have) for box in dense_boxes(stretch)]
    found = []
    for w, stretch in enumerate(want):
        for target in dense_boxes(stretch):
            for h, source in sources:
                shared = overlap(source, target)
                if shared:
                    found.append(Move(h, w, _region(source, *shared), _region(target, *shared)))
    return found


def _region(box: Dense, offset: Index, size: Index) -> Region:
    inner = tuple(a - b for a, b in zip(offset, box.offset, strict=True))
    return Region(box.position, box.extent, inner, size)


def filled(found: Sequence[Move], want: Sequence[Stretch]) -> list[int]:
    """Elements of each wanted stretch that the moves fill."""
    total = [0] * len(want)
    for move in found:
        total[move.want] += prod(move.target.size)
    return total


def chunks(region: Region, limit: int) -> Iterator[Region]:
    """The region cut along its first dimensions into parts whose spans are at most `limit` elements."""
    first, stop = region.span
    axis = next((i for i, size in enumerate(region.size) if size > 1), None)
    if stop - first <= limit or axis is None:
        yield region
        return
    rows = max(1, limit // prod(region.extent[axis + 1 :]))
    for begin in range(0, region.size[axis], rows):
        count = min(rows, region.size[axis] - begin)
        offset, size = list(region.offset), list(region.size)
        offset[axis] += begin
        size[axis] = count
        yield from chunks(Region(region.position, region.extent, tuple(offset), tuple(size)), limit)


def cover(stretches: Sequence[Stretch]) -> str | None:
    """None when the stretches hold each element of their tensor exactly once, else what is wrong."""
    if not stretches:
        return "nothing holds it"
    shape = stretches[0].shape
    for stretch in stretches:
        if stretch.shape != shape:
            return f"two shapes, {shape} and {stretch.shape}"
        fault = stretch.fault()
        if fault:
            return fault
    held, size = sum(stretch.count for stretch in stretches), prod(shape)
    if held != size:
        return f"{held} of its {size} elements are held"
    return _overlapping([box for stretch in stretches for box in dense_boxes(stretch)])


def _overlapping(boxes: list[Dense]) -> str | None:
    """Sweep along the first dimension: only boxes that are open together are compared."""
    open_boxes: list[Dense] = []
    for box in sorted(boxes, key=lambda b: b.offset):
        if box.offset:
            open_boxes = [b for b in open_boxes if b.offset[0] + b.extent[0] > box.offset[0]]
        for other in open_boxes:
            shared = overlap(box, other)
            if shared:
                return f"the box at {shared[0]} of {shared[1]} is held twice"
        open_boxes.append(box)
    return None
