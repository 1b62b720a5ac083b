"""One policy for every kind of bad line, wherever blocks happen to be cut."""

import gzip
import io
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megamodel.data.blocks import blocks, line_blocks, text_blocks
from megamodel.data.config import SourceConfig
from megamodel.data.records import Document, Left, records
from megamodel.data.sources import SourceFile, discover

DEEP = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
LINES: list[tuple[bytes, str | None, str | None]] = [  # line, text, reason for leaving it out
    (b'\xef\xbb\xbf{"text": "after a mark"}', "after a mark", None),
    (b'{"text": "plain"}', "plain", None),
    (b'{"text": "carriage return"}\r', "carriage return", None),
    (b"", None, "blank line"),
    (b" \t\r", None, "blank line"),
    (b'{"text": ""}', None, "empty text"),
    ('{"text": "one\u2028two\u2029three\x85four"}'.encode(), "one\u2028two\u2029three\x85four", None),
    (b'{"text": "nul \\u0000 inside"}', "nul \0 inside", None),
    (b'{"text": "raw nul \x00"}', None, "invalid JSON"),
    (b'{"text": "\\ud800 alone"}', None, "lone surrogate"),
    (b'{"text": "\\ud83d\\ude00"}', "\U0001f600", None),
    (b'{"text": "\xff\xfe"}', None, "invalid UTF-8"),
    (b'{"txet": "misspelt"}', None, "no key 'text'"),
    (b'{"text": 5}', None, "'text' is a int, not a string"),
    (b'{"text": null}', None, "'text' is a NoneType, not a string"),
    (b'{"text": ["a"]}', None, "'text' is a list, not a string"),
    (b'["text"]', None, "a JSON list, not an object"),
    (b'\xef\xbb\xbf{"text": "a mark inside the file"}', None, "invalid JSON"),
    (DEEP, None, "invalid JSON"),
    (b'{"n": ' + b"9" * 5000 + b', "text": "a huge number"}', None, "invalid JSON"),
    (b'{"text": "  \\n"}', "  \n", None),
    (b'{"text": "the last line is cut of', None, "truncated last line"),
]


def read(path: Path, **settings: object) -> list[Document | Left]:
    source = SourceConfig(kind="files", paths=[str(path)], weight=1.0, **settings)  # type: ignore[arg-type]
    (file,) = discover(source, path.parent)
    found = []
    for block in blocks(file, source, eos_id=0):
        found += records(block, text_key=source.text_key, eos_id=0)
    return found


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
def test_every_line_goes_where_the_policy_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, block_bytes: int
) -> None:
    lines = LINES if block_bytes > 1 else [line for line in LINES if len(line[0]) < 1000]
    monkeypatch.setattr(
        "megamodel.data.blocks.BLOCK_BYTES", block_bytes * (8 if suffix.endswith("zst") else 1)
    )
    content = b"\n".join(line for line, _, _ in lines)
    path = tmp_path / f"lines{suffix}"
    pack = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(pack[suffix](content))
    found = read(path)
    assert [record.record for record in found] == list(range(1, len(lines) + 1))
    for record, (line, text, reason) in zip(found, lines, strict=True):
        if reason is None:
            assert isinstance(record, Document) and record.text == text
            assert record.byte_start is not None
            cut = content[record.byte_start : record.byte_start + record.byte_length]
            assert not cut.endswith((b"\r", b"\n"))
            assert json.loads(cut) == json.loads(line.decode("utf-8-sig"))
        else:
            assert isinstance(record, Left) and record.reason.startswith(reason)
            assert record.rejected == (reason not in ("blank line", "empty text"))


def test_a_whole_last_line_needs_no_line_feed(tmp_path: Path) -> None:
    for end in (b"", b"\n", b"\r\n"):
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "two"}' + end)
        assert [record.text for record in read(tmp_path / "a.jsonl") if isinstance(record, Document)] == [
            "one",
            "two",
        ]
        assert len(read(tmp_path / "a.jsonl")) == 2


def chunked(content: bytes, sizes: list[int]) -> Iterator[tuple[int, bytes]]:
    stream, offset, number = io.BytesIO(content), 0, 0
    while part := stream.read(sizes[number % len(sizes)]):
        yield offset, part
        offset, number = offset + len(part), number + 1


