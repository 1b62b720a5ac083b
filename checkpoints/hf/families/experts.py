"""Families with a mixture of experts."""

from typing import Any

from checkpoints.hf.families.llama_like import (
    both_biases,
    patterned,
    same_window,
    write_both_biases,
    write_layer_types,
    write_same_window,
)
from checkpoints.hf.families.names import (
    ATTENTION,
    DENSE,
    ENDS,
    EXPERTS,
    GATED,
    PRE,
    QK_NORM,
    RMS,
    SIZES,
    USUAL,
    shared,
    table,
)
from checkpoints.hf.family import Family, layer_types, one_window, types_of
from checkpoints.hf.fields import Fields, put
from checkpoints.hf.rope import RopeForm
from megamodel.config import Model
from megamodel.moe import Routed

ROUTED = {"experts.kind": "routed"}


def routed(model: Model) -> Routed:
    """The experts of a model; ValueError when it has none."""
    if not isinstance(model.experts, Routed):
        raise ValueError("this family has experts, the model has none")
    return model.experts


def _mixtral(fields: Fields, raw: dict[str, Any]) -> None:
    put(raw, "feedforward.d_ff", raw["experts"]["d_ff"])


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    aliases={"num_experts": "num_local_experts"},
    fields={
        **SIZES,
        **RMS,
        "intermediate_size": "experts.d_ff",
        "num_local_experts": "experts.n_experts",
        "num_experts_per_tok": "experts.top_k",
    },
    defaults={
        **USUAL,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    constants=ROUTED,
    silent=("router_jitter_noise",),  # in training only
    tensors=table(
        ENDS,
        ATTENTION,
        PRE,
        {
            "model.layers.{i}.block_sparse_moe.gate.weight": "blocks.{i}.feedforward.router.weight",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight": (
                "same",
                "blocks.{i}.feedforward.experts.{e}.gate.weight",
            ),
            "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight": (
                "same",
                "blocks.{i}.feedforward.experts.{e}.up.weight",
            ),
            "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight": (
                "same",
                "blocks.{i}.feedforward.experts.{e}.down.weight",
            ),
        },
    ),
    rope=RopeForm(theta=1e6),
    windows=same_window(None),
    write_windows=write_same_window,
    read=_mixtral,
)


def _sparse_layers(fields: Fields, raw: dict[str, Any]) -> None:
    """Dense layers: those listed, and those that decoder_sparse_step leaves out."""
    step, listed = fields.count("decoder_sparse_step", 1), fields.take("mlp_only_layers", None) or []
    n = raw["n_layers"]
    put(raw, "experts.dense_layers", [i for i in range(n) if i in listed or (i + 1) % step])


def _write_sparse_layers(model: Model, config: dict[str, Any]) -> None:
    config |= {"mlp_only_layers": list(routed(model).dense_layers), "decoder_sparse_step": 1}


def _qwen2_moe(fields: Fields, raw: dict[str, Any]) -> None:
    _sparse_layers(fields, raw)
    put(raw, "experts.shared_gate", True)


def _qwen2_moe_windows(fields: Fields, n_layers: int) -> list[int | None]:
    """Every second layer below max_window_layers, unless layer_types says which."""
    window = fields.take("sliding_window", 4096)
    window = window if fields.take("use_sliding_window", False) else None
    last = fields.take("max_window_layers", 28)
    listed = layer_types(fields, n_layers, window)
    return listed or [window if window and i % 2 == 0 and i < last else None for i in range(n_layers)]


def _write_typed(windows: list[int | None], config: dict[str, Any]) -> None:
    window = one_window(windows)
    config |= {"sliding_window": window or 0, "layer_types": types_of(windows)}
    config["use_sliding_window"] = window is not None


QWEN_EXPERTS = {
    **DENSE,
    **RMS,
    "moe_intermediate_size": "experts.d_ff",
    "num_experts_per_tok": "experts.top_k",
    "norm_topk_prob": "experts.renormalise",
}
QWEN_USUAL = {**USUAL, "rms_norm_eps": 1e-6, "norm_topk_prob": False}
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields={
        **QWEN_EXPERTS,
        "num_experts": "experts.n_experts",
        "shared_expert_intermediate_size": "experts.shared_d_ff",
        "qkv_bias": "attention.bias",
    },
    defaults={
        **QWEN_USUAL,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    constants=ROUTED,
    tensors=table(
        ENDS,
        ATTENTION,
        PRE,
        GATED,
        EXPERTS,
        shared("shared_expert"),
        {"model.layers.{i}.mlp.shared_expert_gate.weight": "blocks.{i}.feedforward.shared_gate.weight"},
    ),
    rope=RopeForm(),
    windows=_qwen2_moe_windows,
    write_windows=_write_typed,
    read=_qwen2_moe,
    write=_write_sparse_layers,
)


