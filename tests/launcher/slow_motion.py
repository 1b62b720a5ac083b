"""A pipeline in slow motion: real ranks, the real engine, and blocks that take a known time."""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor, nn

from megamodel.loss import Loss
from megamodel.model import Layer, layers
from parallel.engine import Engine
from parallel.mesh import build_mesh
from parallel.tensor import TensorParallel
from tests.parallel.training import Case, adamw, micro_batches, settings

Spans = list[tuple[str, float, float]]  # F or B, start and stop on the clock that all processes share


class _Begin(torch.autograd.Function):
    """Identity before a block; its backward is the last of the block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slow: "Slow") -> Tensor:
        ctx.slow = slow
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.slow.spans.append(("B", ctx.slow.started, time.monotonic()))
        return grad, None


class _End(torch.autograd.Function):
    """Identity behind a block that takes its time in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slow: "Slow") -> Tensor:
        ctx.slow = slow
        time.sleep(slow.forward_seconds * slow.slow)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.slow.started = time.monotonic()
        time.sleep(ctx.slow.backward_seconds * ctx.slow.slow)
        return grad, None


class Slow(nn.Module):
    """A block that takes so many seconds longer, and notes when it worked."""

    def __init__(self, block: nn.Module, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.block = block
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.spans: Spans = []
        self.slow = False
        self.started = 0.0

    def forward(self, stream: Any) -> Any:
        begin = time.monotonic()
        x, *rest = stream
        y, *rest = self.block((_Begin.apply(x.requires_grad_() if not x.requires_grad else x, self), *rest))
        y = _End.apply(y, self)
        self.spans.append(("F", begin, time.monotonic()))
        return y, *rest


def slow_step(pp: int, micro: int, forward: list[float], backward: list[float]) -> Spans:
    """On each rank: what its stage did when in the second step; one block a stage."""
    case = Case(pp=pp, n_layers=pp, global_batch=micro, micro_batch=1)
    mesh = build_mesh(tp=1, pp=pp, device=torch.device("cpu"))
    built = layers(settings(case), seed=1, documents=False, parallel=TensorParallel(mesh.tp))
    number = 0
    slowed: list[Layer] = []
    for layer in built:
        if layer.is_block:
            layer = slower(layer, forward[number], backward[number])
            number += 1
        slowed.append(layer)
    engine = Engine(
        slowed,
        Loss(z_weight=0.0, group=mesh.tp),
        mesh=mesh,
        make_optimizer=adamw,
        precision="fp32",
        micro_batch=1,
        accumulation=micro,
        clip_norm=1.0,
        stage_layers=[1] * pp,
    )
    (slow,) = [module for module in engine.module.modules() if isinstance(module, Slow)]
    for step in (1, 2):
        slow.spans, slow.slow = [], step == 2  # the first one meets and allocates
        engine.train_step(micro_batches(case, step, 0), lr=1e-3, tried=step)
    engine.close()
    return slow.spans


def slower(layer: Layer, forward: float, backward: float) -> Layer:
    return dataclasses.replace(layer, build=lambda: Slow(layer.build(), forward, backward))


def mean_idle(ranks: list[Spans]) -> float:
    """1 - busy / (first forward to last backward of all stages together), mean over the stages."""
    first = min(start for spans in ranks for _, start, _ in spans)
    last = max(stop for spans in ranks for _, _, stop in spans)
    busy = [sum(stop - start for _, start, stop in spans) for spans in ranks]
    return sum(1 - b / (last - first) for b in busy) / len(ranks)
