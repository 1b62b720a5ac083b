"""From text to token files: nothing lost, nothing twice, the same bytes for any number of workers."""

import fcntl
import filecmp
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from megamodel.data.baselines import baselines
from megamodel.data.batch import Cursor
from megamodel.data.config import Data, SourceConfig
from megamodel.data.held_out import HeldOut
from megamodel.data.loader import Loader
from megamodel.data.prepare import prepare
from megamodel.data.prepared import Prepared, open_prepared
from megamodel.data.tokens import Corpus
from megamodel.tokenizer import EOS, TokenizerConfig
from tests.data.test_records import LINES

SMALL = TokenizerConfig(vocab_size=300)


def story(number: int) -> str:
    return f"Story {number}: {'once upon a time ' * (number % 7 + 1)}the end of number {number * 31}.\n"


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def own(*paths: Path, **settings: object) -> Data:
    return Data(kind="files", paths=[str(p) for p in paths], **settings)  # type: ignore[arg-type]


def texts(prepared: Prepared, corpus: Corpus) -> list[str]:
    """Each document decoded, its one EOS taken off."""
    found = []
    for start, stop in zip(corpus.starts[:-1].tolist(), corpus.starts[1:].tolist(), strict=True):
        ids = corpus.tokens[start:stop].tolist()
        assert ids.count(prepared.tokenizer.eos_id) == 1 and ids[-1] == prepared.tokenizer.eos_id
        found.append(prepared.tokenizer.decode(ids[:-1]))
    return found


