"""The entries of the training benchmark that are ours, and all by name.

run: the command `train` with all that it does beside the step (run_turn.py). engine: our engine as a run
uses it, without loader, judge and metrics. Both with compiled blocks. module: our model in a bare loop with
the same forms. The others are in peers.py. B micro-batch rows, S sequence length, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import PEERS
from benchmarks.shapes import CPU, OPTIM, Shape, Step
from conf.typed import parse
from megamodel.data.batch import Batch
from megamodel.optim import adamw


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
    from parallel import start

    if shape.device.type == "cpu":
        start.prepare_cpu()  # as a run does
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
        if backend == "gloo":
            start.prepare_cpu()  # as a run does
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


BUILDERS: dict[str, Callable[..., tuple[Step, int]]] = {
    "engine": build_engine,
    "module": build_module,
    **PEERS,
}
