"""Which layers stand on which pipeline stage: slice arithmetic, no tensors."""

from collections.abc import Sequence


def stage_bounds(
    costs: Sequence[float], is_block: Sequence[bool], *, pp: int, stage_layers: Sequence[int] | None = None
) -> list[int]:
    """Bounds b of the stages: stage s holds the layers [b[s], b[s + 1]).

    costs: one per layer; is_block: the layers that count as blocks, which stand together. Each stage gets at
    least one block; what comes before the first block goes with it, what comes after the last one with that.
    stage_layers gives the blocks of each stage; None minimises the largest cost of a stage, then the sum of
    squares. Raises ValueError when there are fewer blocks than stages or stage_layers does not add up.
    """
    blocks = [i for i, block in enumerate(is_block) if block]
    if len(blocks) < pp:
        raise ValueError(
            f"model.n_layers ({len(blocks)}) must be at least parallel.pp ({pp}): each stage needs a block"
        )
    if stage_layers is not None:
        if sum(stage_layers) != len(blocks):
            raise ValueError(
                f"parallel.stage_layers {list(stage_layers)} adds up to {sum(stage_layers)} blocks but "
                f"model.n_layers is {len(blocks)}"
            )
        counts = list(stage_layers)
    else:
        cost = [costs[i] for i in blocks]
        cost[0] += sum(costs[: blocks[0]])
        cost[-1] += sum(costs[blocks[-1] + 1 :])
        counts = _balanced(cost, pp)
    bounds = [0]
    for count in counts[:-1]:
        bounds.append((bounds[-1] or blocks[0]) + count)
    return [*bounds, len(costs)]


def _balanced(cost: Sequence[float], parts: int) -> list[int]:
    """Sizes of `parts` contiguous non-empty parts with the smallest (largest sum, sum of squared sums)."""
    total = [0.0]
    for c in cost:
        total.append(total[-1] + c)
    n = len(cost)
    best: list[tuple[float, float, list[int]] | None] = [None] * (n + 1)
    best[0] = (0.0, 0.0, [])
    for part in range(1, parts + 1):
        new: list[tuple[float, float, list[int]] | None] = [None] * (n + 1)
        for stop in range(part, n + 1):
            options = []
            for start in range(part - 1, stop):
                before = best[start]
                if before is None:
                    continue
                size = total[stop] - total[start]
                options.append((max(before[0], size), before[1] + size * size, [*before[2], stop - start]))
            new[stop] = min(options, default=None)
        best = new
    found = best[n]
    assert found is not None
    return found[2]
