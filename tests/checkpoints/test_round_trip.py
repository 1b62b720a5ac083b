"""What is saved at one layout comes back at the same and at any other, bit for bit."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch

from checkpoints.config import Checkpoint
from checkpoints.manager import About, Manager
from megamodel.data.batch import Cursor
from tests.checkpoints.fake import (
    FakeEngine,
    Logical,
    holds,
    make_mesh,
    model,
    on_ranks,
    reference,
    same_bits,
)

ABOUT = About({"train": {"seed": 1}, "optim": {"lr": 6e-4}}, {"torch": "2"}, "abc")
CURSOR = Cursor(attempt=12, step=10, sample=96, tokens=12345, skipped=((4, 8), (16, 20)))
EXTRA = {"schedule": {"peak": 6e-4}, "monitor": {"history": [1.5, "NaN"]}}


def save(
    run_dir: Path, tensors: list[Logical], layout: tuple[int, int, int], values, cursor=CURSOR, **options
):
    tp, pp, dp = layout
    bf16 = options.pop("bf16", True)

    def work(rank, exchange):
        mesh = make_mesh(rank, tp, pp, dp)
        engine = FakeEngine(tensors, mesh, bf16=bf16)
        engine.fill(values, cursor.step)
        manager = Manager(
            run_dir, Checkpoint(background=False, **options), mesh, ABOUT, exchange=exchange, block_bytes=512
        )
        return manager.save(engine, cursor, EXTRA)

    paths = on_ranks(tp * pp * dp, work)
    assert len(set(paths)) == 1, paths
    return paths[0]


def restore(
    run_dir: Path, tensors: list[Logical], layout: tuple[int, int, int], resume: str = "auto", bf16=True
):
    """[(engine, what restore returned or raised, what was said)] of each rank."""
    tp, pp, dp = layout

    def work(rank, exchange):
        mesh, said = make_mesh(rank, tp, pp, dp), []
        engine = FakeEngine(tensors, mesh, bf16=bf16)
        for memory in engine.memory.values():
            memory.fill_(7.0)
        manager = Manager(
            run_dir, Checkpoint(background=False), mesh, ABOUT, say=said.append, exchange=exchange
        )
        try:
            answer = manager.restore(engine, resume)
        except (ValueError, RuntimeError) as error:
            answer = error
        return engine, answer, said

    return on_ranks(tp * pp * dp, work)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)])
def test_same_layout(tmp_path: Path, layout) -> None:
    tensors, values = model(), reference(model())
    path = save(tmp_path, tensors, layout, values)
    assert path == tmp_path / "checkpoints" / "step-00000010"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000010\n"
    for engine, answer, _ in restore(tmp_path, tensors, layout):
        assert holds(engine, values)
        assert engine.loaded == [10]
        assert (answer.cursor, answer.extra, answer.path) == (CURSOR, EXTRA, path)
        assert answer.about == ABOUT
        assert answer.layout == dict(zip(("tp", "pp", "dp"), layout, strict=True))


@pytest.mark.parametrize("vocabulary", [250, 257])
def test_through_many_layouts(tmp_path: Path, vocabulary: int) -> None:
    tensors, values = model(vocabulary), reference(model(vocabulary))
    hops = [(2, 2, 2), (1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 2, 3), (8, 1, 1), (2, 2, 2)]
    save(tmp_path / "0", tensors, hops[0], values)
    for number, layout in enumerate(hops[1:], 1):
        results = restore(tmp_path / str(number - 1), tensors, layout)
        assert all(holds(engine, values) for engine, _, _ in results), (layout, results[0][1])
        # What was restored, and nothing else, goes on to the next hop.
        tp, pp, dp = layout

        def work(rank, exchange, results=results, number=number):
            engine = results[rank][0]
            manager = Manager(
                tmp_path / str(number), Checkpoint(background=False), engine.mesh, ABOUT, exchange=exchange
            )
            return manager.save(engine, CURSOR, EXTRA)

        assert isinstance(on_ranks(tp * pp * dp, work)[0], Path)


def test_live_memory_outside_the_pieces_stays(tmp_path: Path) -> None:
    tensors = [Logical("a", (6,), axis=0)]
    save(tmp_path, tensors, (1, 1, 1), reference(tensors))
    engine = FakeEngine(tensors, make_mesh(0, 1, 1, 1))
    engine.memory["master"] = torch.full((8,), 3.0)  # two rows of padding behind the piece
    Manager(tmp_path, Checkpoint(background=False), engine.mesh).restore(engine, "auto")
    assert holds(engine, reference(tensors))
    assert engine.memory["master"][6:].tolist() == [3.0, 3.0]


def test_the_recipe_of_the_documentation(tmp_path: Path) -> None:
    """docs/checkpoint-format.md, word for word: json and the safetensors library are enough."""
    tensors, values = model(257), reference(model(257))
    path = save(tmp_path, tensors, (2, 2, 2), values)
    text = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text()
    recipe = text.split("```python\n")[1].split("```")[0]
    tried = 0
    for (kind, name), expected in values.items():
        if kind != "parameter":  # the recipe is for float32
            names = {"step": str(path), "kind": kind, "name": name}
            exec(recipe, names)
            assert same_bits(names["tensor"].reshape(-1), expected.reshape(-1)), (kind, name)
            tried += 1
    assert tried == 3 * len(tensors)


def test_what_is_in_the_files(tmp_path: Path) -> None:
    """With the safetensors library: each entry once, no padding, sums as the documentation defines them."""
    tensors, values = model(257), reference(model(257))
    path = save(tmp_path, tensors, (2, 2, 2), values)
    manifest = json.loads((path / "manifest.json").read_text())
    elements = 0
    for file in manifest["files"]:
        data = (path / file["name"]).read_bytes()
        size = manifest["block_bytes"]
        blocks = [hashlib.sha256(data[i : i + size]) for i in range(0, len(data), size)]
        assert (len(data), [b.hexdigest() for b in blocks]) == (file["bytes"], file["blocks"])
        assert hashlib.sha256(b"".join(b.digest() for b in blocks)).hexdigest() == file["sum"]
        with safetensors.safe_open(path / file["name"], "pt") as opened:
            keys = {piece["key"] for piece in manifest["pieces"] if piece["file"] == file["name"]}
            assert set(opened.keys()) == keys
            elements += sum(opened.get_tensor(key).numel() for key in keys)
    assert elements == sum(value.numel() for value in values.values())
    checksum = manifest.pop("checksum")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == checksum


def test_weights_are_rounded_from_masters_when_only_those_were_saved(tmp_path: Path) -> None:
    tensors = [Logical("a", (6, 4), axis=0)]
    values = reference(tensors)
    values["master", "a"] = torch.linspace(-3, 3, 24).reshape(6, 4)
    values["parameter", "a"] = values["master", "a"].to(torch.bfloat16)
    save(tmp_path, tensors, (1, 1, 2), values, bf16=False)
    assert all(holds(engine, values) for engine, _, _ in restore(tmp_path, tensors, (2, 1, 1)))
    # and back: fp32 takes the masters of a bf16 run and leaves its weights
    save(tmp_path / "b", tensors, (1, 1, 2), values)
    assert all(
        holds(engine, values) for engine, _, _ in restore(tmp_path / "b", tensors, (1, 1, 1), bf16=False)
    )


def refused(run_dir: Path, tensors, layout=(2, 1, 1), resume="auto", **options) -> str:
    """The one ValueError that all ranks raise; nothing live was touched."""
    results = restore(run_dir, tensors, layout, resume, **options)
    messages = {str(answer) for _, answer, _ in results}
    assert all(isinstance(answer, ValueError) for _, answer, _ in results), messages
    assert len(messages) == 1, messages
    for engine, _, _ in results:
        assert engine.loaded == []
        assert all(bool((memory == 7).all()) for memory in engine.memory.values())
    return messages.pop()


def test_another_model_is_refused(tmp_path: Path) -> None:
    tensors = model()
    save(tmp_path, tensors, (1, 2, 1), reference(tensors))
    smaller = [t for t in tensors if not t.name.startswith("layers.4")]
    assert "layers.4." in refused(tmp_path, smaller)
    assert "no parameter of new" in refused(tmp_path, [*tensors, Logical("new", (3,))])
    wider = [replace(t, shape=(18, 8)) if t.name == "layers.3.q" else t for t in tensors]
    message = refused(tmp_path, wider)
    assert "layers.3.q" in message and "[16, 8]" in message and "[18, 8]" in message


def test_nothing_there(tmp_path: Path) -> None:
    assert [answer for _, answer, _ in restore(tmp_path, model(), (2, 1, 1))] == [None, None]
    assert [answer for _, answer, _ in restore(tmp_path, model(), (1, 1, 1), "none")] == [None]
    assert "does not exist" in refused(tmp_path, model(), resume=str(tmp_path / "gone"))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y").write_text("")
    assert "not a complete checkpoint" in refused(tmp_path, model(), resume=str(tmp_path / "x"))


def test_a_path_is_a_step_or_a_run(tmp_path: Path) -> None:
    tensors = model()
    first, second = reference(tensors, 1), reference(tensors, 2)
    old = save(tmp_path, tensors, (1, 1, 1), first, Cursor(attempt=5, step=5))
    save(tmp_path, tensors, (1, 1, 1), second, Cursor(attempt=6, step=6))
    assert holds(restore(tmp_path / "other", tensors, (1, 1, 1), str(old))[0][0], first)
    assert holds(restore(tmp_path / "other", tensors, (1, 1, 1), str(tmp_path))[0][0], second)
    assert holds(restore(tmp_path / "other", tensors, (1, 1, 1), str(old.parent))[0][0], second)
