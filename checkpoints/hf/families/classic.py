"""GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM, Falcon: LayerNorm with biases, fused projections."""

from typing import Any

from checkpoints.hf.families.llama_like import (
    both_biases,
    write_both_biases,
)
from checkpoints.hf.families.names import (
    ATTENTION,
    DENSE,
    LAYER_NORM,
    TIED,
    USUAL,
    table,
)
from checkpoints.hf.family import Family
from checkpoints.hf.fields import Fields, put
from checkpoints.hf.rope import BASES, SHARES, RopeForm, read_rope, rope_parameters, write_rope
from megamodel.config import Model
from megamodel.position import Alibi, Learned, Rope

ALL_BIASES = {"attention.bias": True, "attention.output_bias": True, "feedforward.bias": True}
PLAIN = {"norm.kind": "layernorm", "feedforward.gated": False}
FUSED = ("rows", "blocks.{i}.attention.q.*", "blocks.{i}.attention.k.*", "blocks.{i}.attention.v.*")
GROUPS = ("groups", *FUSED[1:])
CLAMPED_BUFFERS = (r".*\.attn\.bias", r".*\.attn\.masked_bias", r".*\.attention\.bias", r".*inv_freq")


def _gpt2(fields: Fields, raw: dict[str, Any]) -> None:
    inner = fields.take("n_inner", None)
    put(raw, "feedforward.d_ff", 4 * raw["d_model"] if inner is None else inner)
    put(raw, "position.kind", "learned")
    if not fields.take("scale_attn_weights", True):
        put(raw, "attention.scale", 1.0)


def _write_gpt2(model: Model, config: dict[str, Any]) -> None:
    if not isinstance(model.position, Learned.Config):
        raise ValueError("GPT-2 has learned positions")
    config |= {"n_inner": model.feedforward.d_ff, "n_positions": model.position.max_positions}
    config["scale_attn_weights"] = model.attention.scale != 1.0


GPT_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    aliases=GPT_NAMES,
    fields={
        "vocab_size": "vocab_size",
        "n_embd": "d_model",
        "n_layer": "n_layers",
        "n_head": "attention.n_heads",
        "n_positions": "position.max_positions",
        "layer_norm_epsilon": "norm.eps",
        "tie_word_embeddings": "tie_embeddings",
        "scale_attn_by_inverse_layer_idx": "attention.scale_by_layer",
        "attn_pdrop": "dropout.attention",
        "resid_pdrop": "dropout.residual",
        "embd_pdrop": "dropout.embedding",
    },
    defaults={
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_by_inverse_layer_idx": False,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "activation_function": "gelu_new",
        "n_positions": 1024,
    },
    constants={**PLAIN, **ALL_BIASES},
    silent=("reorder_and_upcast_attn",),
    activation="activation_function",
    kv_heads=None,
    head_dim=False,
    longest=None,
    tensors=table(
        {
            "transformer.wte.weight": "embedding.weight",
            "transformer.wpe.weight": "position.weight",
            "lm_head.weight": "head.weight",
            "transformer.ln_f.*": "final_norm.*",
            "transformer.h.{i}.ln_1.*": "blocks.{i}.attention_norm.*",
            "transformer.h.{i}.ln_2.*": "blocks.{i}.feedforward_norm.*",
            "transformer.h.{i}.attn.c_attn.*": ("transposed", *FUSED[1:]),
            "transformer.h.{i}.attn.c_proj.*": ("transposed", "blocks.{i}.attention.output.*"),
            "transformer.h.{i}.mlp.c_fc.*": ("transposed", "blocks.{i}.feedforward.up.*"),
            "transformer.h.{i}.mlp.c_proj.*": ("transposed", "blocks.{i}.feedforward.down.*"),
        }
    ),
    read=_gpt2,
    write=_write_gpt2,
    prefix="transformer.",
    ignored=CLAMPED_BUFFERS,
)


def exact_fraction(rotated: int, width: int) -> float:
    """The share of a head of this width that gives exactly so many rotated components."""
    fraction = rotated / width
    return fraction if int(width * fraction) == rotated else (rotated + 0.5) / width


def _gptj(fields: Fields, raw: dict[str, Any]) -> None:
    inner = fields.take("n_inner", None)
    put(raw, "feedforward.d_ff", 4 * raw["d_model"] if inner is None else inner)
    width = raw["attention"]["head_width"]
    fraction = exact_fraction(fields.count("rotary_dim", 64), width)
    raw["position"] = {"kind": "rope", "pairs": "interleaved", "fraction": fraction}


