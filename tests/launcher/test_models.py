"""Commands on a model: write, score, out to transformers and back into training."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from checkpoints.hf import import_hf
from conf.saved import read
from launcher.__main__ import main
from launcher.scoring import document_loss
from tests.checkpoints.hf.models import saved
from tests.launcher.test_failing_rank import environment
from tests.megamodel.test_generate import build
from tests.spawn import Ranks

WORDS = "the cat sat on the mat and the dog sat on the log while a bird sang of rain \n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of four steps, in whose parent the texts lie."""
    root = tmp_path_factory.mktemp("models")
    for number in range(12):
        (root / f"text-{number}.txt").write_text(f"{number} {WORDS * (number % 4 + 2)}")
    assert main(["train", *arguments(root), "model=tiny", f"run.dir={root / 'run'}", "train.steps=4"]) == 0
    return root / "run"


def arguments(root: Path) -> list[str]:
    return [
        "data=files",
        f"data.paths=[{root}/text-*.txt]",
        f"data.cache={root / 'cache'}",
        "data.held_out_fraction=0.3",
        "tokenizer.vocab_size=300",
        "train.sequence_length=32",
        "train.global_batch=4",
        "evaluate.batches=1",
        "sample.max_tokens=0",
        "hardware.device=cpu",
    ]


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "format=json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_text_is_the_same_each_time_and_in_a_batch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["generate.max_tokens=8", "generate.temperature=0", "hardware.device=cpu"]
    one = told(["generate", f"source={run}", "generate.prompt=the cat", *how], capsys)
    both = told(["generate", f"source={run}", "generate.prompts=[the cat, a bird]", *how], capsys)
    assert one["results"][0] == both["results"][0]
    assert len(one["results"][0]["tokens"]) <= 8
    assert main(["generate", f"source={run}", "generate.prompt=the cat", *how]) == 0
    assert capsys.readouterr().out == f"the cat{one['results'][0]['text']}\n"


