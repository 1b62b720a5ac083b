"""One small model for each axis of the model space, as changes to the model of `training.settings`."""

from typing import Any

GROUPED = {"n_heads": 4, "n_kv_heads": 2, "head_width": 8}
LATENT = {
    "kind": "latent",
    "n_heads": 4,
    "kv_rank": 12,
    "nope_width": 6,
    "rope_width": 4,
    "value_width": 8,
}
EXPERTS = {"kind": "routed", "n_experts": 4, "top_k": 2, "d_ff": 16}


def attention(**changes: Any) -> dict[str, Any]:
    return {"attention": GROUPED | changes}


def position(kind: str, **changes: Any) -> dict[str, Any]:
    return {"position": {"kind": kind, **changes}}


def experts(**changes: Any) -> dict[str, Any]:
    return {"experts": EXPERTS | changes}


def qk_norm(scope: str, **norm: Any) -> dict[str, Any]:
    return attention(qk_norm={"scope": scope, "norm": norm})


BALANCED = {"balance_loss": 0.05, "router_z_loss": 0.01}
VARIANTS: dict[str, dict[str, Any]] = {
    "consensus": {},
    "layout post": {"layout": "post"},
    "layout double": {"layout": "double"},
    "layout output": {"layout": "output"},
    "layout parallel, one norm": {"layout": "parallel_shared"},
    "layout parallel, two norms": {"layout": "parallel_two"},
    "layernorm": {"norm": {"kind": "layernorm"}},
    "rmsnorm 1 + g": {"norm": {"offset": 1.0, "rounding": "after_gain"}},
    "norm without gain": {"norm": {"kind": "layernorm", "gain": False, "bias": False}},
    "plain feed-forward, biases": {
        "feedforward": {"d_ff": 48, "gated": False, "activation": "relu2", "bias": True}
    },
    "clamped SwiGLU": {"feedforward": {"d_ff": 48, "clamp": 1.0, "bias": True}},
    "all biases": {**attention(bias=True, output_bias=True), "logits": {"bias": True}},
    "tied, head bias": {"tie_embeddings": True, "logits": {"bias": True, "scale": 0.5, "softcap": 5.0}},
    "no positions": position("none"),
    "sinusoidal": {**position("sinusoidal"), "embedding": {"scale": 5.0}},
    "learned positions": position("learned", max_positions=16, offset=2),
    "learned positions, tied": {**position("learned", max_positions=16), "tie_embeddings": True},
    "ALiBi": position("alibi"),
    "T5 buckets": position("buckets", buckets=8, max_distance=12, shared=False),
    "Shaw": position("relative_keys", clip=5),
    "Transformer-XL": position("transformer_xl"),
    "partial interleaved RoPE": position("rope", fraction=0.5, pairs="interleaved"),
    "RoPE llama3": position("rope", scaling={"kind": "llama3", "original_length": 8}),
    "RoPE dynamic": position("rope", scaling={"kind": "dynamic", "original_length": 6}),
    "RoPE yarn": position("rope", scaling={"kind": "yarn", "original_length": 8, "factor": 4.0}),
    "window": attention(window=5),
    "layer pattern": {
        "kinds": {"local": {"window": 4}, "global": {"position": {"kind": "none"}}},
        "pattern": ["local", "local", "global"],
    },
    "sparse strided": attention(sparse="strided", stride=4, summary=1),
    "sparse fixed": attention(sparse="fixed", stride=4, summary=1),
    "QK-norm per head": qk_norm("head"),
    "QK-norm, own gains": qk_norm("each_head", kind="layernorm"),
    "QK-norm over the projection": qk_norm("projection"),
    "QK-norm over the projection, layernorm": qk_norm("projection", kind="layernorm"),
    "soft cap, clip, scale": attention(softcap=2.0, clip=1.0, scale=0.3, scale_by_layer=True),
    "sinks": attention(sinks=True),
    "MLA": {"attention": LATENT | {"bias": True}},
    "MLA, query latent": {"attention": LATENT | {"query_rank": 10}},
    "multipliers": {"residual_scale": 0.3, "embedding": {"scale": 3.0}, "logits": {"scale": 0.25}},
    "embedding norm": {"embedding": {"norm": True}, "norm": {"kind": "layernorm"}},
    "experts": experts(**BALANCED),
    "experts, not renormalised": experts(renormalise=False, weight_scale=1.5, **BALANCED),
    "experts, shared, gated": experts(shared_d_ff=24, shared_gate=True, dense_layers=[0], **BALANCED),
    "experts, sigmoid, groups, bias": experts(
        score="sigmoid",
        groups=2,
        kept_groups=1,
        group_score="top2",
        selection_bias=True,
        selection_bias_rate=0.1,
        shared_d_ff=16,
    ),
    "experts with biases": {
        **experts(router_bias=True),
        "feedforward": {"d_ff": 48, "bias": True, "clamp": 2.0},
    },
}

# All layers share one table, which must stand on one stage: pipelines are refused.
ONE_STAGE: dict[str, dict[str, Any]] = {
    "T5 buckets, one table": position("buckets", buckets=8, max_distance=12, shared=True)
}
EVERY = VARIANTS | ONE_STAGE
