"""Every family: logits equal transformers, and what is exported is what was imported."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints.hf import export_hf, import_hf
from checkpoints.hf.importing import logical_tensors
from conf.typed import parse
from megamodel.config import Model
from megamodel.model import Transformer
from tests.checkpoints.hf.models import CASES, build, saved, tokens

LOOSE = ("moe", "mixtral", "olmoe", "gpt_oss", "deepseek", "yarn", "olmo3")  # 1e-4; all others 1e-5


def tolerance(name: str) -> float:
    return 1e-4 if any(word in name for word in LOOSE) else 1e-5


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_and_the_export_is_the_import(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    ours = import_hf(tmp_path / "theirs")
    ids = tokens(theirs)
    expected = theirs(ids).logits
    assert expected.std() >= 1
    error = (ours(ids) - expected).abs().max() / expected.abs().max()
    assert error < tolerance(name)
    family = export_hf(ours, tmp_path / "ours", family=CASES[name][0], context=64)
    assert family == CASES[name][0]
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]) and tensor.dtype == after[key].dtype, key
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation=theirs.config._attn_implementation
    )
    error = (again(ids).logits - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def logits_with_zeroed(name: str, directory: Path) -> dict[str, float]:
    """Largest relative change of the logits when one stored tensor is zero, for each."""
    model = import_hf(directory)
    ids = tokens(model)
    before = model(ids)
    changes = {}
    for key, tensor in logical_tensors(model).items():
        kept = tensor.clone()
        tensor.zero_()
        changes[key] = float((model(ids) - before).abs().max() / before.abs().max())
        tensor.copy_(kept)
    return changes


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_tensor_matters(name: str, tmp_path: Path) -> None:
    """Zeroing any one moves the logits beyond the tolerance: none is carried along unused.

    A key's bias adds the same to all scores of a query without rotary positions, and positions never reached
    are not read: both leave the logits alone in transformers too.
    """
    saved(name, tmp_path / "theirs")
    changes = logits_with_zeroed(name, tmp_path / "theirs")
    rotated = not name.startswith(("gpt2", "opt", "bloom", "falcon rw"))
    moved = {key for key, change in changes.items() if change > tolerance(name)}
    still = {key for key in changes if key not in moved and (rotated or not key.endswith("attention.k.bias"))}
    assert still == set()


def test_a_field_that_is_not_understood_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for field, value in (("rope_wobble", 3), ("quantization_config", {"bits": 4}), ("hidden_act", "swishy")):
        (tmp_path / "config.json").write_text(json.dumps(raw | {field: value}))
        with pytest.raises(ValueError, match="swishy" if field == "hidden_act" else field):
            import_hf(tmp_path)
    scaled = raw["rope_parameters"] | {"rope_type": "linear", "factor": 2.0, "wobble": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_parameters": scaled}))
    with pytest.raises(ValueError, match="wobble"):
        import_hf(tmp_path)
    del raw["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="no field vocab_size"):
        import_hf(tmp_path)


def test_a_tensor_that_is_not_understood_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    key = "model.layers.1.self_attn.q_proj.weight"
    for changed, message in (
        (stored | {"model.layers.1.extra.weight": torch.ones(3)}, "extra"),
        ({name: t for name, t in stored.items() if name != key}, r"blocks\.1\.attention\.q\.weight"),
        (stored | {key: stored[key][:-1]}, r"q_proj.*shape \(119, 48\)"),
        (stored | {key: stored[key].to(torch.int8)}, "int8"),
    ):
        save_file(changed, file)
        with pytest.raises(ValueError, match=message):
            import_hf(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="never pickled"):
        import_hf(tmp_path)


def test_old_names_of_rotary_settings(tmp_path: Path) -> None:
    saved("llama yarn", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    new = import_hf(tmp_path).settings
    parameters = raw.pop("rope_parameters")
    raw["rope_theta"] = parameters.pop("rope_theta")
    parameters["type"] = parameters.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_scaling": parameters}))
    assert import_hf(tmp_path).settings == new


def test_shards_are_written_and_read(tmp_path: Path) -> None:
    theirs = saved("llama", tmp_path / "theirs")
    export_hf(import_hf(tmp_path / "theirs"), tmp_path / "ours", shard_bytes=40_000)
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids = tokens(theirs)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            import_hf(tmp_path / "ours")(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4
        )


def test_an_architecture_that_no_family_has_is_refused(tmp_path: Path) -> None:
    model = Transformer(
        parse(Model, {"d_model": 48, "attention": {"head_width": 8}, "position": {"kind": "relative_keys"}})
    )
    with pytest.raises(ValueError, match="no family of transformers has this architecture"):
        export_hf(model, tmp_path / "out")


def test_bf16_stays_bf16(tmp_path: Path) -> None:
    build("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    model = import_hf(tmp_path / "theirs")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in import_hf(tmp_path / "theirs", torch.float32).parameters()} == {torch.float32}
    export_hf(model, tmp_path / "ours")
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("theirs", "ours"))
    assert all(torch.equal(before[key], after[key]) for key in before)


GRADIENTS = (
    "llama yarn",
    "gemma2",
    "olmo2",
    "gpt_oss",
    "bloom",
    "deepseek_v2",
    "qwen2_moe",
    "stablelm",
    "cohere",
)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_equal(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    ours = import_hf(tmp_path / "theirs")
    ids = tokens(theirs)
    ours(ids).square().mean().backward()
    theirs(ids).logits.square().mean().backward()
    with torch.no_grad():
        for model in (theirs, ours):  # export the gradients as if they were weights
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)
    export_hf(ours, tmp_path / "ours", family=CASES[name][0], context=64)
    got = load_file(tmp_path / "ours" / "model.safetensors")
    theirs.save_pretrained(tmp_path / "gradients")
    for key, expected in load_file(tmp_path / "gradients" / "model.safetensors").items():
        torch.testing.assert_close(got[key], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
