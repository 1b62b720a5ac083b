"""OLMo, Cohere, Phi, Nemotron, StableLM: LayerNorm, parallel blocks or fused projections."""

from typing import Any

from checkpoints.hf.families.classic import ALL_BIASES, FUSED, PLAIN
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
    GATE_AND_UP,
    GATED,
    LAYER_NORM,
    PRE,
    QK_NORM_OF_HEADS,
    RMS,
    SHARED_NORM,
    TIED,
    USUAL,
    table,
)
from checkpoints.hf.family import Family
from checkpoints.hf.fields import Fields, put
from checkpoints.hf.rope import RopeForm, read_rope, rope_parameters, write_rope
from megamodel.config import Model
from megamodel.position import Rope
from megamodel.rope_scaling import LongRopeScaling, Unscaled

OLMO = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    fields={**DENSE, "clip_qkv": "attention.clip"},
    defaults={**USUAL, "clip_qkv": None},
    constants={"norm.kind": "layernorm", "norm.gain": False, "norm.bias": False, "norm.eps": 1e-5},
    tensors=table(ENDS, ATTENTION, GATED),
    rope=RopeForm(),
    read=both_biases,
    write=write_both_biases,
)


def _cohere(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    if fields.take("use_qk_norm", False):
        norm = {"kind": "layernorm", "bias": False, "eps": raw["norm"]["eps"]}
        put(raw, "attention.qk_norm", {"scope": "each_head", "norm": norm})


def _write_cohere(model: Model, config: dict[str, Any]) -> None:
    write_both_biases(model, config)
    config["use_qk_norm"] = model.attention.qk_norm.scope != "none"  # type: ignore[union-attr]


COHERE_LIKE = {"layout": "parallel_shared", "norm.kind": "layernorm", "norm.bias": False}
COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    fields={**DENSE, **LAYER_NORM, "logit_scale": "logits.scale"},
    defaults={**TIED, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
    constants=COHERE_LIKE,
    tensors=table(ENDS, ATTENTION, QK_NORM_OF_HEADS, GATED, SHARED_NORM),
    rope=RopeForm(theta=5e5, pairs="interleaved"),
    silent=("model_max_length",),  # in Command R's file; a length for its tokenizer
    read=_cohere,
    write=_write_cohere,
)


def _cohere2(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    raw["global_position"] = {"kind": "none"}


def _write_cohere2(model: Model, config: dict[str, Any]) -> None:
    write_both_biases(model, config)
    turned = next((x.position for x in model.layers if isinstance(x.position, Rope.Config)), None)
    if turned is not None:
        config["rope_parameters"] = write_rope(turned, partial=False)


COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    fields={**DENSE, **LAYER_NORM, "logit_scale": "logits.scale"},
    defaults={**TIED, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
    constants=COHERE_LIKE,
    only={  # in Command R7B's file; the class is always this
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
    },
    silent=("use_parallel_embedding", "use_embedding_sharing"),  # of its training; tie_word_embeddings ties
    tensors=table(ENDS, ATTENTION, GATED, SHARED_NORM),
    rope=RopeForm(pairs="interleaved"),
    windows=patterned(4, named=True),
    write_windows=write_layer_types,
    read=_cohere2,
    write=_write_cohere2,
)


def _phi(fields: Fields, raw: dict[str, Any]) -> None:
    if fields.take("qk_layernorm", False):
        norm = {"kind": "layernorm", "eps": raw["norm"]["eps"]}
        put(raw, "attention.qk_norm", {"scope": "head", "norm": norm})


def write_qk_layernorm(model: Model, config: dict[str, Any]) -> None:
    config["qk_layernorm"] = model.attention.qk_norm.scope != "none"  # type: ignore[union-attr]


PHI_QK = {
    "model.layers.{i}.self_attn.q_layernorm.*": "blocks.{i}.attention.q_norm.*",
    "model.layers.{i}.self_attn.k_layernorm.*": "blocks.{i}.attention.k_norm.*",
}
PHI_NAMES = {
    **{theirs: ours for theirs, ours in ENDS.items() if "lm_head" not in theirs and ".norm" not in theirs},
    "lm_head.*": "head.*",
    "model.final_layernorm.*": "final_norm.*",
    **{theirs.replace("o_proj", "dense"): ours for theirs, ours in ATTENTION.items()},
    "model.layers.{i}.mlp.fc1.*": "blocks.{i}.feedforward.up.*",
    "model.layers.{i}.mlp.fc2.*": "blocks.{i}.feedforward.down.*",
}
PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    fields={
        **DENSE,
        **LAYER_NORM,
        "resid_pdrop": "dropout.residual",
        "embd_pdrop": "dropout.embedding",
    },
    defaults={
        **USUAL,
        "layer_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "hidden_act": "gelu_new",
    },
    constants={**PLAIN, **ALL_BIASES, "logits.bias": True, "layout": "parallel_shared"},
    head_dim=False,
    tensors=table(PHI_NAMES, PHI_QK, SHARED_NORM),
    rope=RopeForm(fraction=0.5, partial=True),
    read=_phi,
    write=write_qk_layernorm,
)


def _phi3(fields: Fields, raw: dict[str, Any]) -> None:
    longest = fields.take("max_position_embeddings")
    original = fields.take("original_max_position_embeddings", 4096)
    parameters = rope_parameters(fields, RopeForm(partial=True))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("su", "yarn"):  # earlier names of the same
        parameters |= {"rope_type": "longrope", "type": "longrope"}
    elif kind not in ("default", "longrope"):
        raise ValueError(f"config.json: rope_type {kind!r} is not supported for phi3, only default, longrope")
    raw["position"] = read_rope(parameters, longest=longest, original=original)


def _write_phi3(model: Model, config: dict[str, Any]) -> None:
    if not isinstance(model.position, Rope.Config):
        raise ValueError("Phi-3 has rotary positions")
    scaling = model.position.scaling
    if not isinstance(scaling, Unscaled | LongRopeScaling):
        raise ValueError(f"a phi3 model of transformers has no RoPE scaling {scaling.kind!r}, only longrope")
    config["rope_parameters"] = write_rope(model.position)
    if isinstance(scaling, LongRopeScaling):
        config["original_max_position_embeddings"] = scaling.original_length


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields={**DENSE, **RMS, "resid_pdrop": "dropout.residual", "embd_pdrop": "dropout.embedding"},
    defaults={**USUAL, "rms_norm_eps": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    only={
        "attention_bias": (False,),
        # In Phi-4-mini's file, read by nobody.
        "mlp_bias": (False,),
        "lm_head_bias": (False,),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
    tensors=table(
        ENDS,
        {"model.layers.{i}.self_attn.qkv_proj.*": FUSED},
        {theirs: ours for theirs, ours in ATTENTION.items() if "o_proj" in theirs},
        GATE_AND_UP,
        PRE,
    ),
    windows=same_window(None),
    write_windows=write_same_window,
    read=_phi3,
    write=_write_phi3,
)


def _nemotron(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    fields.agree("kv_channels", raw["attention"]["head_width"], "head_dim")  # in Minitron's files


NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    fields={**DENSE, "norm_eps": "norm.eps", "mlp_bias": "feedforward.bias"},
    defaults={**USUAL, "norm_eps": 1e-5, "mlp_bias": False, "hidden_act": "relu2"},
    constants={**PLAIN, "norm.offset": 1.0},
    tensors=table(ENDS, ATTENTION, GATED, PRE),
    rope=RopeForm(fraction=0.5, partial=True),
    read=_nemotron,
    write=write_both_biases,
)


def _stablelm(fields: Fields, raw: dict[str, Any]) -> None:
    raw["layout"] = "parallel_shared" if fields.take("use_parallel_residual", False) else "pre"
    if fields.take("qk_layernorm", False):
        norm = {"kind": "layernorm", "bias": False, "eps": raw["norm"]["eps"]}
        put(raw, "attention.qk_norm", {"scope": "each_head", "norm": norm})


def _write_stablelm(model: Model, config: dict[str, Any]) -> None:
    write_qk_layernorm(model, config)
    config["use_parallel_residual"] = model.layout == "parallel_shared"


STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    fields={
        **DENSE,
        **LAYER_NORM,
        "use_qkv_bias": "attention.bias",
        "hidden_dropout": "dropout.residual",
    },
    defaults={
        **USUAL,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": False,
        "hidden_dropout": 0.0,
        "num_key_value_heads": 32,
    },
    constants={"norm.kind": "layernorm"},
    agree={"norm_eps": "layer_norm_eps"},  # in StableLM-3B's file, beside it
    only={"rotary_scaling_factor": (1.0,)},  # there too, read by nobody
    head_dim=False,
    tensors=table(
        ENDS,
        ATTENTION,
        {
            "model.layers.{i}.self_attn.q_layernorm.norms.{h}.weight": "blocks.{i}.attention.q_norm.weight",
            "model.layers.{i}.self_attn.k_layernorm.norms.{h}.weight": "blocks.{i}.attention.k_norm.weight",
        },
        GATED,
        PRE,
    ),
    rope=RopeForm(fraction=0.25, partial=True),
    read=_stablelm,
    write=_write_stablelm,
)
FAMILIES = (OLMO, COHERE, COHERE2, PHI, PHI3, NEMOTRON, STABLELM)
