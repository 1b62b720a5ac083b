"""One turn of the training benchmark in a process of its own; its last line is a JSON object.

run: the command `train` with all that it does beside the step. engine: our engine as a run uses it, without
loader, judge and metrics. Both with compiled blocks. module: our model in a bare loop with the same forms.
peer, peer_compiled: transformers' Llama (with a window: Mistral) in a plain loop, as it comes and behind
torch.compile. torchtitan: its Llama 3, blocks compiled, its SDPA, where it is installed. matmul: the peak.
B micro-batch rows, S sequence length, V vocabulary.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.run_turn import train
from conf.typed import parse
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
    "long": Model(
        vocab_size=32000,
        d_model=512,
        n_layers=8,
        tie_embeddings=False,
        attention=GroupedAttention.Config(n_heads=8, n_kv_heads=4, head_width=64, window=1024),
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


def build_peer(model: Model, rows: int, precision: str, *, compiled: bool = False) -> tuple[Step, int]:
    import transformers

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
    peer = transformers.AutoModelForCausalLM.from_config(config)
    run = torch.compile(peer) if compiled else peer
    step = plain_loop(peer, lambda tokens: run(input_ids=tokens, use_cache=False).logits, precision)
    return step, sum(p.numel() for p in peer.parameters())


def build_compiled_peer(model: Model, rows: int, precision: str) -> tuple[Step, int]:
    return build_peer(model, rows, precision, compiled=True)


def build_torchtitan(model: Model, rows: int, precision: str) -> tuple[Step, int]:
    from torchtitan.models import llama3  # type: ignore[import-not-found]
    from torchtitan.models.common.attention import (  # type: ignore[import-not-found]
        ScaledDotProductAttention,
    )

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
    for block in peer.layers.values() if hasattr(peer.layers, "values") else peer.layers:
        block.compile()
    return plain_loop(peer, peer, precision), sum(p.numel() for p in peer.parameters())


def forms(precision: Any, switches: dict[str, str] | None = None) -> tuple[Any, Any]:
    """(choices of a run, its settings): with compiled blocks, or what the switches say and nothing else."""
    from megamodel.choose import choose, this_machine
    from megamodel.kernels.config import Kernels

    machine = this_machine(torch.device("cpu"))
    if switches is None:
        settings = Kernels(compile="none" if machine.compiler else "block")
    else:
        settings = parse(Kernels, {k: v for k, v in switches.items() if not k.startswith("recompute")})
    return choose(settings, machine, precision), settings


def build_module(model: Model, rows: int, precision: str) -> tuple[Step, int]:
    from megamodel.choose import chunked, equip
    from megamodel.kernels.head import linear_cross_entropy
    from megamodel.model import Transformer

    choices, settings = forms(precision)
    module = Transformer(model, equip=lambda part: equip(part, choices))
    how = chunked(choices, settings)

    def objective(batch: Batch) -> tuple[Tensor, Tensor]:
        share = torch.tensor(1 / batch.targets.numel())
        total, loss, _, _ = linear_cross_entropy(
            module.project(batch.tokens, batch.positions, batch.samples), batch.targets, share, how=how
        )
        return total, loss.mean()

    return master_loop(module, objective, precision), sum(p.numel() for p in module.parameters())


def build_engine(
    model: Model, rows: int, precision: Any, switches: dict[str, str] | None = None
) -> tuple[Step, int]:
    import torch.distributed as dist

    from megamodel.choose import chunked, equip
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
        torch.set_flush_denormal(True)  # as a run does
    clock = Clock()
    choices, settings = forms(precision, switches)
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


BUILDERS = {
    "engine": build_engine,
    "module": build_module,
    "peer": build_peer,
    "peer_compiled": build_compiled_peer,
    "torchtitan": build_torchtitan,
}


def more(options: argparse.Namespace) -> dict[str, Any]:
    """Switches, where they are given: for the engine only."""
    return {} if options.switches is None else {"switches": json.loads(options.switches)}


def rehearse(options: argparse.Namespace) -> int:
    """One update of the smallest model, so that every library is loaded; then the memory all that takes."""
    build, model = BUILDERS[options.entry], MODELS["smoke"]
    step, _ = build(model, options.micro_batch, options.precision, **more(options))
    step(batches(model, options.micro_batch, 32)[0])
    del step
    return settle()


def settle() -> int:
    """The memory that is left after what is not used is freed; the peak is counted from here on."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    return memory_bytes("VmRSS")


def training_turn(options: argparse.Namespace) -> dict[str, Any]:
    """Time whole updates; memory is the process's peak beyond what it had after its imports."""
    model = MODELS[options.model]
    imported = rehearse(options)
    build = BUILDERS[options.entry]
    step, parameters = build(model, options.micro_batch, options.precision, **more(options))
    if parameters != parameter_count(model):
        raise ValueError(f"{options.entry} has {parameters} parameters, not {parameter_count(model)}")
    feed = batches(model, options.micro_batch, options.sequence_length)
    seconds, losses = [], []
    for number in range(options.warmup + options.steps):
        begin = time.perf_counter()
        losses.append(step(feed[number % BATCHES]))
        seconds.append(time.perf_counter() - begin)
    return told_of(options, seconds, losses, imported)


def told_of(
    options: argparse.Namespace, seconds: list[float], losses: list[float], imported: int
) -> dict[str, Any]:
    """What a turn prints of its updates; the first ones are not timed."""
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"{options.entry}: a loss is not finite: {losses}")
    timed = statistics.median(seconds[options.warmup :])
    tokens_per_second = options.micro_batch * options.sequence_length / timed
    flops = flops_per_token(MODELS[options.model], options.sequence_length).training
    return {
        "tokens_per_second": tokens_per_second,
        "flops_per_second": tokens_per_second * flops,
        "memory_bytes": memory_bytes("VmHWM") - imported,
        "step_seconds": seconds[options.warmup :],
        "losses": losses,
    }


def run_turn(options: argparse.Namespace) -> dict[str, Any]:
    """The same of the command `train`, seconds from one line of metrics.jsonl to the next."""
    model, shape = MODELS[options.model], {"rows": options.micro_batch, "precision": options.precision}
    with TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, "rehearsal", MODELS["smoke"], length=32, steps=2, **shape)
        imported = settle()
        steps = options.warmup + options.steps
        lines = train(folder, "run", model, length=options.sequence_length, steps=steps, **shape)
    told = [line["time/wall"] for line in lines]
    seconds = [after - before for before, after in itertools.pairwise(told)]
    losses = [line["loss/train"] for line in lines]
    return told_of(options, [math.nan, *seconds], losses, imported)


def matmul_turn(options: argparse.Namespace) -> dict[str, Any]:
    """The best of several square products: what this machine reaches at most, in FLOP/s."""
    size = 256 if options.model == "smoke" else 2048
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
    parser.add_argument("entry", choices=["matmul", "run", *BUILDERS])
    parser.add_argument("--model", choices=MODELS, default="fixed")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--switches", help="JSON of settings of kernels, recompute and recompute_every")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    turn = {"matmul": matmul_turn, "run": run_turn}.get(options.entry, training_turn)
    print(json.dumps(turn(options)))


if __name__ == "__main__":
    main()
