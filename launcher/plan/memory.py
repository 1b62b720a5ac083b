"""Bytes of one rank of each pipeline stage, by kind, while most of the activations are there.

n parameters of the rank, dp data ranks. The engine under ZeRO 1 holds, besides the weights of n numbers, fp32
gradients 4 n (from backward to the update) and moments 8 n / dp; in bf16 also masters 4 n / dp, which in fp32
are the weights themselves.
"""

from dataclasses import dataclass, fields, replace

import torch

from checkpoints.config import Checkpoint
from conf.typed import parse
from launcher.plan.activations import block_kept, head_kept, recomputed_kept
from launcher.plan.layout import Layout
from launcher.plan.parameters import Count, Parameters
from megamodel.config import Model
from megamodel.kernels.config import Kernels
from megamodel.kernels.head import CACHE_BYTES, WORKSPACE_BYTES
from parallel.mesh import Group
from parallel.tensor import VocabularyShard

HIDDEN_HELD = 2  # micro-batches: DeepSpeed's buffer keeps the outputs of the one before


@dataclass(frozen=True)
class Bytes:
    """Of one rank. snapshots are host memory and not in the total."""

    weights: int
    gradients: int
    masters: int
    moments: int
    activations: int
    logits: int
    workspace: int
    buffers: int
    snapshots: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "snapshots")

    @property
    def state(self) -> int:
        """What stays between the steps."""
        return self.weights + self.masters + self.moments

    def kinds(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


class Memory:
    """Memory of one model at one sequence length; documents: whether they are told apart by a mask."""

    def __init__(
        self,
        model: Model,
        length: int,
        *,
        documents: bool,
        on_cpu: bool,
        kernels: Kernels | None = None,
    ) -> None:
        self.model, self.length, self.documents = model, length, documents
        self.place = "cpu" if on_cpu else "gpu"
        given = (kernels or parse(Kernels, {})).workspace_bytes
        self.workspace_bytes = given or WORKSPACE_BYTES["cpu" if on_cpu else "cuda"]
        self.widens = on_cpu and not torch.cpu._is_amx_tile_supported()
        self.parameters = Parameters(model)
        self._kept: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}

    def stages(self, layout: Layout, bounds: list[int], checkpoint: Checkpoint) -> list[Bytes]:
        """One rank of each stage; the tp and data ranks of a stage hold equally much."""
        layout = replace(layout, widens=self.widens and layout.precision == "bf16")
        counts = self.parameters.of_stages(bounds, layout.tp)
        return [
            self._stage(layout, stage, bounds[stage], bounds[stage + 1], counts[stage], checkpoint)
            for stage in range(layout.pp)
        ]

    def _stage(
        self, layout: Layout, stage: int, first: int, stop: int, count: Count, checkpoint: Checkpoint
    ) -> Bytes:
        b, n, m = layout.number_bytes, count.total, layout.accumulation
        is_last = stage == layout.pp - 1
        tokens, flight = layout.micro_batch * self.length, layout.in_flight(stage)
        kept, whole = self._blocks(layout)
        activations = flight * tokens * sum(kept[first:stop])
        workspace = tokens * _made_again(kept[first:stop], whole[first:stop])
        if layout.widens:  # operand and result of the widest product in fp32
            inner = self.model.feedforward.d_ff * (2 if self.model.feedforward.gated else 1) / layout.tp
            workspace += 4 * tokens * (self.model.d_model + inner)
        logits = 0.0
        if is_last:
            shard = VocabularyShard(self.model.vocab_size, _group(layout.tp))
            activations += tokens * head_kept(self.model, layout).on_rank(layout)
            activations += (min(HIDDEN_HELD, m) - 1) * tokens * b * self.model.d_model
            logits, gradient = self._head(layout, tokens, shard)
            if logits + gradient >= workspace:
                workspace = gradient
            else:  # they are gone when the first block is made again
                logits = 0.0
        embedding = 0  # its gradient before it is added to the rest
        if stage == 0:
            rows = VocabularyShard(self.model.vocab_size, _group(layout.tp)).rows
            embedding = b * rows * self.model.d_model
            workspace = max(workspace, embedding)
        held = Bytes(
            weights=b * n,
            gradients=4 * n,
            masters=round(4 * n / layout.dp) if layout.precision == "bf16" else 0,
            moments=round(8 * n / layout.dp),
            activations=round(activations),
            logits=round(logits),
            workspace=round(workspace),
            buffers=round(self._buffers(layout, stage, tokens, flight)),
            snapshots=round(_copies(checkpoint) * 12 * n / layout.dp),
        )
        if m > 1:
            return held
        # Of a single micro-batch gradients come as activations go: most is held before the backward pass, or
        # when it is in the first block.
        before = replace(held, gradients=0)
        last = round(tokens * (whole[first] if stop > first else 0) + embedding)
        after = replace(held, activations=0, logits=0, workspace=last)
        return max(before, after, key=lambda found: found.total)

    def _head(self, layout: Layout, tokens: int, shard: VocabularyShard) -> tuple[float, float]:
        """(logits that are held at once, the gradients of both operands and what they are made of)."""
        b = 4 if layout.widens else layout.number_bytes
        chunk = min(tokens, max(1, self.workspace_bytes // (b * shard.rows)))
        matrix = shard.rows * self.model.d_model
        summed = 4 if chunk < tokens and 4 * matrix <= self.workspace_bytes else b
        gradient = matrix * summed + (matrix * layout.number_bytes if summed != layout.number_bytes else 0)
        copies = 4 * matrix if layout.widens else 0  # the weight itself in fp32
        hidden = tokens * self.model.d_model * layout.number_bytes
        # Over several ranks log Z is known after a first pass: two blocks of rows in fp32 beside the logits.
        blocks = 2 * min(CACHE_BYTES, chunk * shard.true_rows * 4) if layout.tp > 1 else 0
        return chunk * shard.true_rows * b, gradient + copies + hidden + blocks

    def _blocks(self, layout: Layout) -> tuple[list[float], list[float]]:
        """Bytes that each block keeps of a token until backward, and while it computes again."""
        again = (layout.recompute, layout.recompute_every)
        key = (layout.tp, layout.sequence_parallel, *again, layout.precision, layout.widens)
        if key not in self._kept:
            seen: list[tuple[object, float, float]] = []
            kept, whole = [], []
            for number, own in enumerate(self.model.layers):
                known = next(((a, c) for kind, a, c in seen if kind == own), None)
                if known is None:
                    full = block_kept(self.model, own, self.length, layout, documents=self.documents)
                    left = recomputed_kept(full, self.model, own, layout)
                    known = (left.on_rank(layout), full.on_rank(layout))
                    seen.append((own, *known))
                kept.append(known[1] if number % layout.recompute_every else known[0])
                whole.append(known[1])
            self._kept[key] = (kept, whole)
        return self._kept[key]

    def _buffers(self, layout: Layout, stage: int, tokens: int, flight: int) -> float:
        """The stream at the stage's borders, once a micro-batch in flight and to receive."""
        split = layout.tp if layout.sequence_parallel else 1
        stream = tokens * self.model.d_model * layout.number_bytes / split
        incoming = (1 + flight) * stream if stage else 0.0
        outgoing = (1 + flight) * stream if stage < layout.pp - 1 else 0.0
        return incoming + outgoing


def _group(tp: int) -> Group:
    return Group(tuple(range(tp)), 0, None)


def _made_again(kept: list[float], whole: list[float]) -> float:
    """What the backward pass of a stage holds at most beyond all that was kept, when blocks are made again:
    those behind the block in hand are gone by then."""
    beyond = [w - k - sum(kept[i + 1 :]) for i, (k, w) in enumerate(zip(kept, whole, strict=True))]
    return max(0.0, *beyond)


def _copies(checkpoint: Checkpoint) -> int:
    """Copies of masters and moments in host memory."""
    ring = checkpoint.snapshots if checkpoint.snapshot_every else 0
    return ring + checkpoint.background


@dataclass(frozen=True)
class Verdict:
    """Whether a layout fits; if not, where most is missing, by how much, why, and what would help most."""

    fits: bool
    stage: int
    short_bytes: int
    because: str
    lever: str

    def __str__(self) -> str:
        if self.fits:
            return f"fits, with {-self.short_bytes / 1e9:.1f} GB to spare at stage {self.stage}"
        short = f"short by {self.short_bytes / 1e9:.1f} GB at stage {self.stage}"
        return f"does not fit: {short} because of {self.because}; {self.lever}"


LEVERS = {
    "weights": "raise parallel.tp or parallel.pp: each rank holds fewer weights",
    "gradients": "raise parallel.tp or parallel.pp: ZeRO 1 keeps whole gradients on each rank",
    "masters": "use more GPUs: ZeRO 1 splits masters over dp",
    "moments": "use more GPUs: ZeRO 1 splits moments over dp; or raise parallel.tp or parallel.pp",
    "logits": "lower kernels.workspace_bytes, or raise parallel.tp, which splits the vocabulary",
    "workspace": "lower train.micro_batch",
    "buffers": "lower train.micro_batch",
}


def verdict(stages: list[Bytes], layout: Layout, memory_bytes: float) -> Verdict:
    """The fullest stage against the memory of a device."""
    stage = max(range(len(stages)), key=lambda s: stages[s].total)
    used = stages[stage]
    kinds = {name: size for name, size in used.kinds().items() if name != "snapshots"}
    largest = max(kinds, key=kinds.__getitem__)
    return Verdict(
        fits=used.total <= memory_bytes,
        stage=stage,
        short_bytes=round(used.total - memory_bytes),
        because=f"{largest} ({kinds[largest] / 1e9:.1f} GB)",
        lever=LEVERS.get(largest) or _activation_lever(layout),
    )


def _activation_lever(layout: Layout) -> str:
    if layout.recompute == "none":
        return "set parallel.recompute=block: each block keeps its input alone"
    if layout.tp > 1 and not layout.sequence_parallel:
        return "set parallel.sequence_parallel=true: it splits what is kept over tp"
    if layout.micro_batch > 1:
        return f"lower train.micro_batch from {layout.micro_batch}"
    return "raise parallel.tp, or shorten train.sequence_length"