def _write_gptj(model: Model, config: dict[str, Any]) -> None:
    if not isinstance(model.position, Rope.Config):
        raise ValueError("GPT-J has rotary positions")
    config["rotary_dim"] = int(model.attention.rotary_width * model.position.fraction)
    config["n_inner"] = model.feedforward.d_ff


GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    aliases=GPT_NAMES,
    fields={
        "vocab_size": "vocab_size",
        "n_embd": "d_model",
        "n_layer": "n_layers",
        "n_head": "attention.n_heads",
        "layer_norm_epsilon": "norm.eps",
        "tie_word_embeddings": "tie_embeddings",
        "attn_pdrop": "dropout.attention",
        "resid_pdrop": "dropout.residual",
        "embd_pdrop": "dropout.embedding",
    },
    defaults={
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "activation_function": "gelu_new",
    },
    constants={**PLAIN, "feedforward.bias": True, "logits.bias": True, "layout": "parallel_shared"},
    silent=("rotary", "scale_attn_weights"),
    activation="activation_function",
    kv_heads=None,
    head_dim=False,
    longest="n_positions",
    tensors=table(
        {
            "transformer.wte.weight": "embedding.weight",
            "lm_head.*": "head.*",
            "transformer.ln_f.*": "final_norm.*",
            "transformer.h.{i}.ln_1.*": "blocks.{i}.attention_norm.*",
            "transformer.h.{i}.attn.q_proj.weight": "blocks.{i}.attention.q.weight",
            "transformer.h.{i}.attn.k_proj.weight": "blocks.{i}.attention.k.weight",
            "transformer.h.{i}.attn.v_proj.weight": "blocks.{i}.attention.v.weight",
            "transformer.h.{i}.attn.out_proj.weight": "blocks.{i}.attention.output.weight",
            "transformer.h.{i}.mlp.fc_in.*": "blocks.{i}.feedforward.up.*",
            "transformer.h.{i}.mlp.fc_out.*": "blocks.{i}.feedforward.down.*",
        }
    ),
    read=_gptj,
    write=_write_gptj,
    prefix="transformer.",
    ignored=CLAMPED_BUFFERS,
)


def _neox(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    if "attention_bias" not in fields.raw:
        raw["attention"] |= {"bias": True, "output_bias": True}
    raw["layout"] = "parallel_two" if fields.take("use_parallel_residual", True) else "pre"


def _write_neox(model: Model, config: dict[str, Any]) -> None:
    write_both_biases(model, config)
    config["use_parallel_residual"] = model.layout == "parallel_two"


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields={**DENSE, **LAYER_NORM, "hidden_dropout": "dropout.residual"},
    defaults={**USUAL, "layer_norm_eps": 1e-5, "hidden_dropout": 0.0, "hidden_act": "gelu"},
    constants={**PLAIN, "feedforward.bias": True},
    kv_heads=None,
    head_dim=False,
    rope=RopeForm(fraction=0.25, partial=True, base="rotary_emb_base", share="rotary_pct"),
    # In GPT-NeoX-20B's files; the class drops attention_dropout and hidden_dropout, in training alone.
    silent=("attention_probs_dropout_prob", "hidden_dropout_prob"),
    tensors=table(
        {
            "gpt_neox.embed_in.weight": "embedding.weight",
            "embed_out.weight": "head.weight",
            "gpt_neox.final_layer_norm.*": "final_norm.*",
            "gpt_neox.layers.{i}.input_layernorm.*": "blocks.{i}.attention_norm.*",
            "gpt_neox.layers.{i}.post_attention_layernorm.*": "blocks.{i}.feedforward_norm.*",
            "gpt_neox.layers.{i}.attention.query_key_value.*": GROUPS,
            "gpt_neox.layers.{i}.attention.dense.*": "blocks.{i}.attention.output.*",
            "gpt_neox.layers.{i}.mlp.dense_h_to_4h.*": "blocks.{i}.feedforward.up.*",
            "gpt_neox.layers.{i}.mlp.dense_4h_to_h.*": "blocks.{i}.feedforward.down.*",
        }
    ),
    read=_neox,
    write=_write_neox,
    ignored=CLAMPED_BUFFERS,
)


