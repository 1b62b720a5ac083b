"""DeepSpeed's pipeline module and engine, with our layers, our stages and three replaced instructions."""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from parallel.mesh import Mesh
from parallel.piece import disown
from parallel.zero import ZeroPartition


class LayerLike(Protocol):
    """How the engine builds a layer: see megamodel.model.Layer."""

    @property
    def build(self) -> Callable[[], nn.Module]: ...
    @property
    def cost(self) -> float: ...
    @property
    def is_block(self) -> bool: ...
    @property
    def tied(self) -> str | None: ...
    @property
    def apply(self) -> Callable[[nn.Module, Tensor], Any] | None: ...


class StagedModule(PipelineModule):
    """DeepSpeed's pipeline module over our stage bounds."""

    def __init__(
        self, layers: Sequence[LayerLike], loss: Callable[..., Tensor], mesh: Mesh, bounds: Sequence[int]
    ) -> None:
        self._our_bounds = list(bounds)
        topology = PipeModelDataParallelTopology(
            num_pp=mesh.pp.size, num_mp=mesh.tp.size, num_dp=mesh.dp.size
        )
        super().__init__(layers=[_spec(layer) for layer in layers], topology=topology, loss_fn=loss)
        for parameter in self.parameters():
            if parameter.ds_pipe_replicated:  # type: ignore[attr-defined]
                disown(parameter)

    def train(self, mode: bool = True) -> "StagedModule":
        """As it says; DeepSpeed asks for it before each step, and to tell every part costs 10 us each."""
        return self if self.training is mode else super().train(mode)

    def tied(self) -> list[Tensor]:
        """Weights of this stage that another stage has too."""
        return [weight for weight, _ in self.get_tied_weights_and_groups()]

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._our_bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def _spec(layer: LayerLike) -> LayerSpec:
    if layer.tied is None:
        return _DeferredSpec(layer.build)
    return _DeferredTiedSpec(layer.tied, layer.build, layer.apply)


class _DeferredSpec(LayerSpec):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__(nn.Module)
        self._build = build

    def build(self, log: bool = False) -> nn.Module:
        return self._build()


class _DeferredTiedSpec(TiedLayerSpec):
    def __init__(
        self, key: str, build: Callable[[], nn.Module], apply: Callable[[nn.Module, Tensor], Any] | None
    ) -> None:
        super().__init__(key, nn.Module, forward_fn=apply, tied_weight_attr="matrix.weight")
        self._build = build

    def build(self, log: bool = False) -> nn.Module:
        return self._build()


class GuardedEngine(PipelineEngine):
    """DeepSpeed's engine with our sums before the reduction and our judgement before the update."""

    def attach(
        self, before_reduce: Callable[[], None], decide: Callable[[], float | None], partition: ZeroPartition
    ) -> None:
        self._before_reduce = before_reduce
        self._decide = decide
        self._partition = partition

    def _exec_reduce_tied_grads(self) -> None:
        """Not before the mean over dp, but after it."""

    def _exec_reduce_grads(self) -> None:
        self._before_reduce()
        self._partition.reduction.average()
        self._partition.reduction.sum_tied(self.module.get_tied_weights_and_groups())

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        norm = self._decide()
        if norm is None:
            self._partition.discard()
            return
        self.optimizer.step = lambda: self._partition.step(norm)
        super()._exec_optimizer_step(lr_kwargs)

    def _aggregate_total_loss(self) -> Tensor:
        # Its collectives are not needed: the loss travels with the signals.
        return torch.zeros(())

    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.ReduceGrads: _exec_reduce_grads,
        schedule.OptimizerStep: _exec_optimizer_step,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence DeepSpeed's prints and log lines while it is built; its errors still come through."""
    logger = logging.getLogger("DeepSpeed")
    level, look = logger.level, bf16_optimizer.see_memory_usage
    logger.setLevel(logging.ERROR)
    # It collects garbage twice a parameter group and forgets the peak of memory, on one rank only.
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        bf16_optimizer.see_memory_usage = look