@given(
    content=st.binary(max_size=300).map(lambda b: b.replace(b"\x01", b"\n")),
    sizes=st.lists(st.integers(1, 40), min_size=1),
)
def test_blocks_are_whole_lines_and_together_the_file(content: bytes, sizes: list[int]) -> None:
    found = list(line_blocks(chunked(content, sizes)))
    assert b"".join(block.payload for block in found) == content
    for block in found:
        assert block.byte_start is not None
        assert content[block.byte_start :].startswith(block.payload)
        assert block.first_record == content[: block.byte_start].count(b"\n") + 1
        assert block.payload.endswith(b"\n") or block is found[-1]


@given(
    lines=st.lists(st.integers(0, 60), max_size=20),
    sizes=st.lists(st.integers(1, 15), min_size=1),
    ended=st.booleans(),
)
def test_an_overlong_line_is_one_record_and_harms_no_other(
    lines: list[int], sizes: list[int], ended: bool
) -> None:
    """Lines of up to 20 bytes stay, those of more than 20 + a chunk go; in between either is right."""
    content = b"\n".join(b"%d" % (k % 10) * size for k, size in enumerate(lines)) + b"\n" * ended
    seen: dict[int, bytes | None] = {}
    for block in line_blocks(chunked(content, sizes), line_bytes=20):
        if block.kind == "overlong":
            seen[block.first_record] = None
            continue
        parts = block.payload.split(b"\n")
        seen |= dict(enumerate(parts[:-1] if parts[-1] == b"" else parts, block.first_record))
    texts = content.split(b"\n")
    texts = texts[:-1] if texts[-1] == b"" else texts
    assert sorted(seen) == list(range(1, len(texts) + 1))
    for number, text in enumerate(texts, 1):
        if len(text) <= 20:
            assert seen[number] == text
        elif len(text) > 20 + max(sizes):
            assert seen[number] is None
        else:
            assert seen[number] in (None, text)


def test_offsets_beyond_four_gibibytes() -> None:
    start = 5 << 30
    (block,) = line_blocks(iter([(start, b'{"text": "a"}\n{"text": "bc"}\n')]))
    places = [(r.byte_start, r.byte_length) for r in records(block, text_key="text", eos_id=0)]  # type: ignore[union-attr]
    assert places == [(start, 13), (start + 14, 14)]


@given(
    text=st.text(alphabet="ab\n\u20ac\U0001f600", max_size=200),
    limit=st.integers(4, 50),
    sizes=st.lists(st.integers(1, 30), min_size=1),
)
def test_long_text_is_cut_into_valid_documents_that_together_are_the_file(
    text: str, limit: int, sizes: list[int]
) -> None:
    content = text.encode()
    found = list(text_blocks(chunked(content, sizes), limit))
    assert b"".join(block.payload for block in found) == content
    assert [block.first_record for block in found] == list(range(1, len(found) + 1))
    for block in found:
        block.payload.decode("utf-8")
        assert len(block.payload) <= limit
    for block, after in pairwise(found):
        assert block.payload.endswith(b"\n") or b"\n" not in (block.payload + after.payload)[:limit]