def _opt(fields: Fields, raw: dict[str, Any]) -> None:
    width = fields.take("word_embed_proj_dim", None)
    if width not in (None, raw["d_model"]):
        raise ValueError(
            f"config.json: word_embed_proj_dim = {width} projects the embedding to hidden_size = "
            f"{raw['d_model']} and back before the head (OPT-350M); a model here has no such projections"
        )
    raw["layout"] = "pre" if fields.take("do_layer_norm_before", True) else "post"
    raw["position"] = {"kind": "learned", "offset": 2}
    put(raw, "position.max_positions", fields.take("max_position_embeddings", 2048))
    bias, affine = fields.take("enable_bias", True), fields.take("layer_norm_elementwise_affine", True)
    raw["attention"] |= {"bias": bias, "output_bias": bias}
    put(raw, "feedforward.bias", bias)
    raw["norm"] |= {"gain": affine, "bias": affine}
    if fields.take("_remove_final_layer_norm", False) and raw["layout"] == "pre":
        raise ValueError(
            "config.json: _remove_final_layer_norm = true with do_layer_norm_before = true; a model that has "
            "norms before its sublayers has one at its end too here"
        )


def _write_opt(model: Model, config: dict[str, Any]) -> None:
    config["word_embed_proj_dim"] = model.d_model
    config["do_layer_norm_before"] = model.layout == "pre"
    config["enable_bias"] = model.feedforward.bias
    config["layer_norm_elementwise_affine"] = model.norm.gain


def _opt_tensors(model: Model) -> dict[str, Any]:
    suffix = "norm" if model.layout == "pre" else "sum_norm"
    layer = "model.decoder.layers.{i}"
    names = {theirs.replace("model.layers.{i}", layer): ours for theirs, ours in ATTENTION.items()}
    names[f"{layer}.self_attn.out_proj.*"] = names.pop(f"{layer}.self_attn.o_proj.*")
    return names | {
        "model.decoder.embed_tokens.weight": "embedding.weight",
        "model.decoder.embed_positions.weight": "position.weight",
        "lm_head.weight": "head.weight",
        "model.decoder.final_layer_norm.*": "final_norm.*",
        f"{layer}.self_attn_layer_norm.*": f"blocks.{{i}}.attention_{suffix}.*",
        f"{layer}.final_layer_norm.*": f"blocks.{{i}}.feedforward_{suffix}.*",
        f"{layer}.fc1.*": "blocks.{i}.feedforward.up.*",
        f"{layer}.fc2.*": "blocks.{i}.feedforward.down.*",
    }


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    fields={
        **{theirs: ours for theirs, ours in DENSE.items() if theirs != "intermediate_size"},
        "ffn_dim": "feedforward.d_ff",
        "dropout": "dropout.residual",
    },
    defaults={**TIED, "activation_function": "relu", "dropout": 0.1},
    constants={**PLAIN, "norm.eps": 1e-5},
    only={"activation_dropout": (0.0,)},
    activation="activation_function",
    kv_heads=None,
    head_dim=False,
    tensors=_opt_tensors,
    read=_opt,
    write=_write_opt,
    prefix="model.",
)


def _bloom(fields: Fields, raw: dict[str, Any]) -> None:
    width, inner = raw["d_model"], fields.take("n_inner", None)
    put(raw, "feedforward.d_ff", 4 * width if inner is None else inner)
    if inner not in (None, 4 * width):
        raise ValueError(f"config.json: n_inner = {inner} is not supported for bloom, only {4 * width}")
    if fields.take("slow_but_exact", False) and fields.take("pretraining_tp", 1) > 1:
        raise ValueError(
            f"config.json: slow_but_exact = true with pretraining_tp = {fields.take('pretraining_tp')} adds "
            "other partial products, the biases in each; set slow_but_exact to false"
        )


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "n_layer": "n_layers",
        "n_head": "attention.n_heads",
        "layer_norm_epsilon": "norm.eps",
        "tie_word_embeddings": "tie_embeddings",
        "attention_dropout": "dropout.attention",
        "hidden_dropout": "dropout.residual",
    },
    defaults={
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    constants={
        **PLAIN,
        **ALL_BIASES,
        "embedding.norm": True,
        "position.kind": "alibi",
        "feedforward.activation": "gelu_tanh",
    },
    only={"apply_residual_connection_post_layernorm": (False,)},
    silent=(  # of Megatron's training, in BLOOM's files; the class has none of them
        "seq_length attention_softmax_in_fp32 masked_softmax_fusion offset_alibi "
        "bias_dropout_fusion skip_bias_add skip_bias_add_qkv"
    ).split(),  # type: ignore[arg-type]
    activation=None,
    kv_heads=None,
    head_dim=False,
    longest=None,
    tensors=table(
        {
            "transformer.word_embeddings.weight": "embedding.weight",
            "lm_head.weight": "head.weight",
            "transformer.word_embeddings_layernorm.*": "embedding_norm.*",
            "transformer.ln_f.*": "final_norm.*",
            "transformer.h.{i}.input_layernorm.*": "blocks.{i}.attention_norm.*",
            "transformer.h.{i}.post_attention_layernorm.*": "blocks.{i}.feedforward_norm.*",
            "transformer.h.{i}.self_attention.query_key_value.*": GROUPS,
            "transformer.h.{i}.self_attention.dense.*": "blocks.{i}.attention.output.*",
            "transformer.h.{i}.mlp.dense_h_to_4h.*": "blocks.{i}.feedforward.up.*",
            "transformer.h.{i}.mlp.dense_4h_to_h.*": "blocks.{i}.feedforward.down.*",
        }
    ),
    read=_bloom,
    prefix="transformer.",
)


