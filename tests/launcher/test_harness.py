"""Likelihoods of continuations, and lm-eval asking for them."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from launcher.__main__ import main
from launcher.likelihood import likelihoods
from tests.launcher.test_models import run, told
from tests.megamodel.test_generate import build

__all__ = ["run"]
HARNESS = importlib.util.find_spec("lm_eval") is not None
TASK = """task: cats
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{before}}}}"
doc_to_choice: "{{{{[' sat', ' zzz']}}}}"
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.parametrize("position", ["rope", "dynamic", "learned", "alibi"])
@torch.no_grad()
def test_each_continuation_has_the_likelihood_of_a_pass_of_its_own(position: str) -> None:
    """Lengths differ, one is cut on its left, one is empty; dynamic RoPE turns each length otherwise."""
    model = build("GQA", position, "all")
    numbers = torch.randint(97, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    pairs = [(numbers[:3], numbers[3:5]), (numbers[5:9], numbers[9:16]), (numbers[16:40], numbers[40:43])]
    greedy = int(model(torch.tensor([numbers[:7]]))[0, -1].argmax())
    pairs += [(numbers[:7], [greedy]), (numbers[:7], [])]
    found = likelihoods(model, pairs, context=12, rows=3)
    for (before, after), (nats, is_greedy) in zip(pairs, found, strict=True):
        ids = [*before, *after][-13:]
        odds = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        places = range(len(ids) - 1 - len(after), len(ids) - 1)
        assert nats == pytest.approx(sum(float(odds[p, ids[p + 1]]) for p in places), rel=1e-5, abs=1e-6)
        assert is_greedy == all(int(odds[p].argmax()) == ids[p + 1] for p in places)
    assert found[3][1] and found[4] == (0.0, True)
    with pytest.raises(ValueError, match="13 tokens after 1 cannot be scored with a context of 12"):
        likelihoods(model, [([1], [2] * 13)], context=12)


@pytest.mark.skipif(HARNESS, reason="lm-eval is installed here")
def test_without_the_extra_it_says_how_to_get_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harness", f"source={run}", "tasks=[hellaswag]"]) == 2
    assert "pip install 'megamodel[lm-eval]'" in capsys.readouterr().err


@pytest.mark.skipif(not HARNESS, reason="lm-eval is not installed; pip install 'megamodel[lm-eval]'")
def test_a_task_of_ones_own(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The score is that of comparing the losses of both continuations, as `evaluate` gives them."""
    befores = ["the cat", "the dog", "a bird", "on the log while"]
    file = tmp_path / "cats.jsonl"
    file.write_text("".join(json.dumps({"before": text}) + "\n" for text in befores))
    (tmp_path / "cats.yaml").write_text(TASK.format(file=file))
    found = told(
        ["harness", f"source={run}", "tasks=[cats]", f"include={tmp_path}", "hardware.device=cpu"], capsys
    )
    right = 0
    for before in befores:
        nats = []
        for after in (" sat", " zzz"):
            text = tmp_path / "one.txt"
            text.write_text(before + after)
            score = ["evaluate", f"source={run}", "data=files", f"data.paths=[{text}]", "hardware.device=cpu"]
            one = told([*score, f"data.cache={tmp_path / 'cache'}"], capsys)
            nats.append(one["loss"] * one["tokens"])
        right += nats[0] < nats[1]
    assert found["results"]["cats"]["acc,none"] == right / len(befores)
    assert right > 0
    assert main(["harness", f"source={run}", "tasks=[nonsense]"]) == 2
    assert "has no task nonsense" in capsys.readouterr().err
