"""How likely a model finds given continuations of given tokens. B rows, S tokens, V vocabulary."""

from collections.abc import Iterator, Sequence

import torch

from megamodel.model import Transformer
from parallel.collectives import gather_last

Pair = tuple[Sequence[int], Sequence[int]]  # what stands before, what follows


@torch.no_grad()
def likelihoods(
    model: Transformer, pairs: Sequence[Pair], *, context: int, rows: int = 8
) -> list[tuple[float, bool]]:
    """(natural logarithm of the probability, whether greedy writing gives the same) of each continuation.

    What stands before is cut on its left to `context` tokens of input; ValueError when it is empty or a
    continuation alone is longer than that. Several rows are read together.
    """
    cut = [_cut(before, after, context) for before, after in pairs]
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    device = next(model.parameters()).device
    for chosen in _together(model, [len(ids) - 1 for ids, _ in cut], rows):
        longest = max(len(cut[i][0]) for i in chosen) - 1
        tokens = torch.zeros(len(chosen), longest, dtype=torch.int64)
        for row, i in enumerate(chosen):  # padding stands on the right, where no token sees it
            tokens[row, : len(cut[i][0]) - 1] = torch.tensor(cut[i][0][:-1])
        logits = gather_last(model(tokens.to(device)), model.parallel.group)  # (B, S, V)
        for row, i in enumerate(chosen):
            ids, count = cut[i]
            wanted = torch.tensor(ids[len(ids) - count :], device=device)
            own = logits[row, len(ids) - 1 - count : len(ids) - 1].float()
            odds = own.log_softmax(-1).gather(-1, wanted[:, None])
            found[i] = (float(odds.double().sum()), bool((own.argmax(-1) == wanted).all()))
    return found


def _cut(before: Sequence[int], after: Sequence[int], context: int) -> tuple[list[int], int]:
    """(all tokens, at most context + 1 of them, how many at the end are asked for)."""
    if not before or len(after) > context:
        raise ValueError(
            f"a continuation of {len(after)} tokens after {len(before)} cannot be scored with a context of "
            f"{context}; at least one token must stand before it and all must fit"
        )
    return [*before, *after][-context - 1 :], len(after)


def _together(model: Transformer, lengths: Sequence[int], rows: int) -> Iterator[list[int]]:
    """Batches of at most `rows` indices: of like length, and whose positions are turned alike."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batch: list[int] = []
    for i in order:
        if lengths[i] == 0:
            continue
        if batch and (len(batch) == rows or model.regime(lengths[i]) != model.regime(lengths[batch[0]])):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
