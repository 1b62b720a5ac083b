"""What is written loads in transformers and says what was there; what cannot be said is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints.hf import export_hf, import_hf
from conf.typed import parse
from megamodel.config import Model
from megamodel.model import Transformer
from tests.checkpoints.hf.models import LATENT, LLAMA3, SMALL, WIDE, from_file, saved, tokens

GLOBAL = ["full_attention"] * 4
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", WIDE),
        ("gemma3_text", WIDE),
        ("cohere2", SMALL),
        ("olmo3", SMALL),
        ("gpt_oss", {**WIDE, **ROUTED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ],
)
@torch.no_grad()
def test_a_model_without_windows_loads(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    theirs = from_file(family, {**fields, "layer_types": GLOBAL, "sliding_window": 5}, tmp_path / "in")
    export_hf(import_hf(tmp_path / "in"), tmp_path / "out", family=family)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids = tokens(theirs)
    expected = theirs(ids).logits
    assert (again(ids).logits - expected).abs().max() / expected.abs().max() < 1e-5


def test_phi3_has_no_linear_scaling(tmp_path: Path) -> None:
    settings = {
        "vocab_size": 100,
        "d_model": 48,
        "n_layers": 2,
        "attention": {"n_heads": 4, "n_kv_heads": 4, "head_width": 12},
        "position": {"kind": "rope", "scaling": {"kind": "linear", "factor": 2.0}},
        "tie_embeddings": False,
    }
    model = Transformer(parse(Model, settings), seed=1)
    with pytest.raises(ValueError, match="no RoPE scaling 'linear', only longrope"):
        export_hf(model, tmp_path / "phi3", family="phi3")
    assert export_hf(model, tmp_path / "llama", family="llama") == "llama"


@torch.no_grad()
def test_two_scalings_by_type_of_layer(tmp_path: Path) -> None:
    """The dynamic one goes by max_position_embeddings, whatever the other one is."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    fields: dict[str, Any] = {
        **WIDE,
        "max_position_embeddings": 16,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
    }
    fields["rope_parameters"] = {"full_attention": LLAMA3, "sliding_attention": dynamic}
    theirs = from_file("gemma3_text", fields, tmp_path / "in")
    export_hf(import_hf(tmp_path / "in"), tmp_path / "out", family="gemma3_text")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids = tokens(theirs)
    expected = theirs(ids).logits
    assert (again(ids).logits - expected).abs().max() / expected.abs().max() < 1e-5
    assert again.config.max_position_embeddings == 16


def test_the_dtype_is_that_of_most(tmp_path: Path) -> None:
    """A correction bias in fp32 among weights in bf16."""
    from_file("deepseek_v3", LATENT, tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    stored = {k: t if "correction" in k else t.bfloat16() for k, t in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    export_hf(import_hf(tmp_path / "in"), tmp_path / "out", family="deepseek_v3")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        torch.equal(after[key], tensor) and after[key].dtype == tensor.dtype for key, tensor in stored.items()
    )


def test_special_tokens_and_generation_settings_stay(tmp_path: Path) -> None:
    from_file("llama", {**SMALL, "eos_token_id": [2, 3], "bos_token_id": None}, tmp_path / "in")
    generation = {"eos_token_id": [2, 3, 4], "temperature": 0.6, "do_sample": True}
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(generation))
    model = import_hf(tmp_path / "in")
    export_hf(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == ([2, 3], None, 0)
    assert config["max_position_embeddings"] == 64
    written = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (written.eos_token_id, written.temperature, written.do_sample) == ([2, 3, 4], 0.6, True)
    export_hf(model, tmp_path / "other", special_tokens={"eos_token_id": 7})
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "other" / name).read_text())["eos_token_id"] == 7


def test_a_model_from_elsewhere_says_that_it_has_no_special_tokens(tmp_path: Path) -> None:
    saved("llama", tmp_path / "in")
    model = Transformer(import_hf(tmp_path / "in").settings, seed=1)
    export_hf(model, tmp_path / "out", family="llama")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {config[f"{name}_token_id"] for name in ("bos", "eos", "pad")} == {None}
