"""The peers of the training benchmark, each as its own users run it, in one plain loop.

peer, peer_compiled: transformers' Llama (with a window: Mistral), as it comes and behind torch.compile.
torchtitan: its Llama 3, blocks compiled, its SDPA. litgpt: its GPT behind torch.compile. olmo_core: its
Llama-like transformer, blocks compiled, its SDPA. Where they are installed: none is needed but transformers.
B micro-batch rows, S sequence length, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import OPTIM, Shape, Step
from megamodel.data.batch import Batch
from megamodel.optim import adamw


def plain_loop(module: nn.Module, logits: Callable[[Tensor], Tensor], shape: Shape) -> Step:
    """Forward, backward, clipping and fused AdamW as anybody would write them; bf16 by autocast."""
    is_bf16 = shape.precision == "bf16"
    optimizer = adamw(module, OPTIM)
    parameters = list(module.parameters())
    module.train()

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        tokens, targets = batch.tokens.to(shape.device), batch.targets.to(shape.device)
        with torch.autocast(shape.device.type, torch.bfloat16, enabled=is_bf16):
            scores = logits(tokens)  # (B, S, V)
        loss = F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, OPTIM.clip_norm)
        optimizer.step()
        return loss.item()

    return step


def build_peer(shape: Shape, *, compiled: bool = False) -> tuple[Step, int]:
    import transformers

    model = shape.model
    window = model.attention.window
    configuration = transformers.LlamaConfig if window is None else transformers.MistralConfig
    more = {} if window is None else {"sliding_window": window}
    config = configuration(
        vocab_size=model.vocab_size,
        hidden_size=model.d_model,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.attention.n_heads,
        num_key_value_heads=model.attention.n_kv_heads,
        head_dim=model.attention.head_width,
        intermediate_size=model.feedforward.d_ff,
        rms_norm_eps=model.norm.eps,
        tie_word_embeddings=model.tie_embeddings,
        attn_implementation="sdpa",
        **more,
    )
    peer = transformers.AutoModelForCausalLM.from_config(config).to(shape.device)
    run = torch.compile(peer, dynamic=False) if compiled else peer
    step = plain_loop(peer, lambda tokens: run(input_ids=tokens, use_cache=False).logits, shape)
    return step, sum(p.numel() for p in peer.parameters())


def build_compiled_peer(shape: Shape) -> tuple[Step, int]:
    return build_peer(shape, compiled=True)


def build_torchtitan(shape: Shape) -> tuple[Step, int]:
    from torchtitan.models import llama3  # type: ignore[import-not-found]
    from torchtitan.models.common.attention import (  # type: ignore[import-not-found]
        ScaledDotProductAttention,
    )

    model = shape.model
    width, vocabulary = model.d_model, model.vocab_size
    blocks = llama3._build_llama3_layers(
        n_layers=model.n_layers,
        dim=width,
        n_heads=model.attention.n_heads,
        n_kv_heads=model.attention.n_kv_heads,
        hidden_dim=model.feedforward.d_ff,
        rope=llama3.ComplexRoPE.Config(dim=model.attention.head_width, max_seq_len=4096, theta=1e4),
        attn_backend="flex",  # has no backward pass on a CPU: replaced by its SDPA
    )
    for block in blocks:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    peer = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=width, out_features=vocabulary, param_init=llama3._output_linear_init(width)
        ),
        layers=blocks,
    ).build()
    peer.init_states()
    peer = peer.to(shape.device)
    for block in peer.layers.values() if hasattr(peer.layers, "values") else peer.layers:
        block.compile(dynamic=False)
    return plain_loop(peer, peer, shape), sum(p.numel() for p in peer.parameters())


def build_litgpt(shape: Shape) -> tuple[Step, int]:
    import litgpt  # type: ignore[import-not-found]

    model = shape.model
    config = litgpt.Config(
        block_size=4096,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.vocab_size,
        n_layer=model.n_layers,
        n_embd=model.d_model,
        n_head=model.attention.n_heads,
        n_query_groups=model.attention.n_kv_heads,
        head_size=model.attention.head_width,
        intermediate_size=model.feedforward.d_ff,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=model.norm.eps,
        mlp_class_name="LLaMAMLP",
        sliding_window_size=model.attention.window,
    )
    peer = litgpt.GPT(config).to(shape.device)
    run = torch.compile(peer, dynamic=False)
    return plain_loop(peer, run, shape), sum(p.numel() for p in peer.parameters())


def build_olmo_core(shape: Shape) -> tuple[Step, int]:
    from olmo_core.nn.attention import (  # type: ignore[import-not-found]
        AttentionBackendName,
        SlidingWindowAttentionConfig,
    )
    from olmo_core.nn.feed_forward import FeedForwardConfig  # type: ignore[import-not-found]
    from olmo_core.nn.transformer import TransformerConfig  # type: ignore[import-not-found]

    model = shape.model
    more: dict[str, Any] = {}
    if model.attention.window is not None:
        more["sliding_window"] = SlidingWindowAttentionConfig(
            pattern=[model.attention.window],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=False,
        )
    peer = TransformerConfig.llama_like(
        d_model=model.d_model,
        vocab_size=model.vocab_size,
        n_layers=model.n_layers,
        n_heads=model.attention.n_heads,
        n_kv_heads=model.attention.n_kv_heads,
        head_dim=model.attention.head_width,
        layer_norm_eps=model.norm.eps,
        rope_theta=10_000,
        attn_backend=AttentionBackendName.torch,
        feed_forward=FeedForwardConfig(hidden_size=model.feedforward.d_ff, bias=False),
        **more,
    ).build(init_device="cpu")
    peer.init_weights(device=torch.device("cpu"))
    peer = peer.to(shape.device)
    peer.apply_compile()
    return plain_loop(peer, peer, shape), sum(p.numel() for p in peer.parameters())


PEERS: dict[str, Callable[[Shape], tuple[Step, int]]] = {
    "peer": build_peer,
    "peer_compiled": build_compiled_peer,
    "torchtitan": build_torchtitan,
    "litgpt": build_litgpt,
    "olmo_core": build_olmo_core,
}
