"""Names of tensors that many families share: theirs -> ours."""

from typing import Any

LAYER = "model.layers.{i}"
ENDS = {
    "model.embed_tokens.weight": "embedding.weight",
    "lm_head.weight": "head.weight",
    "model.norm.*": "final_norm.*",
}
ATTENTION = {
    "model.layers.{i}.self_attn.q_proj.*": "blocks.{i}.attention.q.*",
    "model.layers.{i}.self_attn.k_proj.*": "blocks.{i}.attention.k.*",
    "model.layers.{i}.self_attn.v_proj.*": "blocks.{i}.attention.v.*",
    "model.layers.{i}.self_attn.o_proj.*": "blocks.{i}.attention.output.*",
}
QK_NORM = {
    "model.layers.{i}.self_attn.q_norm.weight": "blocks.{i}.attention.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "blocks.{i}.attention.k_norm.weight",
}
QK_NORM_OF_HEADS = {theirs: ("heads", ours) for theirs, ours in QK_NORM.items()}
GATED = {
    "model.layers.{i}.mlp.gate_proj.*": "blocks.{i}.feedforward.gate.*",
    "model.layers.{i}.mlp.up_proj.*": "blocks.{i}.feedforward.up.*",
    "model.layers.{i}.mlp.down_proj.*": "blocks.{i}.feedforward.down.*",
}
GATE_AND_UP = {
    "model.layers.{i}.mlp.gate_up_proj.*": (
        "rows",
        "blocks.{i}.feedforward.gate.*",
        "blocks.{i}.feedforward.up.*",
    ),
    "model.layers.{i}.mlp.down_proj.*": "blocks.{i}.feedforward.down.*",
}
PRE = {
    "model.layers.{i}.input_layernorm.*": "blocks.{i}.attention_norm.*",
    "model.layers.{i}.post_attention_layernorm.*": "blocks.{i}.feedforward_norm.*",
}
DOUBLE = {
    "model.layers.{i}.input_layernorm.*": "blocks.{i}.attention_norm.*",
    "model.layers.{i}.post_attention_layernorm.*": "blocks.{i}.attention_output_norm.*",
    "model.layers.{i}.pre_feedforward_layernorm.*": "blocks.{i}.feedforward_norm.*",
    "model.layers.{i}.post_feedforward_layernorm.*": "blocks.{i}.feedforward_output_norm.*",
}
OUTPUT = {
    "model.layers.{i}.post_attention_layernorm.*": "blocks.{i}.attention_output_norm.*",
    "model.layers.{i}.post_feedforward_layernorm.*": "blocks.{i}.feedforward_output_norm.*",
}
SHARED_NORM = {"model.layers.{i}.input_layernorm.*": "blocks.{i}.attention_norm.*"}
EXPERTS = {
    "model.layers.{i}.mlp.gate.weight": "blocks.{i}.feedforward.router.weight",
    "model.layers.{i}.mlp.experts.{e}.gate_proj.weight": "blocks.{i}.feedforward.experts.{e}.gate.weight",
    "model.layers.{i}.mlp.experts.{e}.up_proj.weight": "blocks.{i}.feedforward.experts.{e}.up.weight",
    "model.layers.{i}.mlp.experts.{e}.down_proj.weight": "blocks.{i}.feedforward.experts.{e}.down.weight",
}


def shared(name: str) -> dict[str, str]:
    """The experts that all tokens see."""
    return {
        f"{LAYER}.mlp.{name}.{part}_proj.weight": f"blocks.{{i}}.feedforward.shared.{part}.weight"
        for part in ("gate", "up", "down")
    }


def table(*parts: dict[str, Any]) -> Any:
    """The same names for every model of a family."""
    joined = {theirs: ours for part in parts for theirs, ours in part.items()}
    return lambda model: joined


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "attention.n_heads",
    "tie_word_embeddings": "tie_embeddings",
    "attention_dropout": "dropout.attention",
}
DENSE = {**SIZES, "intermediate_size": "feedforward.d_ff"}
RMS = {"rms_norm_eps": "norm.eps"}
LAYER_NORM = {"layer_norm_eps": "norm.eps"}
USUAL = {"tie_word_embeddings": False, "attention_dropout": 0.0, "hidden_act": "silu"}
TIED = USUAL | {"tie_word_embeddings": True}