def _falcon(fields: Fields, raw: dict[str, Any]) -> None:
    heads = raw["attention"]["n_heads"]
    new, queries = fields.take("new_decoder_architecture", False), fields.take("multi_query", True)
    given = fields.take("num_kv_heads", None) or heads
    raw["attention"]["n_kv_heads"] = given if new else (1 if queries else heads)
    bias = fields.take("bias", False)
    raw["attention"] |= {"bias": bias, "output_bias": bias}
    put(raw, "feedforward.bias", bias)
    put(raw, "feedforward.d_ff", fields.take("ffn_hidden_size", None) or 4 * raw["d_model"])
    parallel = fields.take("parallel_attn", True) or new
    norms = fields.take("num_ln_in_parallel_attn", None) or (2 if new else 1)
    raw["layout"] = "pre" if not parallel else ("parallel_two" if new and norms == 2 else "parallel_shared")
    inner = raw["feedforward"]["d_ff"] / raw["d_model"]
    fields.agree("ff_factor", inner, "ffn_hidden_size / hidden_size")  # in Falcon-11B's file
    longest = fields.take("max_position_embeddings", 2048)
    if fields.take("alibi", False):
        raw["position"] = {"kind": "alibi", "before_scale": True, "round_slopes": True}
        fields.taken.update(("rope_parameters", "rope_scaling", *BASES, *SHARES))  # nothing turns
    else:
        raw["position"] = read_rope(rope_parameters(fields, RopeForm()), longest=longest)


def _write_falcon(model: Model, config: dict[str, Any]) -> None:
    attention = model.attention
    new = model.layout == "parallel_two" or attention.n_kv_heads not in (1, attention.n_heads)
    config |= {
        "new_decoder_architecture": new,
        "multi_query": attention.n_kv_heads == 1,
        "num_kv_heads": attention.n_kv_heads,
        "num_ln_in_parallel_attn": 2 if model.layout == "parallel_two" else 1,
        "parallel_attn": model.layout != "pre",
        "bias": model.feedforward.bias,
        "ffn_hidden_size": model.feedforward.d_ff,
        "alibi": isinstance(model.position, Alibi.Config),
    }
    if isinstance(model.position, Rope.Config):
        config["rope_parameters"] = write_rope(model.position, partial=False)


def _falcon_tensors(model: Model) -> dict[str, Any]:
    two, layer = model.layout == "parallel_two", "transformer.h.{i}"
    return {
        "transformer.word_embeddings.weight": "embedding.weight",
        "lm_head.weight": "head.weight",
        "transformer.ln_f.*": "final_norm.*",
        f"{layer}.{'ln_attn' if two else 'input_layernorm'}.*": "blocks.{i}.attention_norm.*",
        f"{layer}.{'ln_mlp' if two else 'post_attention_layernorm'}.*": "blocks.{i}.feedforward_norm.*",
        f"{layer}.self_attention.query_key_value.*": GROUPS,
        f"{layer}.self_attention.dense.*": "blocks.{i}.attention.output.*",
        f"{layer}.mlp.dense_h_to_4h.*": "blocks.{i}.feedforward.up.*",
        f"{layer}.mlp.dense_4h_to_h.*": "blocks.{i}.feedforward.down.*",
    }


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    aliases={"n_embed": "hidden_size"},
    only={"apply_residual_connection_post_layernorm": (False,)},  # in Falcon-7B's file, read by nobody
    fields={
        **{theirs: ours for theirs, ours in DENSE.items() if theirs != "intermediate_size"},
        "layer_norm_epsilon": "norm.eps",
        "hidden_dropout": "dropout.residual",
    },
    defaults={**TIED, "layer_norm_epsilon": 1e-5, "hidden_dropout": 0.0, "activation": "gelu"},
    constants=PLAIN,
    activation="activation",
    kv_heads=None,
    head_dim=False,
    tensors=_falcon_tensors,
    read=_falcon,
    write=_write_falcon,
    ignored=CLAMPED_BUFFERS,
)


FAMILIES = (GPT2, GPTJ, GPT_NEOX, OPT, BLOOM, FALCON)
