"""What a run records beside its curves: norms by layer, texts, times; and TensorBoard's layout."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from checkpoints.files import LocalFiles
from checkpoints.weights import load_weights
from conf.saved import read
from conf.typed import parse
from launcher.__main__ import main
from launcher.config import Config
from launcher.layers import in_order, layer_of
from launcher.report.goodput import account
from launcher.report.reading import load
from megamodel.model import Transformer
from tests.launcher.test_train import SMALL, write_texts
from tests.spawn import Ranks

BASE = [
    "train",
    *SMALL,
    "train.steps=6",
    "train.micro_batch=2",
    "evaluate.every=3",
    "evaluate.batches=2",
    "checkpoint.every=2",
    "statistics.layers_every=3",
    "optim.lr=1e-2",
    "sample.max_tokens=4",
    "hardware=cpu",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inside")
    write_texts(directory / "text", files=12, words=60)
    return directory


def train(ranks: Ranks, place: Path, name: str, *more: str, world: int = 1) -> Path:
    for finished in ranks.launch(world, [*BASE, *more, f"run.name={name}"], place):
        assert finished.code == 0, finished.stderr
    return place / "runs" / name


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(place: Path, ranks: Ranks) -> Path:
    return train(ranks, place, "alone", "sample.every=2")


def test_the_squares_of_the_layers_add_up_to_the_norm(alone: Path) -> None:
    norms = {line["step"]: line["norm/grad"] for line in jsonl(alone / "metrics.jsonl")}
    found = jsonl(alone / "layers.jsonl")
    assert [line["step"] for line in found] == [3, 6]
    for line in found:
        assert line["layers"] == ["embedding", "blocks.0", "blocks.1", "final_norm"]
        assert math.hypot(*line["gradient_norm"]) == pytest.approx(norms[line["step"]], rel=1e-5)


def test_the_weights_are_those_of_the_checkpoint_before(alone: Path) -> None:
    """The update tried is 3, so the weights are those after 2."""
    tree = parse(Config, read(alone / "config.yaml"))
    model = Transformer(tree.model, seed=1)
    load_weights(alone / "checkpoints" / "step-00000002", model, files=LocalFiles())
    squares = [0.0] * 4  # embedding, two blocks, the last norm, as the layers of the model stand
    for name, weight in model.named_parameters():
        squares[int(name.split(".")[1])] += float(weight.detach().double().square().sum())
    first = jsonl(alone / "layers.jsonl")[0]
    assert first["weight_norm"] == pytest.approx([math.sqrt(s) for s in squares], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tp2", ["parallel.tp=2", "parallel.sequence_parallel=true"]),
        ("pp2", ["parallel.pp=2"]),
        ("dp2", []),
    ],
)
def test_the_same_at_every_layout(
    alone: Path, place: Path, ranks: Ranks, name: str, layout: list[str]
) -> None:
    run = train(ranks, place, name, *layout, world=2)
    for ours, theirs in zip(jsonl(alone / "layers.jsonl"), jsonl(run / "layers.jsonl"), strict=True):
        assert ours["layers"] == theirs["layers"]
        for kind in ("gradient_norm", "weight_norm"):
            assert theirs[kind] == pytest.approx(ours[kind], rel=2e-4)
    assert json.loads((run / "versions.json").read_text())["processes"] == 2


def test_names_of_layers() -> None:
    assert layer_of("blocks.10.attention.q.weight") == "blocks.10" and layer_of("head.weight") == "head"
    assert in_order(["head", "blocks.10", "final_norm", "blocks.9", "embedding"]) == [
        *("embedding", "blocks.9", "blocks.10", "final_norm", "head")
    ]


def test_texts_come_at_saves_and_at_the_end(alone: Path, place: Path, ranks: Ranks) -> None:
    found = jsonl(alone / "samples.jsonl")
    assert [line["step"] for line in found] == [2, 4, 6]
    assert [line["tokens"] for line in found] == [
        line["tokens/total"] for line in jsonl(alone / "metrics.jsonl") if line["step"] in (2, 4, 6)
    ]
    timed = [line["step"] for line in jsonl(alone / "metrics.jsonl") if "time/sample_seconds" in line]
    assert timed == [3, 5]  # after steps 2 and 4; the last text is not part of any attempt
    events = EventAccumulator(str(alone / "tensorboard"))
    events.Reload()
    assert len(events.Tensors("sample/text_summary")) == 2
    silent = train(ranks, place, "silent", "sample.max_tokens=0")
    assert not (silent / "samples.jsonl").exists()
    # Whether texts are written changes nothing else.
    kept = ("loss/train", "norm/grad", "lr", "loss/eval")
    both = [jsonl(run / "metrics.jsonl") for run in (alone, silent)]
    first, second = ([{k: line.get(k) for k in kept} for line in lines] for lines in both)
    assert first == second


def test_times_of_a_real_run_add_up(alone: Path) -> None:
    record = load(alone)
    lines = record.lines
    assert [line["step"] for line in lines if "time/startup_seconds" in line] == [1]
    assert [line["step"] for line in lines if "time/evaluate_seconds" in line] == [3, 6]
    walls = [line["time/wall"] for line in lines]
    assert walls == sorted(walls)
    begun = walls[0] - lines[0]["time/step_seconds"] - lines[0]["time/startup_seconds"]
    saves = [event["time"] for event in record.events if event["event"] == "save"]
    found = account(record)
    assert found.whole and found.total == pytest.approx(max(walls[-1], *saves) - begun, rel=1e-6)
    events = EventAccumulator(str(alone / "tensorboard"))
    events.Reload()
    assert "time/wall" not in events.Tags()["scalars"]


def test_tensorboard_has_a_page_for_each_question(alone: Path) -> None:
    events = EventAccumulator(str(alone / "tensorboard"))
    events.Reload()
    (summary,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout()
    layout.ParseFromString(summary.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == [
        *("loss", "stability", "speed", "memory", "monitor")
    ]
    names = [tag for c in layout.category for chart in c.chart for tag in chart.multiline.tag]
    assert {"^loss/train$", "^norm/grad$", "^speed/mfu$", "^memory/peak_bytes$"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sample.every=3", "checkpoint.every=2"], "sample.every=2"),
        (["sample.every=3", "checkpoint.every=0"], "checkpoint.every=3"),
        (["sample.every=-1"], "must be 0 or more"),
        (["statistics.layers_every=-1"], "must be 0 or more"),
    ],
)
def test_refused_at_the_door(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "model=tiny", *arguments]) == 2
    assert said in capsys.readouterr().err
