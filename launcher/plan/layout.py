"""One way to split a training step over GPUs, and the ways in which frameworks reduce and recompute."""

from dataclasses import dataclass, replace
from typing import Literal

Recompute = Literal["none", "attention", "scores", "selective", "block"]
Precision = Literal["fp32", "bf16"]
NUMBER_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Recomputed:
    """Shares of a block's forward pass that backward repeats. products: of the matrix products."""

    products: float
    attention: float
    pointwise: float
    communication: float  # of the tensor-parallel collectives of the forward pass


# attention: the attention with its products, about a third of a block; scores: scores and their softmax, as
# Megatron-LM's "selective" (Korthikanti et al. 2022); selective: every other product and all that is
# pointwise, as torchtitan's. Training offers those it names itself.
RECOMPUTED: dict[Recompute, Recomputed] = {
    "none": Recomputed(0.0, 0.0, 0.0, 0.0),
    "attention": Recomputed(1 / 3, 1.0, 0.5, 0.5),
    "scores": Recomputed(0.0, 1.0, 0.0, 0.0),
    "selective": Recomputed(0.5, 0.0, 1.0, 0.0),
    "block": Recomputed(1.0, 1.0, 1.0, 1.0),
}


@dataclass(frozen=True)
class Method:
    """How data parallelism reduces gradients and where the optimizer's state lies.

    gradient_bytes: of a number that is reduced; reduction: 1 reduce-scatter, 2 all-reduce (twice the bytes);
    weight_bytes: of a number that is gathered, `gathers` times; every_micro_batch: with each micro-batch
    (FSDP), else once a step; overlap: share of this that can hide behind the computation; shard_state:
    whether the optimizer's state is split over dp; split_transfers: each rank sends 1 / tp of the stream over
    a stage border; update_bytes: read and written for each parameter that is updated.
    """

    gradient_bytes: int
    reduction: int
    weight_bytes: int
    gathers: int
    every_micro_batch: bool
    overlap: float
    shard_state: bool = True
    split_transfers: bool = False
    update_bytes: int = 34  # master, two moments: read and written; gradient read; weight written, in fp32


# The engine under ZeRO 1 scatters the gradients' sums in fp32 during the last backward pass and gathers
# weights after the update.
# The others are what published runs used: Megatron-LM's data parallelism of 2021 (16-bit all-reduce at the
# end), its distributed optimizer, FSDP that gathers each layer twice a micro-batch, Llama 3's once a step.
METHODS: dict[str, Method] = {
    "engine": Method(4, 1, 2, 1, False, 0.5),
    "engine_fp32": Method(4, 1, 4, 1, False, 0.5),
    "ddp": Method(2, 2, 0, 0, False, 0.0, shard_state=False, split_transfers=True),
    "zero1": Method(4, 1, 2, 1, False, 0.5, split_transfers=True),
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
    recompute_every: int = 1  # only every so many blocks
    widens: bool = False  # 16-bit attention and products in fp32, as on a CPU without units for 16 bit
    stage_layers: tuple[int, ...] | None = None
    chunks: int = 1
    method: str = "engine"
    overlaps: bool = True  # whether anything of data parallelism may hide at all
    fused_attention: bool = True  # no scores in memory
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
        is_fp32 = self.method == "engine" and self.precision == "fp32"
        how = METHODS["engine_fp32" if is_fp32 else self.method]
        return how if self.overlaps else replace(how, overlap=0.0)

    @property
    def number_bytes(self) -> int:
        return NUMBER_BYTES[self.precision]

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once under 1F1B."""
        return min(self.accumulation, self.pp - stage)

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}", f"micro-batch {self.micro_batch}"]
        parts += ["sequence parallel"] * self.sequence_parallel
        every = f", every {self.recompute_every}" if self.recompute_every > 1 else ""
        parts += [f"recompute {self.recompute}{every}"] if self.recompute != "none" else []
        return ", ".join(parts)