def _qwen3_moe(fields: Fields, raw: dict[str, Any]) -> None:
    _sparse_layers(fields, raw)
    both_biases(fields, raw)
    put(raw, "attention.qk_norm", {"scope": "head", "norm": {"eps": raw["norm"]["eps"]}})
    put(raw, "experts.n_experts", fields.take("num_experts", 128))


def _write_qwen3_moe(model: Model, config: dict[str, Any]) -> None:
    _write_sparse_layers(model, config)
    write_both_biases(model, config)
    config["num_experts"] = routed(model).n_experts


def _qwen3_moe_windows(fields: Fields, n_layers: int) -> list[int | None]:
    window = fields.take("sliding_window", 4096)
    fields.take("max_window_layers", None)
    return [window if fields.take("use_sliding_window", False) else None] * n_layers


def _write_qwen3_moe_windows(windows: list[int | None], config: dict[str, Any]) -> None:
    window = one_window(windows)
    config |= {"sliding_window": window, "use_sliding_window": window is not None}


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    aliases={"num_local_experts": "num_experts"},
    fields=QWEN_EXPERTS,
    defaults={
        **QWEN_USUAL,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    constants=ROUTED,
    tensors=table(ENDS, ATTENTION, QK_NORM, PRE, GATED, EXPERTS),
    rope=RopeForm(),
    windows=_qwen3_moe_windows,
    write_windows=_write_qwen3_moe_windows,
    read=_qwen3_moe,
    write=_write_qwen3_moe,
)


def _olmoe(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    put(raw, "feedforward.d_ff", raw["experts"]["d_ff"])
    put(raw, "attention.qk_norm", {"scope": "projection", "norm": {"eps": raw["norm"]["eps"]}})


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    aliases={"num_local_experts": "num_experts"},
    fields={
        **SIZES,
        **RMS,
        "intermediate_size": "experts.d_ff",
        "num_experts": "experts.n_experts",
        "num_experts_per_tok": "experts.top_k",
        "norm_topk_prob": "experts.renormalise",
        "clip_qkv": "attention.clip",
    },
    defaults={
        **QWEN_USUAL,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "clip_qkv": None,
    },
    constants=ROUTED,
    tensors=table(ENDS, ATTENTION, QK_NORM, PRE, EXPERTS),
    rope=RopeForm(),
    read=_olmoe,
    write=write_both_biases,
)


def _gpt_oss(fields: Fields, raw: dict[str, Any]) -> None:
    bias = fields.take("attention_bias", True)
    raw["attention"] |= {"bias": bias, "output_bias": bias}
    put(raw, "feedforward.d_ff", raw["experts"]["d_ff"])


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    aliases={"num_experts": "num_local_experts"},
    fields={
        **SIZES,
        **RMS,
        "intermediate_size": "experts.d_ff",
        "num_local_experts": "experts.n_experts",
        "num_experts_per_tok": "experts.top_k",
        "swiglu_limit": "feedforward.clamp",
        "swiglu_alpha": "feedforward.alpha",
    },
    defaults={
        **USUAL,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    constants={
        **ROUTED,
        "experts.router_bias": True,
        "feedforward.bias": True,
        "attention.sinks": True,
        "norm.rounding": "after_gain",
    },
    silent=("experts_per_token", "initial_context_length"),
    tensors=table(
        ENDS,
        ATTENTION,
        PRE,
        {
            "model.layers.{i}.self_attn.sinks": "blocks.{i}.attention.sinks",
            "model.layers.{i}.mlp.router.*": "blocks.{i}.feedforward.router.*",
            "model.layers.{i}.mlp.experts.gate_up_proj": (
                "interleaved",
                "blocks.{i}.feedforward.experts.{e}.gate.weight",
                "blocks.{i}.feedforward.experts.{e}.up.weight",
            ),
            "model.layers.{i}.mlp.experts.gate_up_proj_bias": (
                "interleaved",
                "blocks.{i}.feedforward.experts.{e}.gate.bias",
                "blocks.{i}.feedforward.experts.{e}.up.bias",
            ),
            "model.layers.{i}.mlp.experts.down_proj": (
                "stacked",
                "blocks.{i}.feedforward.experts.{e}.down.weight",
            ),
            "model.layers.{i}.mlp.experts.down_proj_bias": (
                "stacked",
                "blocks.{i}.feedforward.experts.{e}.down.bias",
            ),
        },
    ),
    rope=RopeForm(
        theta=150000.0,
        absent={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    windows=patterned(2, default=128),
    write_windows=write_layer_types,
    read=_gpt_oss,
    write=write_both_biases,
)


FAMILIES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GPT_OSS)
