"""Slice arithmetic against numbering every element: the definition, for any boxes and stretches."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.layout import Stretch, chunks, cover, dense_boxes, filled, moves
from checkpoints.load import view


def numbers(stretch: Stretch) -> list[int]:
    """Flat numbers of a stretch's elements in the logical tensor, in order: by indexing."""
    full = torch.arange(prod(stretch.shape)).reshape(stretch.shape)
    box = full[tuple(slice(o, o + e) for o, e in zip(stretch.offset, stretch.extent, strict=True))]
    return box.reshape(-1)[stretch.start : stretch.start + stretch.count].tolist()


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Stretch]:
    """A tensor cut along one axis into boxes, and each box into flat stretches, anywhere."""
    if shape:
        axis = draw(st.integers(0, len(shape) - 1))
        cuts = sorted({0, shape[axis], *draw(st.lists(st.integers(0, shape[axis]), max_size=3))})
        boxes = []
        for low, high in pairwise(cuts):
            offset, extent = [0] * len(shape), list(shape)
            offset[axis], extent[axis] = low, high - low
            boxes.append((tuple(offset), tuple(extent)))
    else:
        boxes = [((), ())]
    found = []
    for offset, extent in boxes:
        size = prod(extent)
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        found += [Stretch(shape, offset, extent, a, b - a) for a, b in pairwise(cuts)]
    return draw(st.permutations(found))


SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)
TWO = SHAPES.flatmap(lambda shape: st.tuples(partitions(shape), partitions(shape)))


@given(SHAPES.flatmap(partitions))
@settings(max_examples=150, deadline=None)
def test_dense_boxes_are_the_stretch_in_order(stretches: list[Stretch]) -> None:
    for stretch in stretches:
        boxes = dense_boxes(stretch)
        assert len(boxes) <= max(1, 2 * len(stretch.shape) - 1)
        found = []
        for box in boxes:
            assert box.position == len(found)
            found += numbers(Stretch(stretch.shape, box.offset, box.extent, 0, prod(box.extent)))
        assert found == numbers(stretch)


@given(TWO, st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_moves_carry_every_element_to_its_place(
    both: tuple[list[Stretch], list[Stretch]], limit: int
) -> None:
    have, want = both
    stored = [torch.tensor(numbers(stretch)) for stretch in have]
    targets = [torch.full((stretch.count,), -1) for stretch in want]
    plan = moves(have, want)
    for move in plan:
        target = view(targets[move.want], move.target)
        assert bool((target == -1).all()), "written twice"
        target.copy_(view(stored[move.have], move.source))
        # in parts: each within its limit or a single element wide, together the whole
        parts = list(chunks(move.source, limit))
        seen = [n for part in parts for n in view(stored[move.have], part).reshape(-1).tolist()]
        assert sorted(seen) == sorted(view(stored[move.have], move.source).reshape(-1).tolist())
        for part in parts:
            first, stop = part.span
            assert stop - first <= limit
            inside = set(stored[move.have][first:stop].tolist())
            assert set(view(stored[move.have], part).reshape(-1).tolist()) <= inside
    assert filled(plan, want) == [stretch.count for stretch in want]
    assert [target.tolist() for target in targets] == [numbers(stretch) for stretch in want]


@given(SHAPES.flatmap(partitions), st.data())
@settings(max_examples=150, deadline=None)
def test_cover(stretches: list[Stretch], data: st.DataObject) -> None:
    assert cover(stretches) is None
    index = data.draw(st.integers(0, len(stretches) - 1))
    rest = stretches[:index] + stretches[index + 1 :]
    gone = stretches[index]
    assert cover(rest) is not None
    if gone.count < prod(gone.shape):
        # the right number of elements, but one stretch is in the wrong place
        for start in range(prod(gone.shape) - gone.count + 1):
            moved = Stretch(gone.shape, (0,) * len(gone.shape), gone.shape, start, gone.count)
            same = sorted(numbers(moved)) == sorted(numbers(gone))
            assert (cover([*rest, moved]) is None) == same


def test_faults() -> None:
    assert "differ in length" in str(Stretch((2, 2), (0,), (2, 2), 0, 4).fault())
    assert "not inside the shape" in str(Stretch((2, 2), (1, 0), (2, 2), 0, 4).fault())
    assert "not inside the shape" in str(Stretch((2,), (-1,), (2,), 0, 2).fault())
    assert "not inside a box" in str(Stretch((2, 2), (0, 0), (2, 2), 3, 2).fault())
    assert "two shapes" in str(cover([Stretch((2,), (0,), (1,), 0, 1), Stretch((3,), (1,), (1,), 0, 1)]))
    assert cover([]) == "nothing holds it"


def test_a_column_split_needs_one_move_not_one_a_row() -> None:
    have = [Stretch((4096, 64), (0, 32 * i), (4096, 32), 0, 4096 * 32) for i in range(2)]
    want = [Stretch((4096, 64), (2048 * i, 0), (2048, 64), 0, 2048 * 64) for i in range(2)]
    assert len(moves(have, want)) == 4
