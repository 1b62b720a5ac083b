"""One turn of the training benchmark in a process of its own; its last line is a JSON object.

engine: our engine as a run uses it. module: our model in a plain loop. peer: transformers' Llama in the same
plain loop. matmul: the machine's peak. B micro-batch rows, S sequence length, V vocabulary.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamodel.accounting import flops_per_token, parameter_count
from megamodel.attention import GroupedAttention
from megamodel.config import Model
from megamodel.data.batch import Batch
from megamodel.feedforward import FeedForward
from megamodel.optim import Optim, adamw

MODELS = {
    "fixed": Model(
        vocab_size=32000,
        d_model=512,
        n_layers=8,
        tie_embeddings=False,
        attention=GroupedAttention.Config(n_heads=8, n_kv_heads=4, head_width=64),
        feedforward=FeedForward.Config(d_ff=1376),
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

Step = Callable[[Batch], float]  # one update, its loss


def memory_bytes(field: str) -> int:
    """A field of this process's memory as the kernel counts it: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}; the benchmark needs Linux")


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


def plain_loop(module: nn.Module, logits: Callable[[Tensor], Tensor], precision: str) -> Step:
    """Forward, backward, clipping and fused AdamW as anybody would write them; bf16 by autocast."""
    optimizer = adamw(module, OPTIM)
    parameters = list(module.parameters())
    module.train()

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            scores = logits(batch.tokens)  # (B, S, V)
        loss = F.cross_entropy(scores.float().flatten(0, 1), batch.targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, OPTIM.clip_norm)
        optimizer.step()
        return loss.item()

    return step


def build_peer(model: Model, rows: int, precision: str) -> tuple[Step, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
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
    )
    peer = LlamaForCausalLM(config)
    step = plain_loop(peer, lambda tokens: peer(input_ids=tokens, use_cache=False).logits, precision)
    return step, sum(p.numel() for p in peer.parameters())


def build_module(model: Model, rows: int, precision: str) -> tuple[Step, int]:
    from megamodel.model import Transformer

    module = Transformer(model)
    return plain_loop(module, module, precision), sum(p.numel() for p in module.parameters())


def build_engine(model: Model, rows: int, precision: Any) -> tuple[Step, int]:
    import torch.distributed as dist

    from megamodel.dropout import Clock
    from megamodel.loss import Loss
    from megamodel.model import layers
    from parallel import start
    from parallel.engine import Engine
    from parallel.mesh import build_mesh
    from parallel.tensor import TensorParallel

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        start.adopt(0)
    clock = Clock()
    engine = Engine(
        layers(model, seed=0, documents=False, parallel=TensorParallel(), clock=clock),
        Loss(z_weight=model.z_loss, consume=True),
        mesh=build_mesh(tp=1, pp=1, device=torch.device("cpu")),
        make_optimizer=lambda module: adamw(module, OPTIM),
        precision=precision,
        micro_batch=rows,
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


BUILDERS = {"engine": build_engine, "module": build_module, "peer": build_peer}


def rehearse(options: argparse.Namespace) -> int:
    """One update of the smallest model, so that every library is loaded; then the memory all that takes."""
    build, model = BUILDERS[options.entry], MODELS["smoke"]
    step, _ = build(model, options.micro_batch, options.precision)
    step(batches(model, options.micro_batch, 32)[0])
    del step
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    return memory_bytes("VmRSS")


def training_turn(options: argparse.Namespace) -> dict[str, Any]:
    """Time whole updates; memory is the process's peak beyond what it had after its imports."""
    model = MODELS[options.model]
    imported = rehearse(options)
    step, parameters = BUILDERS[options.entry](model, options.micro_batch, options.precision)
    if parameters != parameter_count(model):
        raise ValueError(f"{options.entry} has {parameters} parameters, not {parameter_count(model)}")
    feed = batches(model, options.micro_batch, options.sequence_length)
    seconds, losses = [], []
    for number in range(options.warmup + options.steps):
        begin = time.perf_counter()
        losses.append(step(feed[number % BATCHES]))
        seconds.append(time.perf_counter() - begin)
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"{options.entry}: a loss is not finite: {losses}")
    timed = statistics.median(seconds[options.warmup :])
    tokens_per_second = options.micro_batch * options.sequence_length / timed
    return {
        "tokens_per_second": tokens_per_second,
        "flops_per_second": tokens_per_second * flops_per_token(model, options.sequence_length).training,
        "memory_bytes": memory_bytes("VmHWM") - imported,
        "step_seconds": seconds,
        "losses": losses,
    }


def matmul_turn(options: argparse.Namespace) -> dict[str, Any]:
    """The best of several square products: what this machine reaches at most, in FLOP/s."""
    size = 2048 if options.model == "fixed" else 256
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = math.inf
    for _ in range(15):
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return {"flops_per_second": 2 * size**3 / best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entry", choices=["matmul", *BUILDERS])
    parser.add_argument("--model", choices=MODELS, default="fixed")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    turn = matmul_turn if options.entry == "matmul" else training_turn
    print(json.dumps(turn(options)))


if __name__ == "__main__":
    main()
