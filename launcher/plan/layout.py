"""One way to split a training step over GPUs, and the ways in which frameworks reduce and recompute."""

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "block"]
Precision = Literal["fp32", "bf16"]
NUMBER_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Recomputed:
    """Shares of a block's forward pass that backward repeats. products: of the matrix products."""

    products: float
    attention: float
    pointwise: float
    communication: float  # of the tensor-parallel collectives of the forward pass


# selective: as torchtitan and Megatron-LM mean it, cheap or alternate parts only; see `memory.KEPT`.
RECOMPUTED: dict[Recompute, Recomputed] = {
    "none": Recomputed(0.0, 0.0, 0.0, 0.0),
    "selective": Recomputed(0.5, 0.0, 1.0, 0.0),
    "block": Recomputed(1.0, 1.0, 1.0, 1.0),
}


@dataclass(frozen=True)
class Method:
    """How data parallelism reduces gradients and where the optimizer's state lies.

    gradient_bytes: of a number that is reduced; reduction: 1 reduce-scatter, 2 all-reduce (twice the bytes);
    weight_bytes: of a number that is gathered, `gathers` times; every_micro_batch: with each micro-batch
    (FSDP), else once a step; overlap: share of this that can hide behind the computation; shard_*: whether
    state, gradients and weights are split over dp; fused_attention: no scores in memory; update_bytes: read
    and written for each parameter that the optimizer updates.
    """

    gradient_bytes: int
    reduction: int
    weight_bytes: int
    gathers: int
    every_micro_batch: bool
    overlap: float
    shard_state: bool = True
    fused_attention: bool = True
    split_transfers: bool = False  # a stage border carries 1 / tp of the stream on each rank
    update_bytes: int = 34  # master, two moments: read and written; gradient read; weight written, in fp32


# The engine: DeepSpeed's ZeRO 1 under its pipeline sums fp32 gradients by all-reduce, after the last
# micro-batch, and gathers 16-bit weights after the update; nothing overlaps.
METHODS: dict[str, Method] = {
    "engine": Method(4, 2, 2, 1, False, 0.0),
    "ddp": Method(2, 2, 0, 0, False, 0.0, shard_state=False, fused_attention=False, split_transfers=True),
    "fsdp": Method(4, 1, 2, 2, True, 0.8),
    "fsdp_zero2_like": Method(4, 1, 2, 1, False, 0.5, split_transfers=True),
}


@dataclass(frozen=True)
class Layout:
    """A split. accumulation: micro-batches of one pipeline in a step; chunks: of each stage, interleaved."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    stage_layers: tuple[int, ...] | None = None
    chunks: int = 1
    method: str = "engine"
    precision: Precision = "bf16"

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.micro_batch * self.accumulation * self.dp

    @property
    def how(self) -> Method:
        return METHODS[self.method]

    @property
    def number_bytes(self) -> int:
        return NUMBER_BYTES[self.precision]

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once under 1F1B."""
        return min(self.accumulation, self.pp - stage)

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}", f"micro-batch {self.micro_batch}"]
        parts += ["sequence parallel"] * self.sequence_parallel
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join(parts)
