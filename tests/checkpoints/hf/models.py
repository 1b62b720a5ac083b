"""Tiny random models of transformers, one or more for each family, with odd shapes."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 250,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PLAIN = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
BARE = {name: value for name, value in PLAIN.items() if name != "intermediate_size"}
WIDE = {**SMALL, "head_dim": 20}
GPT = {"vocab_size": 250, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
LATENT = {
    **SMALL,
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
MSCALE = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.9}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {**WIDE, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama linear": (
        "llama",
        {**SMALL, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama dynamic": (
        "llama",
        {
            **SMALL,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
        },
    ),
    "llama yarn": ("llama", {**SMALL, "rope_parameters": YARN}),
    "llama yarn, factor": (
        "llama",
        {**SMALL, "rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0}},
    ),
    "llama yarn, mscale": ("llama", {**SMALL, "rope_parameters": {**MSCALE, "truncate": False}}),
    "llama longrope": ("llama", {**SMALL, "rope_parameters": {**LONG, "factor": 4.0}}),
    "mistral": ("mistral", {**WIDE, "sliding_window": 7}),
    "mixtral": ("mixtral", {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {**SMALL, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen2 tied": ("qwen2", {**SMALL, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", WIDE),
    "qwen3 windows": (
        "qwen3",
        {
            **WIDE,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "attention_bias": True,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **SMALL,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **WIDE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "gemma": ("gemma", WIDE),
    "gemma2": ("gemma2", {**WIDE, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3_text": ("gemma3_text", {**WIDE, "sliding_window": 6, "num_hidden_layers": 7}),
    "olmo": ("olmo", {**SMALL, "clip_qkv": 0.8}),
    "olmo2": ("olmo2", SMALL),
    "olmo3": (
        "olmo3",
        {
            **SMALL,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmoe": ("olmoe", {**SMALL, "num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.9}),
    "gpt2": ("gpt2", GPT),
    "gpt2 scaled": ("gpt2", {**GPT, "scale_attn_by_inverse_layer_idx": True, "n_inner": 100}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "gpt_neox": (
        "gpt_neox",
        {
            **PLAIN,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
        },
    ),
    "gpt_neox serial": (
        "gpt_neox",
        {
            **PLAIN,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
        },
    ),
    "opt": ("opt", {**BARE, "ffn_dim": 100, "word_embed_proj_dim": 48}),
    "opt post": ("opt", {**BARE, "ffn_dim": 100, "word_embed_proj_dim": 48, "do_layer_norm_before": False}),
    "bloom": ("bloom", {"vocab_size": 250, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    "falcon": ("falcon", {**BARE, "multi_query": True}),
    "falcon new": ("falcon", {**BARE, "new_decoder_architecture": True, "num_kv_heads": 3}),
    "falcon rw": (
        "falcon",
        {**BARE, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "cohere": ("cohere", {**SMALL, "use_qk_norm": True, "logit_scale": 2.0}),
    "cohere2": ("cohere2", {**WIDE, "sliding_window": 6, "num_hidden_layers": 5, "logit_scale": 2.0}),
    "phi": ("phi", {**SMALL, "qk_layernorm": True}),
    "phi3": ("phi3", {**SMALL, "sliding_window": 9}),
    "phi3 long": ("phi3", {**SMALL, "original_max_position_embeddings": 16, "rope_parameters": LONG}),
    "nemotron": ("nemotron", {**WIDE, "attention_bias": True}),
    "stablelm": (
        "stablelm",
        {
            **SMALL,
            "qk_layernorm": True,
            "use_qkv_bias": True,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
        },
    ),
    "stablelm parallel": ("stablelm", {**SMALL, "use_parallel_residual": True}),
    "smollm3": ("smollm3", {**SMALL, "num_hidden_layers": 5}),
    "granite": (
        "granite",
        {
            **SMALL,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 4.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.2,
            "attention_bias": True,
        },
    ),
    "glm4": ("glm4", {**WIDE, "attention_bias": True}),
    "gpt_oss": (
        "gpt_oss",
        {
            **WIDE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "swiglu_limit": 1.0,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **LATENT,
            "rope_parameters": MSCALE,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek_v2 lite": (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "attention_bias": True},
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "rope_parameters": MSCALE, "n_shared_experts": 2}),
}


def build(name: str) -> Any:
    """The model, weights of a size that gives logits of standard deviation 1 and more, vectors random."""
    family, fields = CASES[name]
    config = transformers.AutoConfig.for_model(family, **fields)
    # Falcon's eager attention adds the ALiBi bias twice; its SDPA is right.
    config._attn_implementation = "sdpa" if fields.get("alibi") else "eager"
    return randomised(config)


def randomised(config: Any) -> Any:
    """A model of a configuration, weights as in `build`."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            learned = isinstance(tensor, torch.nn.Parameter)
            if tensor.dim() >= 2 and learned:
                tensor.normal_(0, 2 * tensor.shape[-1] ** -0.5, generator=generator)
            elif "correction_bias" in key or (tensor.dim() == 1 and isinstance(tensor, torch.nn.Parameter)):
                tensor.uniform_(0.3, 1.2, generator=generator)
    return model


def from_file(family: str, fields: dict[str, Any], directory: Path) -> Any:
    """A model of exactly this config.json, which both sides read; transformers adds weights alone."""
    directory.mkdir(exist_ok=True)
    content = json.dumps({"model_type": family, **fields})
    (directory / "config.json").write_text(content)
    config = transformers.AutoConfig.from_pretrained(directory)
    config._attn_implementation = "eager"
    model = randomised(config)
    model.save_pretrained(directory)
    (directory / "config.json").write_text(content)
    return model


def saved(name: str, directory: Path) -> Any:
    """The model, written by transformers."""
    model = build(name)
    model.save_pretrained(directory)
    return model


def tokens(model: Any, length: int = 40) -> torch.Tensor:
    """Two rows, longer than the windows and original contexts above; no padding, which has no gradient."""
    return torch.randint(1, 250, (2, length), generator=torch.Generator().manual_seed(5))