def files_below(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp("stories")
    path = jsonl(root / "a.jsonl", [story(k) for k in range(400)] + [story(7), f"literal {EOS} inside"])
    return prepare(own(path, held_out_fraction=0.1), SMALL, cache=root / "cache", workers=1)


def test_every_text_is_on_one_side_and_comes_back(prepared: Prepared) -> None:
    train, held_out = (texts(prepared, side["files"]) for side in (prepared.train, prepared.held_out))
    expected = Counter([story(k) for k in range(400)] + [story(7), f"literal {EOS} inside"])
    assert Counter(train + held_out) == expected
    assert not set(train) & set(held_out)
    assert 15 < len(held_out) < 75  # a tenth of 402
    assert (prepared.report.lines, prepared.report.written) == (402, 402)


def test_provenance_leads_back_to_the_line(prepared: Prepared) -> None:
    loader = Loader(
        prepared.train,
        sequence_length=32,
        seed=0,
        isolate_documents=True,
        vocab_size=prepared.tokenizer.vocab_size,
    )
    for sample in range(40):
        said = ""
        for source in loader.locate(sample):
            content = Path(source.path).read_bytes()
            line = content[source.byte_start : source.byte_stop]
            assert content.split(b"\n")[source.record - 1] == line
            said += json.loads(line)["text"] + EOS
        assert prepared.tokenizer.decode(loader.tokens(sample)) in said


def test_any_number_of_workers_gives_the_same_bytes(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamodel.data.blocks.BLOCK_BYTES", 1 << 10)  # many blocks, so that workers race
    path = jsonl(tmp_path / "a.jsonl", [story(k) for k in range(400)])
    with path.open("ab") as file:
        file.write(b"\n".join(line for line, _, _ in LINES[1:]))
    made = [
        prepare(own(path), SMALL, cache=tmp_path / str(workers), workers=workers).directory
        for workers in (1, 7)
    ]
    names = files_below(made[0])
    assert names == files_below(made[1]) and len(names) == 9
    assert filecmp.cmpfiles(*made, names, shallow=False)[0] == names
    assert made[0].name == made[1].name


def test_written_skipped_and_rejected_are_all_lines(tmp_path: Path) -> None:
    lines = LINES[1:]  # a byte order mark is one only at the start of a file
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(line for line, _, _ in lines))
    made = prepare(own(path), SMALL, cache=tmp_path, workers=2)
    report = made.report
    assert report.lines == len(lines) == report.written + report.skipped + report.rejected
    assert report.written == sum(reason is None for _, _, reason in lines)
    assert report.skipped == sum(reason in ("blank line", "empty text") for _, _, reason in lines)
    for number, (_, _, reason) in enumerate(lines, 1):
        if reason is not None and report.reasons.get(reason, 0) == 1:
            assert any(e.startswith(f"{path}:{number}: {reason}") for e in report.examples)
    left = [json.loads(line) for line in (made.directory / "left_out.jsonl").read_text().splitlines()]
    expected = [(n, reason) for n, (_, _, reason) in enumerate(lines, 1) if reason is not None]
    assert [(item["line"], item["path"]) for item in left] == [(n, str(path)) for n, _ in expected]
    assert all(item["reason"].startswith(r) for item, (_, r) in zip(left, expected, strict=True))
    assert (
        sum(item["rejected"] for item in left)
        == report.rejected
        == sum(report.reasons.values()) - report.skipped
    )
    written = Counter(texts(made, made.train["files"]) + texts(made, made.held_out["files"]))
    assert written == Counter(text for _, text, _ in lines if text is not None)


def test_a_second_call_opens_what_is_there(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamodel.data.prepare._build", None)
    data = own(Path(prepared.train["files"].files[0]), held_out_fraction=0.1)
    cache = prepared.directory.parent
    assert prepare(data, SMALL, cache=cache).directory == prepared.directory
    again = open_prepared(data, SMALL, cache=cache)
    assert again.digest == prepared.digest and again.report == prepared.report
    assert again.tokenizer.hash == prepared.tokenizer.hash
    with pytest.raises(ValueError, match="python -m launcher prepare"):
        open_prepared(data, TokenizerConfig(vocab_size=299), cache=cache)
    with pytest.raises(ValueError, match="are not prepared"):
        open_prepared(own(Path(data.paths[0]), held_out_fraction=0.2), SMALL, cache=cache)


def test_bos_only_if_asked(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [story(k) for k in range(30)])
    made = prepare(own(path), TokenizerConfig(vocab_size=300, add_bos=True), cache=tmp_path, workers=1)
    corpus, (eos, bos) = made.train["files"], (made.tokenizer.eos_id, made.tokenizer.bos_id)
    starts, ends = corpus.starts[:-1], corpus.starts[1:] - 1
    assert bos is not None
    assert np.flatnonzero(corpus.tokens == bos).tolist() == starts.tolist()
    assert np.flatnonzero(corpus.tokens == eos).tolist() == ends.tolist()


def test_literal_specials_become_tokens_when_asked(prepared: Prepared, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [f"{k} {EOS} {EOS} end" for k in range(20)])
    setting = TokenizerConfig(path=str(prepared.tokenizer_path))
    for allow, count in ((True, 3), (False, 1)):
        made = prepare(own(path, allow_special=allow), setting, cache=tmp_path, workers=1)
        corpora = [made.train["files"], made.held_out["files"]]
        assert sum(int((c.tokens == made.tokenizer.eos_id).sum()) for c in corpora) == count * 20


def test_a_tokenizer_is_trained_on_training_documents_only(tmp_path: Path) -> None:
    """The one long word of each document can be one token only if the tokenizer saw it."""
    words = [f"{'abcdefghij'[k % 10]}q{'klmnopqrst'[k // 10]}x" * 3 for k in range(100)]
    path = jsonl(tmp_path / "a.jsonl", [f"{word} " * 40 for word in words])
    made = prepare(
        own(path, held_out_fraction=0.3), TokenizerConfig(vocab_size=2000), cache=tmp_path, workers=1
    )
    held_out = {text.split()[0] for text in texts(made, made.held_out["files"])}
    pieces = {word: len(made.tokenizer.encode(f" {word}")) for word in words}
    assert held_out and all(pieces[word] > 1 for word in held_out)
    assert all(pieces[word] == 1 for word in set(words) - held_out)


@pytest.mark.parametrize(("fraction", "held_out"), [(1e-9, 1), (0.999999999, 2)])
def test_tiny_corpora_still_get_both_sides(tmp_path: Path, fraction: float, held_out: int) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", ["one", "two", "three", "two"] if fraction > 0.5 else ["one", "two", "three"]
    )
    made = prepare(own(path, held_out_fraction=fraction), SMALL, cache=tmp_path, workers=1)
    sides = [set(texts(made, side["files"])) for side in (made.train, made.held_out)]
    assert len(sides[1]) == held_out and sides[0] and not sides[0] & sides[1]
    assert sides[0] | sides[1] == {"one", "two", "three"}


def test_nothing_to_hold_out_or_to_train_on_is_said(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["same", "same"])
    with pytest.raises(ValueError, match=r"all documents are one and the same.*held_out_fraction=0"):
        prepare(own(path), SMALL, cache=tmp_path, workers=1)
    made = prepare(own(path, held_out_fraction=0), SMALL, cache=tmp_path, workers=1)
    assert (made.train["files"].document_count, made.held_out["files"].count) == (2, 0)
    held = HeldOut(made.held_out, sequence_length=4, isolate_documents=True, vocab_size=300)
    assert held.names == () and list(held.batches(2)) == []
    with pytest.raises(
        ValueError, match=r"no train document \(2 lines, 0 written, 0 skipped, 2 rejected\)"
    ) as error:
        prepare(own(path, text_key="body"), SMALL, cache=tmp_path, workers=1)
    assert f"{path}:1: no key 'body'" in str(error.value)
    assert not list(tmp_path.glob("building-*"))


def test_duplicates_across_sources_are_on_one_side(tmp_path: Path) -> None:
    shared = [story(k) for k in range(100)]
    first = jsonl(tmp_path / "a.jsonl", [*shared, *(f"a {k}" for k in range(50))])
    second = jsonl(tmp_path / "b.jsonl", [*(f"b {k}" for k in range(50)), *shared])
    mixture = {
        "a": SourceConfig(kind="files", paths=[str(first)], weight=0.25),
        "b": SourceConfig(kind="files", paths=[str(second)], weight=0.75),
    }
    data = Data(kind="mixture", mixture=mixture, held_out_fraction=0.3)
    made = prepare(data, SMALL, cache=tmp_path, workers=2)
    train, held_out = (
        {text for name in "ab" for text in texts(made, side[name])} for side in (made.train, made.held_out)
    )
    assert not train & held_out and len(train | held_out) == 200
    assert data.weights() == {"a": 0.25, "b": 0.75}
    other = Data(
        kind="mixture",
        mixture=mixture | {"b": SourceConfig(paths=[str(second)], weight=9.0)},
        held_out_fraction=0.3,
    )
    assert open_prepared(other, SMALL, cache=tmp_path).directory == made.directory


def test_ready_tokens_keep_ids_beyond_sixteen_bits(tmp_path: Path) -> None:
    documents = [[65_535 + k, 65_536 + k % 3, 131_071 - k, 9] for k in range(200)]
    np.save(tmp_path / "a.npy", np.array(documents, dtype=np.int64).reshape(-1))
    setting = TokenizerConfig(vocab_size=131_072, eos_id=9)
    made = prepare(own(tmp_path / "a.npy"), setting, cache=tmp_path, workers=2)
    found = []
    for corpus in (made.train["files"], made.held_out["files"]):
        assert corpus.tokens.dtype == np.uint32
        assert np.load(corpus.path, allow_pickle=False).dtype == np.uint32  # the file's own header says it
        found += [part.tolist() for part in np.split(np.asarray(corpus.tokens), corpus.starts[1:-1])]
    assert sorted(found) == sorted(documents)
    assert made.tokenizer.decode([65_536, 9]) == "65536 9"


@pytest.mark.parametrize(("form", "wrong"), [("npy", 100), ("npy", -1), ("bin", 65_000)])
def test_a_ready_id_outside_the_vocabulary_is_named_with_file_and_position(
    tmp_path: Path, form: str, wrong: int
) -> None:
    tokens = np.tile(np.array([1, 2, 3, 0]), 50)
    tokens[137] = wrong
    path = tmp_path / f"a.{form}"
    if form == "npy":
        np.save(path, tokens)
    else:
        tokens.astype("<u2").tofile(path)
    data = own(path, dtype="uint16" if form == "bin" else None)
    with pytest.raises(
        ValueError, match=rf"a\.{form}: token {wrong} at position 137 is outside the vocab.* 100"
    ):
        prepare(data, TokenizerConfig(vocab_size=100, eos_id=0), cache=tmp_path, workers=2)
    with pytest.raises(ValueError, match="no tokenizer can be trained on"):
        prepare(data, SMALL, cache=tmp_path, workers=1)


def test_a_large_vocabulary_is_stored_in_thirty_two_bits(tmp_path: Path) -> None:
    words = {EOS: 0} | {f"w{k}": k for k in range(1, 70_000)}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token=EOS))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    inner.add_special_tokens([EOS])
    inner.save(str(tmp_path / "tokenizer.json"))
    path = jsonl(tmp_path / "a.jsonl", [f"w{65_530 + k} w{k + 1} w69999" for k in range(40)])
    setting = TokenizerConfig(path=str(tmp_path / "tokenizer.json"))
    made = prepare(own(path, held_out_fraction=0), setting, cache=tmp_path, workers=1)
    expected = [[65_530 + k, k + 1, 69_999, 0] for k in range(40)]
    assert made.train["files"].tokens.reshape(-1, 4).tolist() == expected


