"""DeepSeek V2 and V3: latent attention, many small experts, shared ones."""

from typing import Any

from checkpoints.hf.families.experts import ROUTED, routed
from checkpoints.hf.families.names import (
    DENSE,
    ENDS,
    EXPERTS,
    GATED,
    PRE,
    RMS,
    USUAL,
    shared,
    table,
)
from checkpoints.hf.family import Family
from checkpoints.hf.fields import Fields, put
from checkpoints.hf.rope import RopeForm
from megamodel.config import Model
from megamodel.latent import LatentAttention
from megamodel.position import Rope
from megamodel.rope_scaling import magnitude


def _deepseek(fields: Fields, raw: dict[str, Any]) -> None:
    """What both versions share: latent attention, dense layers first, shared experts, the YaRN scale."""
    attention = raw["attention"]
    turned, plain = attention["rope_width"], attention["nope_width"]
    fields.agree("num_key_value_heads", attention["n_heads"], "num_attention_heads")
    fields.agree("head_dim", turned, "qk_rope_head_dim")
    fields.agree("qk_head_dim", plain + turned, "qk_nope_head_dim + qk_rope_head_dim")
    first = fields.take("first_k_dense_replace")
    put(raw, "experts.dense_layers", list(range(min(first, raw["n_layers"]))))
    shared_experts = fields.take("n_shared_experts", None) or 0
    put(raw, "experts.shared_d_ff", shared_experts * raw["experts"]["d_ff"])
    scaling = raw["position"].get("scaling", {})
    if scaling.get("kind") == "yarn" and scaling.get("mscale_all_dim"):
        put(raw, "attention.scale", yarn_scale(raw["attention"], scaling))


def yarn_scale(attention: dict[str, Any], scaling: dict[str, Any]) -> float:
    """1 / sqrt(query width) m(s, mscale_all_dim)^2."""
    width = attention["nope_width"] + attention["rope_width"]
    return width**-0.5 * magnitude(scaling["factor"], scaling["mscale_all_dim"]) ** 2


def _write_deepseek(model: Model, config: dict[str, Any]) -> None:
    experts = routed(model)
    config["first_k_dense_replace"] = len(experts.dense_layers)
    config["n_shared_experts"], rest = divmod(experts.shared_d_ff, experts.d_ff)
    config["num_key_value_heads"] = model.attention.n_heads
    if rest:
        raise ValueError(
            f"model.experts.shared_d_ff ({experts.shared_d_ff}) is no multiple of d_ff ({experts.d_ff})"
        )


def _deepseek_v2(fields: Fields, raw: dict[str, Any]) -> None:
    method = fields.take("topk_method", "greedy")
    groups, kept = fields.take("n_group", None), fields.take("topk_group", None)
    if method == "group_limited_greedy":
        raw["experts"] |= {"groups": groups, "kept_groups": kept}
    elif method != "greedy":
        raise ValueError(f"config.json: topk_method {method!r} is not supported for deepseek_v2")
    fields.take("norm_topk_prob", None)  # transformers never renormalises here
    _deepseek(fields, raw)


def _write_deepseek_v2(model: Model, config: dict[str, Any]) -> None:
    _write_deepseek(model, config)
    experts = routed(model)
    limited = experts.groups > 1
    config["topk_method"] = "group_limited_greedy" if limited else "greedy"
    config |= {"n_group": experts.groups, "topk_group": experts.kept_groups, "norm_topk_prob": False}


def _deepseek_v3(fields: Fields, raw: dict[str, Any]) -> None:
    pairs = "interleaved" if fields.take("rope_interleave", True) else "half"
    put(raw, "position.pairs", pairs)
    _deepseek(fields, raw)


def _write_deepseek_v3(model: Model, config: dict[str, Any]) -> None:
    _write_deepseek(model, config)
    assert isinstance(model.position, Rope.Config)
    config["rope_interleave"] = model.position.pairs == "interleaved"


def _deepseek_tensors(model: Model) -> dict[str, Any]:
    latent = isinstance(model.attention, LatentAttention.Config) and model.attention.query_rank is not None
    layer = "model.layers.{i}.self_attn"
    names = table(ENDS, PRE, GATED, EXPERTS, shared("shared_experts"))(model)
    return names | {
        f"{layer}.{'q_b_proj' if latent else 'q_proj'}.weight": "blocks.{i}.attention.q.weight",
        f"{layer}.q_a_proj.*": "blocks.{i}.attention.q_down.*",
        f"{layer}.q_a_layernorm.weight": "blocks.{i}.attention.q_norm.weight",
        f"{layer}.kv_a_proj_with_mqa.*": "blocks.{i}.attention.kv_down.*",
        f"{layer}.kv_a_layernorm.weight": "blocks.{i}.attention.kv_norm.weight",
        f"{layer}.kv_b_proj.weight": "blocks.{i}.attention.kv.weight",
        f"{layer}.o_proj.*": "blocks.{i}.attention.output.*",
        "model.layers.{i}.mlp.gate.e_score_correction_bias": (
            "same",
            "blocks.{i}.feedforward.router.selection_bias",
        ),
    }


DEEPSEEK = {
    **DENSE,
    **RMS,
    "attention_bias": "attention.bias",
    "q_lora_rank": "attention.query_rank",
    "kv_lora_rank": "attention.kv_rank",
    "qk_nope_head_dim": "attention.nope_width",
    "qk_rope_head_dim": "attention.rope_width",
    "v_head_dim": "attention.value_width",
    "moe_intermediate_size": "experts.d_ff",
    "n_routed_experts": "experts.n_experts",
    "num_experts_per_tok": "experts.top_k",
    "routed_scaling_factor": "experts.weight_scale",
}
DEEPSEEK_USUAL = {
    **USUAL,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
}
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    aliases={"num_experts": "n_routed_experts"},
    fields=DEEPSEEK,
    defaults={**DEEPSEEK_USUAL, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
    constants={**ROUTED, "attention.kind": "latent", "experts.renormalise": False},
    only={"mlp_bias": (False,), "moe_layer_freq": (1,), "scoring_func": ("softmax",)},
    tensors=_deepseek_tensors,
    kv_heads=None,
    head_dim=False,
    rope=RopeForm(pairs="interleaved"),
    read=_deepseek_v2,
    write=_write_deepseek_v2,
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    fields={
        **DEEPSEEK,
        "n_group": "experts.groups",
        "topk_group": "experts.kept_groups",
        "norm_topk_prob": "experts.renormalise",
    },
    defaults={
        **DEEPSEEK_USUAL,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    },
    constants={
        **ROUTED,
        "attention.kind": "latent",
        "experts.score": "sigmoid",
        "experts.group_score": "top2",
        "experts.selection_bias": True,
    },
    only={
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    silent=("num_nextn_predict_layers",),  # a head for training that transformers leaves out
    tensors=_deepseek_tensors,
    kv_heads=None,
    head_dim=False,
    rope=RopeForm(pairs="interleaved"),
    read=_deepseek_v3,
    write=_write_deepseek_v3,
    ignored=(r"model\.layers\.61\..*",),
)
FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3)
