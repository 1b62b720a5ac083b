"""What a step is fed, against windows cut by hand."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamodel.data.batch import IGNORE, Batch, Cursor
from megamodel.data.held_out import HeldOut
from megamodel.data.loader import Loader, next_samples
from megamodel.data.prefetch import Prefetcher
from megamodel.data.tokens import Corpus, Source
from tests.data.corpora import corpus, random_documents

S = 16
VOCABULARY = 50


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    return random_documents(0, 300, VOCABULARY)


@pytest.fixture(scope="module")
def made(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus(tmp_path_factory.mktemp("corpus"), documents)


def loader(made: Corpus, *, isolate: bool = True, seed: int = 5) -> Loader:
    return Loader(
        {made.name: made}, sequence_length=S, seed=seed, isolate_documents=isolate, vocab_size=VOCABULARY
    )


def rows(documents: list[list[int]], isolate: bool) -> dict[tuple[int, ...], tuple[list[int], list[int]]]:
    """tokens -> (targets, positions) of every full window, token by token."""
    flat = [(token, place) for document in documents for place, token in enumerate(document)]
    found = {}
    for start in range(0, len(flat) - S, S):
        targets, positions, position = [], [], 0
        for here, after in zip(flat[start : start + S], flat[start + 1 : start + S + 1], strict=True):
            position = 0 if isolate and here[1] == 0 else position
            positions.append(position)
            targets.append(IGNORE if isolate and after[1] == 0 else after[0])
            position += 1
        found[tuple(token for token, _ in flat[start : start + S])] = (targets, positions)
    return found


@pytest.mark.parametrize("isolate", [True, False])
def test_an_epoch_holds_each_window_once_as_cut_by_hand(
    made: Corpus, documents: list[list[int]], isolate: bool
) -> None:
    expected = rows(documents, isolate)
    feed = loader(made, isolate=isolate)
    count = feed.epoch_samples["made"]
    assert count == len(expected) == (sum(map(len, documents)) - 1) // S
    step = feed.at(Cursor(), micro_batch=count, accumulation=2, data_rank=0, data_size=1)
    for epoch in step.batches:
        seen = {
            tuple(tokens.tolist()): (targets.tolist(), positions.tolist())
            for tokens, targets, positions in zip(epoch.tokens, epoch.targets, epoch.positions, strict=True)
        }
        assert seen == expected
    first, second = step.batches
    assert (first.tokens != second.tokens).any(dim=1).float().mean() > 0.9
    assert [x.dtype for x in (first.tokens, first.targets, first.positions, first.samples)] == [
        torch.int64
    ] * 4
    if not isolate:
        assert torch.equal(first.positions, torch.arange(S).expand(count, S))


def test_no_target_after_an_end_of_document(made: Corpus) -> None:
    part = loader(made).at(Cursor(), micro_batch=64, accumulation=1, data_rank=0, data_size=1).batches[0]
    assert (part.tokens == 0).any()
    assert (part.targets[part.tokens == 0] == IGNORE).all()
    assert (part.targets[part.tokens != 0] != IGNORE).all()
    assert (part.positions[:, 1:][part.tokens[:, :-1] == 0] == 0).all()


@pytest.mark.parametrize(("micro", "accumulation", "size"), [(1, 12, 1), (2, 3, 2), (3, 1, 4), (12, 1, 1)])
def test_every_layout_feeds_the_same_samples_in_the_same_order(
    made: Corpus, micro: int, accumulation: int, size: int
) -> None:
    feed, cursor = loader(made), Cursor(sample=40, skipped=((3, 41), (43, 45), (44, 47), (60, 70)))
    expected = [41, 42, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56]
    single = {n: feed.tokens(n) for n in expected}
    seen: dict[int, tuple[int, list[int]]] = {}
    for rank in range(size):
        step = feed.at(cursor, micro_batch=micro, accumulation=accumulation, data_rank=rank, data_size=size)
        assert step.samples == tuple(expected)
        assert step.next_sample == 57
        assert len(step.batches) == accumulation
        for m, part in enumerate(step.batches):
            for row, (sample, tokens) in enumerate(zip(part.samples.tolist(), part.tokens, strict=True)):
                k = expected.index(sample)
                assert (m, rank, row) == (k // (micro * size), (k // micro) % size, k % micro)
                seen[sample] = (k, tokens.tolist())
    assert {n: tokens for n, (_, tokens) in seen.items()} == single


@given(
    start=st.integers(0, 60),
    count=st.integers(1, 40),
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6),
)
def test_skipped_ranges_are_never_fed(start: int, count: int, ranges: list[tuple[int, int]]) -> None:
    skipped = {n for left, right in ranges for n in range(left, right)}
    expected = [n for n in range(start, 200) if n not in skipped][:count]
    assert next_samples(Cursor(sample=start, skipped=tuple(ranges)), count).tolist() == expected


def test_the_order_depends_on_the_seed_and_not_on_the_history(made: Corpus) -> None:
    ask = {"micro_batch": 8, "accumulation": 1, "data_rank": 0, "data_size": 1}
    feed = loader(made)
    late = feed.at(Cursor(attempt=9, step=4, sample=123, tokens=77), **ask).batches[0]
    fresh = loader(made).at(Cursor(sample=123), **ask).batches[0]
    assert torch.equal(late.tokens, fresh.tokens) and torch.equal(late.samples, fresh.samples)
    other = loader(made, seed=6).at(Cursor(sample=123), **ask).batches[0]
    assert not torch.equal(other.tokens, fresh.tokens)


def test_locate_names_the_documents_of_a_sample(made: Corpus, documents: list[list[int]]) -> None:
    feed = loader(made)
    owner = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    flat = [token for document in documents for token in document]
    starts = {tuple(flat[k : k + S]): k for k in range(0, len(flat) - S, S)}
    assert len(starts) == feed.epoch_samples["made"]
    for sample in range(30):
        start = starts[tuple(feed.tokens(sample))]
        numbers = dict.fromkeys(owner[start : start + S + 1].tolist())
        assert feed.locate(sample) == [Source("made.txt", k + 1, 10 * k, 10 * k + 7) for k in numbers]


def test_one_long_document_does_not_fill_whole_batches(tmp_path: Path) -> None:
    """Half of all tokens are one document; of 16 rows in a batch about half are its, never all or none."""
    long = [[1] * (S * 400)]
    short = [[2] * S for _ in range(400)]
    feed = Loader(
        {"x": corpus(tmp_path, long + short, name="x")},
        sequence_length=S,
        seed=0,
        isolate_documents=True,
        vocab_size=3,
    )
    step = feed.at(Cursor(), micro_batch=16, accumulation=40, data_rank=0, data_size=1)
    shares = [int((part.tokens[:, 0] == 1).sum()) for part in step.batches]
    assert min(shares) >= 1 and max(shares) <= 15


def test_a_mixture_draws_each_source_by_its_weight_and_each_window_once_an_epoch(tmp_path: Path) -> None:
    small = corpus(tmp_path / "a", [[1] * (S * 10 + 1)], name="a")
    large = corpus(tmp_path / "b", [[k + 2 for k in range(30) for _ in range(S)] + [2]], name="b")
    feed = Loader(
        {"a": small, "b": large},
        sequence_length=S,
        seed=0,
        isolate_documents=False,
        mixture={"a": 1, "b": 3},
        vocab_size=VOCABULARY,
    )
    assert feed.epoch_samples == {"a": 10, "b": 30}
    step = feed.at(Cursor(), micro_batch=40, accumulation=1, data_rank=0, data_size=1)
    seen = Counter(step.batches[0].tokens[:, 0].tolist())
    assert seen == Counter({1: 10, **{k + 2: 1 for k in range(30)}})
    assert [feed.source_of(n) for n in range(40)] == [
        "a" if row[0] == 1 else "b" for row in step.batches[0].tokens.tolist()
    ]
    with pytest.raises(ValueError, match=r"\['a', 'c'\]"):
        Loader(
            {"a": small, "b": large},
            sequence_length=S,
            seed=0,
            isolate_documents=False,
            mixture={"a": 1, "c": 3},
            vocab_size=VOCABULARY,
        )


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    bad = corpus(tmp_path, [[1] * S + [7] * S + [1] * S])
    feed = Loader({"made": bad}, sequence_length=S, seed=0, isolate_documents=True, vocab_size=7)
    with pytest.raises(ValueError, match=rf"train\.tokens\.npy: token 7 at position {S} is outside .* of 7"):
        feed.at(Cursor(), micro_batch=2, accumulation=1, data_rank=0, data_size=1)


def test_too_little_text_for_one_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"16 training tokens, fewer than train.sequence_length \+ 1 \({S + 1}\)"
    ):
        loader(corpus(tmp_path, [[1] * S]))


def same(left: Batch, right: Batch) -> bool:
    names = ("tokens", "targets", "positions", "samples")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


def test_reading_ahead_changes_nothing(made: Corpus) -> None:
    feed = loader(made)
    ahead = Prefetcher(feed, data_rank=1, data_size=2)
    cursors = [Cursor(sample=n) for n in (0, 8, 16, 4, 12, 12)] + [Cursor(sample=20, skipped=((20, 25),))]
    for cursor in cursors:
        got = ahead.at(cursor, micro_batch=2, accumulation=2)
        want = feed.at(cursor, micro_batch=2, accumulation=2, data_rank=1, data_size=2)
        assert (got.samples, got.next_sample) == (want.samples, want.next_sample)
        assert all(same(a, b) for a, b in zip(got.batches, want.batches, strict=True))
    ahead.close()


@pytest.mark.parametrize("isolate", [True, False])
def test_held_out_windows_count_each_token_once_on_all_ranks_together(
    documents: list[list[int]], tmp_path: Path, isolate: bool
) -> None:
    made = corpus(tmp_path, documents[:41], side="held_out")
    held = HeldOut({"made": made}, sequence_length=S, isolate_documents=isolate, vocab_size=VOCABULARY)
    parts = [list(held.batches(3, None, rank, 2)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == -(-held.count("made") // 6)
    counted = Counter(
        int(target)
        for part in parts[0] + parts[1]
        for target in part.targets[part.targets != IGNORE].tolist()
    )
    skip = 1 if isolate else 0
    expected = [token for document in documents[:41] for token in document[skip:]]
    assert counted == Counter(expected if isolate else expected[1:])
    token, target = held.pairs()
    assert Counter(target.tolist()) == counted
    if isolate:
        assert Counter(zip(token.tolist(), target.tolist(), strict=True)) == Counter(
            pair for d in documents[:41] for pair in pairwise(d)
        )


def test_held_out_windows_come_in_one_order_and_the_limit_counts_micro_batches(made: Corpus) -> None:
    held = HeldOut({"made": made}, sequence_length=S, isolate_documents=True, vocab_size=VOCABULARY)
    wide = list(held.batches(8, 16))
    ranks = [list(held.batches(2, 16, rank, 2)) for rank in range(2)]
    assert [len(wide), len(ranks[0]), len(ranks[1])] == [2, 4, 4]
    merged = torch.cat([part.tokens for pair in zip(*ranks, strict=True) for part in pair])
    assert torch.equal(torch.cat([part.tokens for part in wide]), merged)
    assert torch.equal(torch.cat([part.samples for part in wide]), torch.arange(16))
    first = [tuple(row) for row in wide[0].tokens.tolist()]
    assert first != [tuple(made.tokens[k * S : (k + 1) * S].tolist()) for k in range(8)]