def test_files_over_four_gibibytes_are_indexed_correctly(tmp_path: Path) -> None:
    """A sparse file: 2.5 billion 16-bit tokens, all 0 but the last document."""
    from megamodel.data.encode import DOCUMENT
    from megamodel.data.tokens import npy_header
    from megamodel.data.windows import Windows

    count, length = 2_500_000_000, 8
    header = npy_header(np.dtype("<u2"), count)
    with (tmp_path / "train.tokens.npy").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * count)
        file.seek(-2 * 10, os.SEEK_END)
        file.write(np.arange(1, 11, dtype="<u2").tobytes())
    np.save(tmp_path / "train.starts.npy", np.array([0, count - 10, count], dtype="<i8"))
    rows = [(0, 1, 0, count, 1), (0, 2, 5 << 30, 7, 2)]
    np.save(tmp_path / "train.documents.npy", np.array(rows, dtype=DOCUMENT))
    made = Corpus("big", tmp_path, "train", ("big.txt",), count, 2)
    windows = Windows(made, sequence_length=length, isolate_documents=True, vocab_size=11, partial=True)
    assert windows.count == (count - 1 + length - 1) // length
    tokens, targets, positions = windows.rows(np.array([count // length - 2, count // length - 1]))
    assert tokens.tolist() == [[0, 0, 0, 0, 0, 0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10]]
    assert targets.tolist() == [[0, 0, 0, 0, 0, -100, 2, 3], [4, 5, 6, 7, 8, 9, 10, -100]]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert [(s.record, s.byte_start) for s in windows.sources(count // length - 1)] == [(2, 5 << 30)]


PROGRAM = """
import os, signal, sys
from pathlib import Path
from megamodel.data.config import Data
from megamodel.data.prepare import prepare
from megamodel.tokenizer import TokenizerConfig

def progress(name, tokens):
    print(tokens, flush=True)
    sys.stdin.read(1)

data = Data(kind="files", paths=[sys.argv[1]])
prepare(data, TokenizerConfig(vocab_size=300), cache=Path(sys.argv[2]), workers=2, progress=progress)
"""


def test_a_killed_prepare_leaves_nothing_half_there(tmp_path: Path) -> None:
    path, cache = jsonl(tmp_path / "a.jsonl", [story(k) for k in range(12_000)]), tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), str(cache)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    with process:
        assert int(process.stdout.readline()) > 0  # in the middle of writing
        process.send_signal(signal.SIGKILL)
    assert not [p for p in cache.glob("prepared-*") if p.is_dir()]
    (left,) = cache.glob("building-*")
    with pytest.raises(ValueError, match="are not prepared"):
        open_prepared(own(path), SMALL, cache=cache)
    made = prepare(own(path), SMALL, cache=cache, workers=2)
    made.verify()
    assert not left.exists()
    assert made.report.written == 12_000
    assert made.digest == prepare(own(path), SMALL, cache=tmp_path / "other", workers=1).digest


def test_a_second_process_waits_for_the_first(prepared: Prepared, tmp_path: Path) -> None:
    """While the lock is held nothing is built; when it is free, what the first has built is opened."""
    path = jsonl(tmp_path / "a.jsonl", [story(k) for k in range(50)])
    first = prepare(own(path), SMALL, cache=tmp_path / "x", workers=1)
    cache = tmp_path / "y"
    cache.mkdir()
    found: list[Prepared] = []
    with (cache / f"{first.directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(
            target=lambda: found.append(prepare(own(path), SMALL, cache=cache, workers=1))
        )
        second.start()
        second.join(0.3)
        assert second.is_alive() and not list(cache.glob("building-*"))
        first.directory.rename(cache / first.directory.name)
    second.join()
    assert found[0].directory == cache / first.directory.name
    assert found[0].digest == first.digest


def test_a_worker_that_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megamodel.data import encode

    path = jsonl(tmp_path / "a.jsonl", [story(k) for k in range(50)])
    start = encode._start

    def dead(job: encode.Job) -> "subprocess.Popen[bytes]":
        process = start(job)
        process.kill()
        return process

    monkeypatch.setattr(encode, "_start", dead)
    with pytest.raises(RuntimeError, match=r"ended with code -9 while it read .*a\.jsonl.*data\.workers"):
        prepare(own(path), SMALL, cache=tmp_path, workers=2)
    assert not list(tmp_path.glob("building-*"))


def test_prepared_text_is_fed_and_judged_whole(prepared: Prepared) -> None:
    """All the way: prepare, feed, evaluate; the bigram model beats the unigram entropy on such text."""
    size = prepared.tokenizer.vocab_size
    loader = Loader(prepared.train, sequence_length=16, seed=1, isolate_documents=True, vocab_size=size)
    step = loader.at(Cursor(), micro_batch=4, accumulation=2, data_rank=0, data_size=1)
    assert step.batches[0].tokens.shape == (4, 16)
    held = HeldOut(prepared.held_out, sequence_length=16, isolate_documents=True, vocab_size=size)
    both = baselines(prepared, held, isolate_documents=True)
    corpus = prepared.held_out["files"]
    assert both.tokens == corpus.count - corpus.document_count
    assert 0 < both.bigram_cross_entropy < both.unigram_entropy < np.log(size)
    part = baselines(prepared, held, isolate_documents=True, windows=3)
    assert part.tokens == len(held.pairs(3)[0]) < both.tokens


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """The tokenizer is trained on a megabyte; all else only passes through."""
    program = PROGRAM.replace("    print(tokens, flush=True)\n    sys.stdin.read(1)\n", "    pass\n").replace(
        "vocab_size=300", "vocab_size=300, train_bytes=1 << 20"
    )
    program += "status = Path('/proc/self/status').read_text()\nprint(status.split('VmHWM:')[1].split()[0])\n"
    peaks = []
    for count in (60_000, 600_000):
        path = jsonl(tmp_path / f"{count}.jsonl", [story(k) for k in range(count)])
        command = [sys.executable, "-c", program, str(path), str(tmp_path / str(count))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] < peaks[0] + 25, peaks  # MiB, for 60 MB more of text
