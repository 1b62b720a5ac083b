"""Fields of config.json: read as transformers reads the same file, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checkpoints.hf import import_hf
from checkpoints.hf.families import FAMILIES
from conf.schema import plain
from tests.checkpoints.hf.models import (
    BARE,
    LATENT,
    LLAMA3,
    LONG,
    PLAIN,
    SMALL,
    WIDE,
    YARN,
    from_file,
    tokens,
)

LINEAR = {"rope_type": "linear", "factor": 4.0}
UNSIZED = {name: value for name, value in YARN.items() if name != "rope_theta"}
OPT = {**BARE, "ffn_dim": 100}
BLOOM = {"vocab_size": 250, "hidden_size": 48, "n_layer": 3, "n_head": 6}
NEOX = {**PLAIN, "num_attention_heads": 3}
MIXTRAL = {**SMALL, "num_local_experts": 4}
MOE = {**WIDE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {**SMALL, "sliding_window": 6}
LAYERS = ["sliding_attention", "full_attention"] * 2
NAMES = {"vocab_size": 250, "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


# config.json as a file: both sides read it, and must mean the same.
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "the base of the class": ("mixtral", MIXTRAL),
    "the base of the class, scaled": ("mixtral", {**MIXTRAL, "rope_scaling": LINEAR}),
    "the rope parameters of the class": (
        "gpt_oss",
        {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "rope_theta": 500.0},
    ),
    "one base beside layer types": ("olmo3", {**SLIDING, "rope_theta": 300.0}),
    "scaling beside layer types": ("olmo3", {**SLIDING, "rope_theta": 300.0, "rope_scaling": UNSIZED}),
    "null beside layer types": (
        "gemma3_text",
        {
            **WIDE,
            "sliding_window": 6,
            "rope_parameters": {"full_attention": None},
            "rope_local_base_freq": 9.0,
        },
    ),
    "old names of NeoX": ("gpt_neox", {**NEOX, "rotary_pct": 0.5, "rotary_emb_base": 500}),
    "old rope parameters replace the new": (
        "gpt_neox",
        {**NEOX, "rope_parameters": {**YARN, "mscale": 0.7}, "rope_scaling": LINEAR, "rotary_pct": 0.5},
    ),
    "old rope parameters replace the new, Llama": (
        "olmo",
        {**SMALL, "rope_parameters": {**LLAMA3, "rope_theta": 2e4}, "rope_scaling": LINEAR},
    ),
    "a base inside goes before one beside": (
        "llama",
        {**SMALL, "rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "a share of 1": ("llama", {**SMALL, "partial_rotary_factor": 1.0}),
    "a pattern of layers": ("gemma3_text", {**WIDE, "sliding_window": 6, "sliding_window_pattern": 2}),
    "windows where nothing turns": (
        "smollm3",
        {**SMALL, "use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [0, 1, 1, 0]},
    ),
    "SmolLM2": ("llama", {**SMALL, "is_llama_config": True, "rope_interleaved": False}),
    "Qwen2.5": ("qwen2", {**SMALL, "use_mrope": False}),
    "Gemma 2 9B": ("gemma2", {**WIDE, "sliding_window": 6, "sliding_window_size": 6}),
    "BLOOM 7B": (
        "bloom",
        {
            **without(BLOOM, "hidden_size", "n_head"),
            "n_embed": 48,
            "num_attention_heads": 6,
            "pretraining_tp": 4,
            "attention_softmax_in_fp32": True,
        },
    ),
    "BLOOM, exact alone": ("bloom", {**BLOOM, "slow_but_exact": True}),
    "Falcon 7B": ("falcon", {**BARE, "apply_residual_connection_post_layernorm": False}),
    "Falcon 11B": ("falcon", {**BARE, "ff_factor": 4, "new_decoder_architecture": True, "num_kv_heads": 3}),
    "Falcon, n_embed": ("falcon", {**without(BARE, "hidden_size"), "n_embed": 48}),
    "GPT-NeoX 20B": (
        "gpt_neox",
        {**NEOX, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "rotary_pct": 0.25},
    ),
    "Command R7B": (
        "cohere2",
        {**SLIDING, "layer_switch": 4, "rotary_pct": 1.0, "position_embedding_type": "rope_gptj"},
    ),
    "Command R": ("cohere", {**SMALL, "model_max_length": 131072, "logit_scale": 1.0}),
    "SmolLM3 3B": ("smollm3", {**SMALL, "max_window_layers": 28}),
    "Phi-4-mini": (
        "phi3",
        {**SMALL, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    ),
    "StableLM 3B": (
        "stablelm",
        {**SMALL, "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "rotary_scaling_factor": 1.0, "rope_pct": 0.25},
    ),
    "key/value heads of the class": (
        "stablelm",
        {**without(SMALL, "num_key_value_heads"), "hidden_size": 512, "num_attention_heads": 64},
    ),
    "Minitron": ("nemotron", {**WIDE, "kv_channels": 20}),
    "OPT without biases": ("opt", {**OPT, "enable_bias": False}),
    "OPT without gains": ("opt", {**OPT, "layer_norm_elementwise_affine": False}),
    "OPT post without a last norm": (
        "opt",
        {**OPT, "do_layer_norm_before": False, "_remove_final_layer_norm": True},
    ),
    "other names, GPT-2": ("gpt2", {**NAMES, "max_position_embeddings": 64}),
    "other names, GPT-J": ("gptj", {**NAMES, "max_position_embeddings": 64, "rotary_dim": 4}),
    "other names, BLOOM": ("bloom", NAMES),
    "other names, Mixtral": ("mixtral", {**without(MIXTRAL, "num_local_experts"), "num_experts": 4}),
    "other names, DeepSeek V3": (
        "deepseek_v3",
        {**without(LATENT, "n_routed_experts"), "num_local_experts": 8},
    ),
}


@pytest.mark.parametrize("name", EQUAL)
@torch.no_grad()
def test_a_file_means_what_it_means_to_transformers(name: str, tmp_path: Path) -> None:
    family, fields = EQUAL[name]
    theirs = from_file(family, fields, tmp_path)
    ids = tokens(theirs)
    expected = theirs(ids).logits
    tolerance = 1e-4 if family in ("mixtral", "gpt_oss", "deepseek_v3", "olmo3") else 1e-5
    assert (import_hf(tmp_path)(ids) - expected).abs().max() / expected.abs().max() < tolerance


WHOLE_HEADS = (
    "llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 olmo olmo2 olmoe falcon cohere "
    "cohere2 smollm3 granite gemma3_text olmo3 gpt_oss deepseek_v2 deepseek_v3"
).split()
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LIES = [  # family, fields beside the sizes, what the error names
    *((family, {"partial_rotary_factor": 0.5}, "partial_rotary_factor") for family in WHOLE_HEADS),
    ("llama", {"rope_parameters": HALF}, "partial_rotary_factor = 0.5"),
    ("cohere2", {"rotary_pct": 0.5}, "rotary_pct = 0.5"),
    ("stablelm", {"rope_pct": 0.5}, "rope_pct = 0.5"),
    ("olmo3", {"rope_parameters": YARN}, "transformers does not read .*factor"),
    ("olmo3", {"rope_parameters": LLAMA3}, "transformers does not read .*factor"),
    ("gemma3_text", {"rope_parameters": LLAMA3}, "transformers does not read .*factor"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "needs rope_type"),
    ("gpt_neox", {"rope_theta": 500.0}, "rope_theta = 500.0"),
    ("gpt_neox", {"partial_rotary_factor": 0.5, "rotary_pct": 0.25}, "partial_rotary_factor = 0.5"),
    ("gemma2", {"sliding_window_pattern": 3}, "sliding_window_pattern = 3"),
    ("gemma2", {"sliding_window": 6, "sliding_window_size": 7}, "sliding_window_size = 7"),
    ("gemma3_text", {"_sliding_window_pattern": 2}, "_sliding_window_pattern = 2"),
    ("cohere2", {"_sliding_window_pattern": 2}, "_sliding_window_pattern = 2"),
    ("cohere2", {"layer_switch": 2}, "layer_switch = 2"),
    ("cohere2", {"use_parallel_block": False}, "use_parallel_block = False"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact = true with pretraining_tp = 2"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
    (
        "falcon",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    ("falcon", {"ff_factor": 3}, "ff_factor = 3"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved = True"),
    ("qwen2", {"use_mrope": True}, "use_mrope = True"),
    ("stablelm", {"norm_eps": 1e-3}, "norm_eps = 0.001"),
    ("stablelm", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor = 2.0"),
    ("nemotron", {"kv_channels": 21}, "kv_channels = 21"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias = True"),
    ("phi3", {"rope_scaling": LINEAR, "max_position_embeddings": 64}, "'linear' is not supported for phi3"),
    ("deepseek_v3", {"head_dim": 5}, "head_dim = 5"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("phi", {"partial_rotary_factor": None}, "partial_rotary_factor of the default"),
    ("opt", {"word_embed_proj_dim": 24}, r"word_embed_proj_dim = 24 .*OPT-350M"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    ("gpt2", {"hidden_size": 64}, "hidden_size = 64 and n_embd"),
    (
        "smollm3",
        {"sliding_window": 5, "layer_types": LAYERS, "num_hidden_layers": 4},
        "use_sliding_window is false",
    ),
    ("smollm3", {"no_rope_layers": []}, "no_rope_layers"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
]
BROKEN = [
    ("llama", {"rope_scaling": without(LLAMA3, "low_freq_factor")}, "low_freq_factor of the llama3"),
    (
        "llama",
        {"rope_scaling": {**without(LONG, "short_factor"), "factor": 2.0}},
        "short_factor of the longrope",
    ),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "no factor.*max_position_embeddings"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor of the linear"),
    ("llama", {"rope_scaling": {**LINEAR, "rope_type": "yarn"}}, "need max_position_embeddings"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling = 'linear' is no JSON object"),
    ("llama", {"rope_theta": 0}, "rope_theta of the default rope parameters is 0"),
    ("llama", {"rope_theta": None}, "rope_theta of the default rope parameters is None"),
    ("llama", {"rope_theta": "10000"}, "rope_theta of the default rope parameters is '10000'"),
    ("llama", {"num_attention_heads": None}, "num_attention_heads = None"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0"),
    ("mixtral", {"num_hidden_layers": "4"}, "num_hidden_layers = '4'"),
    ("gptj", {"rotary_dim": None}, "rotary_dim = None"),
    ("gemma2", {"query_pre_attn_scalar": None}, "wrong kind, query_pre_attn_scalar"),
    ("qwen2", {"use_sliding_window": True, "layer_types": 3}, "layer_types 3"),
]


def sizes(family: str) -> dict[str, Any]:
    """The least that a config.json of a family needs, with heads as wide as some classes' rotary parts."""
    usual = {"vocab_size": 1000, "intermediate_size": 100, "ffn_dim": 100, "moe_intermediate_size": 20}
    usual |= {"hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 7, "n_routed_experts": 64}
    usual |= {"n_embd": 4096, "n_head": 64, "n_layer": 7, "max_position_embeddings": 99}
    raw: dict[str, Any] = {"model_type": family}
    if family == "deepseek_v2":  # its class has null there
        raw["num_experts_per_tok"] = 4
    if family == "deepseek_v3":  # and this one 128, which only as many heads can use
        raw["num_key_value_heads"] = 64
    while True:
        try:
            FAMILIES[family].model(raw)
            return raw
        except ValueError as error:
            if "cannot be guessed" not in str(error):
                return raw
            name = str(error).split("no field ")[1].split(";")[0]
            raw[name] = usual[name]


@pytest.mark.parametrize(("family", "fields", "message"), [*LIES, *BROKEN])
def test_what_would_be_read_otherwise_is_refused_by_name(
    family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FAMILIES[family].model(sizes(family) | fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_class(family: str) -> None:
    """A file with sizes alone, and the same file with every field that transformers adds: one model."""
    raw = sizes(family)
    fields = {name: value for name, value in raw.items() if name != "model_type"}
    full = transformers.AutoConfig.for_model(family, **fields).to_dict()
    assert len(full) > len(raw) + 10
    assert plain(FAMILIES[family].model(raw)) == plain(FAMILIES[family].model(full))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_names_are_those_of_the_class(family: str) -> None:
    theirs = dict(type(transformers.AutoConfig.for_model(family)).attribute_map)
    ours = {name: of for name, of in FAMILIES[family].aliases.items() if name != "n_embed"}
    if family == "qwen3_moe":  # its class moves num_experts to a name that its files do not have
        theirs = {of: name for name, of in theirs.items()}
    assert ours == theirs


def test_damaged_files_are_named(tmp_path: Path) -> None:
    from_file("llama", SMALL, tmp_path)
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    whole = file.read_bytes()
    for content in (whole[:-100], whole[:6], b"x"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged or no safetensors file"):
            import_hf(tmp_path)
    file.write_bytes(whole)
    for held in ({}, {"weight_map": {}}, {"weight_map": {"lm_head.weight": 3}}):
        index.write_text(json.dumps(held))
        with pytest.raises(ValueError, match=r"index\.json has no weight_map"):
            import_hf(tmp_path)