@pytest.mark.parametrize(
    "content", [b"", b"\xef\xbb\xbf", b"\xef\xbb", b"a", b"\xef\xbb\xbfa", b" ab\r\n\0c \n"]
)
def test_text_files_keep_every_byte_but_the_mark(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (record,) = read(tmp_path / "a.txt")
    rest = content.removeprefix(b"\xef\xbb\xbf")
    if content == b"\xef\xbb":
        assert isinstance(record, Left) and record.reason.startswith("invalid UTF-8") and record.rejected
    elif not rest:
        assert isinstance(record, Left) and record.reason == "empty text" and not record.rejected
    else:
        assert isinstance(record, Document) and record.text.encode() == rest
        assert (record.byte_start, record.byte_length) == (len(content) - len(rest), len(rest))


def test_several_frames_and_members_are_one_file_and_a_cut_one_is_damage(tmp_path: Path) -> None:
    line = b'{"text": "x"}\n' * 1000
    for suffix, pack in ((".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)):
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(pack(line) + pack(line))
        assert len(read(path)) == 2000
        path.write_bytes((pack(line) + pack(line))[:-9])
        with pytest.raises(ValueError, match=rf"a\.jsonl{suffix} is damaged or cut off"):
            read(path)
        path.write_bytes(b"no such format")
        with pytest.raises(ValueError, match="is damaged or cut off"):
            read(path)


def test_parquet_rows_have_no_offset_and_a_null_is_rejected(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"body": ["one", None, "", "two"], "n": [1, 2, 3, 4]}).to_parquet(str(path))
    found = read(path, text_key="body")
    assert found[0] == Document("one", None, 1, None, 3, found[0].hash)  # type: ignore[union-attr]
    assert found[1:3] == [Left(2, "'body' is not a string"), Left(3, "empty text")]
    assert isinstance(found[3], Document) and (found[3].text, found[3].record) == ("two", 4)
    with pytest.raises(ValueError, match=r"no column 'text'; name one of \['body', 'n'\] with data.text_key"):
        read(path)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read"):
        read(path)


def test_a_saved_dataset_is_read_by_split(tmp_path: Path) -> None:
    import datasets

    first = datasets.Dataset.from_dict({"text": [f"row {k}" for k in range(600)]})
    first.save_to_disk(str(tmp_path / "one"))
    second = datasets.Dataset.from_dict({"text": ["other"]})
    datasets.DatasetDict({"train": first, "test": second}).save_to_disk(str(tmp_path / "two"))
    rows = read(tmp_path / "one")
    assert [(r.text, r.record) for r in rows] == [(f"row {k}", k + 1) for k in range(600)]  # type: ignore[union-attr]
    assert rows == read(tmp_path / "two")
    assert [r.text for r in read(tmp_path / "two", split="test")] == ["other"]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"no split 'valid'; set data.split to one of \['test', 'train'\]"):
        read(tmp_path / "two", split="valid")


def test_a_dataset_is_asked_for_by_name_configuration_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked = []

    def answer(*names: str | None, **settings: object) -> object:
        asked.append((names, settings))
        return datasets.Dataset.from_dict({"text": ["far away"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", answer)
    for name in ("hf:owner/name", "hf:owner/name:part-10"):
        source = SourceConfig(kind="files", paths=[name], split="valid", weight=1.0)
        (file,) = discover(source, tmp_path)
        (block,) = blocks(file, source, eos_id=None)
        assert (block.payload, block.byte_start) == (b"far away", None)
    settings = {"split": "valid", "streaming": True}
    assert asked == [(("owner/name", None), settings), (("owner/name", "part-10"), settings)]


@pytest.mark.parametrize("form", ["npy", "bin"])
def test_ready_tokens_are_cut_at_their_end_of_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("megamodel.data.blocks.BLOCK_TOKENS", 8)
    documents = [[5, 6, 0], [7, 0], [0], [1, 2, 3, 4, 5, 0], [9] * 20 + [0], [70_000, 3]]
    tokens = np.array([t for d in documents for t in d], dtype="<u4")
    path = tmp_path / f"ids.{form}"
    if form == "npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    found = read(path, dtype="uint32" if form == "bin" else None)
    got = [record.ids.tolist() for record in found if isinstance(record, Document) and record.ids is not None]
    cut = [*documents[:4], [9] * 8, [9] * 8, [9] * 4 + [0], documents[5]]
    assert got == cut
    content = path.read_bytes()
    for record, ids in zip(found, cut, strict=True):
        assert isinstance(record, Document) and record.byte_start is not None
        part = content[record.byte_start : record.byte_start + record.byte_length]
        assert np.frombuffer(part, "<u4").tolist() == ids
        assert tokens[record.record - 1 :][: len(ids)].tolist() == ids


def test_equal_content_has_one_hash_whatever_it_came_in(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the same", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "the \\u0073ame"}\n{"text": "other"}', encoding="utf-8")
    (text,), (same, other) = read(tmp_path / "a.txt"), read(tmp_path / "a.jsonl")
    assert text.hash == same.hash != other.hash  # type: ignore[union-attr]


def test_scenes_of_a_play_are_documents(tmp_path: Path) -> None:
    content = (
        b"# P\n\n## ACT I\n\n### SCENE I.\n\na\n\n### SCENE II.\n\nb\n\n## ACT II\n\n### SCENE I.\n\nc\n"
    )
    (tmp_path / "p.md").write_bytes(content)
    file = SourceFile(str(tmp_path / "p.md"), "text", "", len(content), cut="scenes")
    parts = [block.payload for block in blocks(file, SourceConfig(kind="shakespeare", weight=1.0), eos_id=0)]
    assert b"".join(parts) == content
    assert [part.split(b"\n")[0] for part in parts] == [b"# P", b"### SCENE II.", b"## ACT II"]
