"""Longer contexts than those of the training, against transformers with its own scaled positions."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checkpoints.hf import export_hf
from launcher.__main__ import main
from launcher.extrapolate import held_out, positioned
from launcher.opening import open_model
from megamodel.config import Model
from megamodel.data.config import Data
from megamodel.data.prepare import prepare
from megamodel.tokenizer import TokenizerConfig
from tests.launcher.test_models import arguments, run, told

__all__ = ["run"]
SCALED: dict[str, dict[str, Any]] = {
    "as trained": {},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    "base x 10": {"rope_theta": 100_000.0},
}


@torch.no_grad()
def test_losses_are_those_of_transformers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(["extrapolate", f"runs=[{run}]", "contexts=[32,64]", f"plot={tmp_path}/plot.png"], capsys)
    rows = {row["variant"]: row for row in found["rows"]}
    assert set(rows) == {*SCALED, "ntk"}
    opened = open_model(str(run), device=torch.device("cpu"))
    values = dict(part.split("=", 1) for part in arguments(run.parent))
    data = Data(
        kind="files", paths=[f"{run.parent}/text-*.txt"], cache=values["data.cache"], held_out_fraction=0.3
    )
    prepared = prepare(data, TokenizerConfig(vocab_size=300))
    texts = torch.from_numpy(held_out(prepared, 64, 64))
    assert len(texts) == rows["linear"]["documents"] > 0
    export_hf(opened.model, tmp_path / "out", family="llama", context=32)
    for variant, parameters in SCALED.items():
        config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
        config.rope_parameters = {**config.rope_parameters, **parameters}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", config=config)
        logits = theirs(texts[:, :-1]).logits[:, -16:]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, -16:].flatten())
        assert rows[variant]["losses"]["64"] == pytest.approx(float(expected), rel=1e-5), variant
        assert rows[variant]["losses"]["32"] == rows["as trained"]["losses"]["32"], "nothing to stretch"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_read_is_left_open_and_too_long_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model()
    assert positioned(model, "linear", 1.0, 32) == model
    assert main(["extrapolate", f"runs=[{run}]", "contexts=[5000]"]) == 2
    assert "no held-out document has 5001 tokens" in capsys.readouterr().err
