"""Bytes of live tensors, followed operation by operation: what a step holds, without the noise of RSS."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from conf.typed import parse
from megamodel.choose import choose, chunked, equip, this_machine
from megamodel.config import Model
from megamodel.data.batch import Batch
from megamodel.kernels.config import Kernels
from megamodel.loss import Loss
from megamodel.model import layers
from megamodel.optim import Optim, adamw
from parallel.config import Parallel
from parallel.engine import Engine
from parallel.mesh import build_mesh
from parallel.tensor import TensorParallel, VocabularyShard


class Live(TorchDispatchMode):
    """Counts the storages that operations make, from their birth to their end. `limit`: larger ones are left
    out, such as DeepSpeed's bucket of 2 GB, which a CPU never touches."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.now, self.peak = limit, 0, 0
        self.known: dict[int, int] = {}

    def see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or not size or size > self.limit:
            return
        self.known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, key)

    def gone(self, key: int) -> None:
        self.now -= self.known.pop(key, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.see(value)
        return result


def peak_of_a_step(
    raw: dict[str, Any], split: dict[str, Any], precision: str, micro: int, accumulation: int, length: int,
    documents: bool,
) -> int:  # fmt: skip
    """On each rank: the most bytes of live tensors within the second step of the engine."""
    model, parallel = parse(Model, raw), parse(Parallel, split)
    mesh = build_mesh(tp=parallel.tp, pp=parallel.pp, device=torch.device("cpu"))
    shard = VocabularyShard(model.vocab_size, mesh.tp)
    choices = choose(Kernels(), this_machine(mesh.device), precision)  # type: ignore[arg-type]
    live = Live(limit=1_000_000_000)
    with live:
        engine = Engine(
            layers(
                model,
                seed=1,
                documents=documents,
                parallel=TensorParallel(mesh.tp, sequence=parallel.sequence_parallel),
                recompute=parallel.recompute,
                recompute_every=parallel.recompute_every,
                equip=lambda module: equip(module, choices),
            ),
            Loss(
                z_weight=0.0,
                start=shard.start,
                group=mesh.tp,
                consume=True,
                chunked=chunked(choices, Kernels()),
            ),
            mesh=mesh,
            make_optimizer=lambda module: adamw(module, parse(Optim, {})),
            precision=precision,  # type: ignore[arg-type]
            micro_batch=micro,
            accumulation=accumulation,
            clip_norm=1.0,
        )
        for step in (1, 2):
            live.peak = 0
            engine.train_step([batch(model, micro, length) for _ in range(accumulation)], lr=1e-3, tried=step)
    engine.close()
    return live.peak


def batch(model: Model, rows: int, length: int) -> Batch:
    tokens = torch.randint(model.vocab_size, (rows, length + 1))
    positions = torch.arange(length).repeat(rows, 1)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, torch.arange(rows))
