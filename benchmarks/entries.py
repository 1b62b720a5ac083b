"""What is timed in the training benchmark: models, batches, and one step of each entry.

run: the command `train` with all that it does beside the step (run_turn.py). engine: our engine as a run
uses it, without loader, judge and metrics. Both with compiled blocks. module: our model in a bare loop with
the same forms. peer, peer_compiled: transformers' Llama (with a window: Mistral) in a plain loop, as it comes
and behind torch.compile. torchtitan: its Llama 3, blocks compiled, its SDPA, where it is installed.
B micro-batch rows, S sequence length, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.typed import parse
from megamodel.attention import GroupedAttention
from megamodel.config import Model
from megamodel.data.batch import Batch
from megamodel.feedforward import FeedForward
from megamodel.optim import Optim, adamw


@dataclass(frozen=True)
class Shape:
    """What all entries of a turn are given."""

    model: Model
    rows: int
    precision: Literal["fp32", "bf16"]
    device: torch.device


FIXED = Model(
    vocab_size=32000,
    d_model=512,
    n_layers=8,
    tie_embeddings=False,
    attention=GroupedAttention.Config(n_heads=8, n_kv_heads=4, head_width=64),
    feedforward=FeedForward.Config(d_ff=1376),
)
MODELS = {
    "fixed": FIXED,
    "long": replace(FIXED, attention=replace(FIXED.attention, window=1024)),
    # As TinyLlama 1.1B, for a GPU.
    "billion": Model(
        vocab_size=32000,
        d_model=2048,
        n_layers=22,
        tie_embeddings=False,
        attention=GroupedAttention.Config(n_heads=32, n_kv_heads=4, head_width=64),
        feedforward=FeedForward.Config(d_ff=5632),
    ),
    "smoke": Model(
        vocab_size=512,
        d_model=64,
        n_layers=2,
        tie_embeddings=False,
        attention=GroupedAttention.Config(n_heads=4, n_kv_heads=2, head_width=16),
        feedforward=FeedForward.Config(d_ff=176),
    ),
}
OPTIM = Optim(lr=3e-4)
BATCHES = 4  # different ones, taken in turn

CPU = torch.device("cpu")
Step = Callable[[Batch], float]  # one update, its loss


def batches(model: Model, rows: int, length: int) -> list[Batch]:
    """Random tokens, the same for every entry; targets are the next ones."""
    source = torch.Generator().manual_seed(0)
    made = []
    for number in range(BATCHES):
        ids = torch.randint(model.vocab_size, (rows, length + 1), generator=source)
        positions = torch.arange(length).expand(rows, length).contiguous()
        samples = torch.arange(number * rows, (number + 1) * rows)
        made.append(Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, samples))
    return made


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


def master_loop(
    module: nn.Module, objective: Callable[[Batch], tuple[Tensor, Tensor]], precision: str
) -> Step:
    """Forward, backward, clipping and fused AdamW on fp32 masters of 16-bit weights, nothing around them.

    objective gives what is differentiated and the loss that is told.
    """
    if precision == "fp32":
        masters = list(module.parameters())
    else:
        masters = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
        module.bfloat16()
    parameters = list(module.parameters())
    holder = nn.ParameterList(masters)
    optimizer = adamw(holder, OPTIM)
    module.train()

    def step(batch: Batch) -> float:
        total, loss = objective(batch)
        total.backward()
        if precision == "bf16":
            for master, parameter in zip(masters, parameters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, OPTIM.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if precision == "bf16":
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
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


def forms(
    precision: Any, switches: dict[str, str] | None = None, device: torch.device = CPU
) -> tuple[Any, Any]:
    """(choices of a run, its settings): with compiled blocks, or what the switches say and nothing else."""
    from megamodel.choose import choose, this_machine
    from megamodel.kernels.config import Kernels

    machine = this_machine(device)
    if switches is None:
        settings = Kernels(compile="none" if machine.compiler else "block")
    else:
        settings = parse(Kernels, {k: v for k, v in switches.items() if not k.startswith("recompute")})
    return choose(settings, machine, precision), settings


def build_module(shape: Shape) -> tuple[Step, int]:
    from megamodel.choose import chunked, equip
    from megamodel.kernels.head import linear_cross_entropy
    from megamodel.model import Transformer

    choices, settings = forms(shape.precision, device=shape.device)
    module = Transformer(shape.model, equip=lambda part: equip(part, choices)).to(shape.device)
    how = chunked(choices, settings)

    def objective(batch: Batch) -> tuple[Tensor, Tensor]:
        share = torch.tensor(1 / batch.targets.numel()).to(shape.device)
        parts = (batch.tokens, batch.positions, batch.samples, batch.targets)
        *stream, targets = (part.to(shape.device) for part in parts)
        total, loss, _, _ = linear_cross_entropy(module.project(*stream), targets, share, how=how)
        return total, loss.mean()

    return master_loop(module, objective, shape.precision), sum(p.numel() for p in module.parameters())


def build_engine(shape: Shape, switches: dict[str, str] | None = None) -> tuple[Step, int]:
    import torch.distributed as dist

    from megamodel.choose import chunked, equip
    from megamodel.dropout import Clock
    from megamodel.loss import Loss
    from megamodel.model import layers
    from parallel import start
    from parallel.engine import Engine
    from parallel.mesh import build_mesh
    from parallel.tensor import TensorParallel

    model, precision = shape.model, shape.precision
    if not dist.is_initialized():
        backend = "nccl" if shape.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        start.adopt(0)
        torch.set_flush_denormal(True)  # as a run does
    clock = Clock()
    choices, settings = forms(precision, switches, shape.device)
    again: Any = (switches or {}).get("recompute", "none")
    engine = Engine(
        layers(
            model,
            seed=0,
            documents=False,
            parallel=TensorParallel(),
            recompute=again,
            recompute_every=int((switches or {}).get("recompute_every", 1)),
            clock=clock,
            equip=lambda part: equip(part, choices),
        ),
        Loss(z_weight=model.z_loss, consume=True, chunked=chunked(choices, settings)),
        mesh=build_mesh(tp=1, pp=1, device=shape.device),
        make_optimizer=lambda module: adamw(module, OPTIM),
        precision=precision,
        micro_batch=shape.rows,
        accumulation=1,
        clip_norm=OPTIM.clip_norm,
    )
    tried = 0

    def step(batch: Batch) -> float:
        nonlocal tried
        tried += 1
        signals = engine.train_step([batch], lr=OPTIM.lr, tried=tried).signals
        assert signals is not None
        return signals.loss

    return step, sum(p.numel() for p in engine.module.parameters())


BUILDERS = {
    "engine": build_engine,
    "module": build_module,
    "peer": build_peer,
    "peer_compiled": build_compiled_peer,
    "torchtitan": build_torchtitan,
}