def test_two_processes_share_the_heads(run: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """Text and losses of a tp of 2 are those of one process; rank 0 alone tells them."""
    root = run.parent
    write = ["generate", f"source={run}", "generate.prompts=[the cat, a bird]", "generate.max_tokens=8"]
    write += ["hardware.device=cpu"]
    score = ["evaluate", f"source={run}", "data=files", f"data.paths=[{root}/text-*.txt]", "context=32"]
    score += ["documents=3", "hardware.device=cpu"]
    for command, key in ((write, "results"), (score, "loss")):
        expected = told(command, capsys)[key]
        first, second = ranks.launch(2, [*command, "format=json"], root)
        assert (first.code, second.code, second.stdout) == (0, 0, ""), first.stderr + second.stderr
        got = json.loads(first.stdout.splitlines()[-1])[key]
        assert got == (expected if key == "results" else pytest.approx(expected, rel=1e-6))


def test_torchrun_starts_it_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The processes meet at the store that torchrun has opened."""
    write = ["generate", f"source={run}", "generate.prompt=the cat", "generate.max_tokens=8"]
    write += ["generate.temperature=0", "hardware.device=cpu"]
    expected = told(write, capsys)["results"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "launcher", *write, "format=json"],
        cwd=run.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["results"] for line in done.stdout.splitlines()] == [expected]


def test_out_to_transformers_and_back_into_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run.parent
    score = ["data=files", f"data.paths=[{root}/text-*.txt]", "context=32", "hardware.device=cpu"]
    before = told(["evaluate", f"source={run}", *score], capsys)
    assert before["perplexity"] == pytest.approx(math.exp(before["loss"]))
    assert before["bits_per_byte"] == pytest.approx(
        before["loss"] * before["tokens"] / before["bytes"] / math.log(2)
    )
    assert told(["export-hf", f"source={run}", f"target={root / 'out'}"], capsys)["family"] == "llama"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "out")
    assert theirs.config.max_position_embeddings == 32
    after = told(["evaluate", f"source={root / 'out'}", *score], capsys)
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)
    found = told(["import-hf", f"source={root / 'out'}", f"target={root / 'back'}"], capsys)
    go_on = ["train", f"config={found['config']}", f"resume={found['checkpoint']}"]
    assert (
        main([*go_on, *arguments(root)[:4], *arguments(root)[5:], f"run.dir={root / 'on'}", "train.steps=2"])
        == 0
    )
    records = [json.loads(line) for line in (root / "on" / "metrics.jsonl").read_text().splitlines()]
    first = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["step"] == 1
    assert records[0]["loss/train"] < first[0]["loss/train"], "it goes on from the trained weights"


@torch.no_grad()
def test_each_token_of_a_long_document_is_predicted_once_from_what_it_may_see() -> None:
    model = build("GQA", "rope", "all")
    ids = torch.randint(97, (23,), generator=torch.Generator().manual_seed(5)).tolist()
    whole = torch.nn.functional.cross_entropy(
        model(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]), reduction="none"
    )
    assert document_loss(model, ids, context=50, stride=25) == pytest.approx(float(whole.sum()), rel=1e-5)
    expected = 0.0
    for target in range(1, 23):  # windows of 8 begin at 0, 4, 8 ..: the first that holds the target
        start = max(0, -(-(target - 8) // 4) * 4)
        logits = model(torch.tensor([ids[start:target]]))[0, -1]
        expected += float(-logits.log_softmax(-1)[ids[target]])
    assert document_loss(model, ids, context=8, stride=4) == pytest.approx(expected, rel=1e-5)


WORD_LEVEL = {"<unk>": 0, "<s>": 1, "</s>": 2, "the": 3, "cat": 4, "sat": 5, "on": 6, "mat": 7}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A model of transformers with a tokenizer, a chat template and lists of special tokens."""
    saved("llama", tmp_path / "source")
    source = tmp_path / "source"
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"eos_token_id": [2, 3], "pad_token_id": None}))
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORD_LEVEL, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.save(str(source / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": 0.6}))
    return source


SIDECARS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def test_tokenizer_and_special_tokens_survive_import_and_export(
    elsewhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, out, on = tmp_path / "target", tmp_path / "out", tmp_path / "on"
    imported = told(["import-hf", f"source={elsewhere}", f"target={target}"], capsys)
    expected = {name: (elsewhere / name).read_bytes() for name in SIDECARS}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (elsewhere / name).rename(tmp_path / f"gone-{name}")  # the copy is used, not the source
    how = [
        "generate.prompt=the cat",
        "generate.max_tokens=4",
        "generate.temperature=0",
        "hardware.device=cpu",
    ]
    written = told(["generate", f"source={target}", *how], capsys)["results"][0]
    model = import_hf(elsewhere)
    assert written["tokens"][:1] == [int(model(torch.tensor([[3, 4]]))[0, -1, : len(WORD_LEVEL)].argmax())]
    for source, directory in ((target, out), (train_on(imported, on, capsys), tmp_path / "out2")):
        assert told(["export-hf", f"source={source}", f"target={directory}"], capsys)["family"] == "llama"
        for name in SIDECARS[:3]:
            assert (directory / name).read_bytes() == expected[name], name
        config = json.loads((directory / "config.json").read_text())
        generation = json.loads((directory / "generation_config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 3], None)
        assert (generation["eos_token_id"], generation["temperature"]) == ([2, 3], 0.6)
        assert config["max_position_embeddings"] == (64 if source == target else 16)
    assert transformers.AutoTokenizer.from_pretrained(out).encode("the cat") == [3, 4]
    assert read(Path(imported["config"]))["train"] == {"sequence_length": 64}


def train_on(imported: dict[str, Any], directory: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of two steps that goes on from an import."""
    texts = directory.parent / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"{number} {WORDS * 9}")
    go_on = [
        "train",
        f"config={imported['config']}",
        f"resume={imported['checkpoint']}",
        f"run.dir={directory}",
    ]
    go_on += [
        "data=files",
        f"data.paths=[{texts}]",
        f"data.cache={directory.parent / 'cache'}",
        "train.steps=2",
    ]
    go_on += ["train.sequence_length=16", "train.global_batch=2", "evaluate.batches=1", "sample.max_tokens=0"]
    assert main([*go_on, "hardware.device=cpu", "data.held_out_fraction=0.3"]) == 0, capsys.readouterr()
    return directory


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama", tmp_path / "source")
    target = tmp_path / "target"
    imported = told(["import-hf", f"source={tmp_path / 'source'}", f"target={target}"], capsys)
    for command in (
        ["generate", "generate.prompt=a"],
        ["evaluate", "data=files", f"data.paths=[{tmp_path}]"],
    ):
        assert main([*command, f"source={target}", "hardware.device=cpu"]) == 2
        error = capsys.readouterr().err
        assert f"{imported['checkpoint']} has no tokenizer" in error and "give tokenizer=FILE" in error
    assert main(["export-hf", f"source={target}", f"target={tmp_path / 'out'}"]) == 0
    assert "has no tokenizer" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("tokenizer*"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["eos_token_id"]) == (64, 2)
    assert main(["import-hf", f"source={tmp_path / 'source'}", f"target={tmp_path / 'again'}"]) == 0
    assert "whatever reads text needs tokenizer=FILE" in capsys.readouterr().out


def test_what_is_no_model_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"source={tmp_path}"]) == 2
    assert "holds no checkpoint and no model of transformers" in capsys.readouterr().err
    assert main(["import-hf", f"source={tmp_path}", f"target={tmp_path / 'x'}"]) == 2
    assert "config.json does not exist" in capsys.readouterr().err
