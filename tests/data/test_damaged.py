"""Prepared data that are not what was written: found when they are opened, named, with the way out."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megamodel.data import prepared as module
from megamodel.data.prepare import prepare
from megamodel.data.prepared import Prepared, open_directory
from tests.data.test_prepare import SMALL, jsonl, own, story

FILES = [f"files/{side}.{part}.npy" for side in ("train", "held_out") for part in module.PARTS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp("whole")
    path = jsonl(root / "a.jsonl", [story(k) for k in range(50)])
    return prepare(own(path, held_out_fraction=0.2), SMALL, cache=root / "cache", workers=1)


@pytest.fixture
def directory(whole: Prepared, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.directory, tmp_path / "prepared"))


def refused(directory: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_directory(directory)
    assert str(caught.value).endswith(f"; delete {directory} and prepare again")
    assert "tokenizer.path" not in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_whole_is_opened(whole: Prepared, directory: Path) -> None:
    again = open_directory(directory)
    again.verify()
    assert (again.digest, again.report, again.train.keys()) == (
        whole.digest,
        whole.report,
        whole.train.keys(),
    )


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_size_is_named(directory: Path, name: str) -> None:
    path = directory / name
    content = path.read_bytes()
    for changed in (content[:-1], content + b"\0", content[:5], b""):
        path.write_bytes(changed)
        size = rf"has {len(changed)} bytes, and {len(content)} were written"
        refused(directory, re.escape(str(path)) + " " + size)
    path.unlink()
    refused(directory, re.escape(str(path)) + " is missing")


@pytest.mark.parametrize("name", FILES)
def test_overwritten_bytes_are_found(directory: Path, name: str) -> None:
    path = directory / name
    content = path.read_bytes()
    for place, message in ((-1, "is not what was prepared"), (20, "does not begin as it was written")):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        refused(directory, re.escape(str(path)) + " " + message)


def test_large_files_are_known_by_size_until_they_are_verified(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = directory / "files" / "train.tokens.npy"
    content = bytearray(tokens.read_bytes())
    content[-1] ^= 1
    tokens.write_bytes(content)
    monkeypatch.setattr(module, "HASHED_BYTES", 100)
    opened = open_directory(directory)
    with pytest.raises(ValueError, match=r"train\.tokens\.npy is not what was prepared; delete"):
        opened.verify()
    tokens.write_bytes(content[:-400])
    refused(directory, r"train\.tokens\.npy has")


def without(*keys: str) -> Callable[[Any], Any]:
    def change(raw: Any) -> Any:
        inner = raw
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        return raw

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: {}, "no 'format'"),
        (lambda raw: {"format": 1}, "no 'tokenizer'"),
        (lambda raw: [], "list indices"),
        (lambda raw: raw | {"sources": {}}, "it names no source"),
        (lambda raw: raw | {"sources": []}, "'list' object has no attribute 'items'"),
        (lambda raw: raw | {"tokenizer": None}, "'NoneType' object is not subscriptable"),
        (lambda raw: raw | {"report": {"lines": 1}}, "missing 5 required"),
        (without("sources", "files", "train", "starts_sha256"), "no 'starts_sha256'"),
        (without("tokenizer", "setting"), "no 'setting'"),
        (without("digest"), "no 'digest'"),
    ],
)
def test_a_damaged_manifest_is_said(directory: Path, change: Callable[[Any], Any], said: str) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    refused(directory, rf"holds no readable manifest \(.*{re.escape(said)}")


def test_a_manifest_that_is_cut_off_or_of_another_format_is_said(directory: Path) -> None:
    path = directory / "manifest.json"
    content = path.read_text()
    path.write_text(content[:100])
    refused(directory, "holds no readable manifest")
    path.write_text('{"format": 2}')
    refused(directory, "is of format 2, this version reads 1")


def test_a_tokenizer_that_is_not_the_one_is_said(directory: Path) -> None:
    path = directory / "tokenizer.json"
    content = path.read_text()
    path.write_text(content + " ")
    refused(directory, r"tokenizer\.json is not the tokenizer that the data were made with")
    path.write_text("")
    refused(directory, r"tokenizer\.json is not the tokenizer that the data were made with")
    path.unlink()
    refused(directory, r"the tokenizer .*tokenizer\.json is missing")
