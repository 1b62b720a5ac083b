"""Bytes of one rank of each pipeline stage, by kind, at the moment of a step when there are most: while the
activations are there, or, in bf16, when the gradients are joined to be reduced.

n parameters of the rank, dp data ranks. The engine under ZeRO 1 holds, besides the weights of n numbers:
bf16: fp32 gradients 4 n and 16-bit ones 2 n, masters 4 n / dp, moments 8 n / dp; fp32: gradients twice, 8 n,
moments 8 n / dp and a copy of 4 n / dp that DeepSpeed makes for masters, which here are the weights.
"""

from dataclasses import dataclass, fields, replace

from checkpoints.config import Checkpoint
from launcher.plan.activations import block_kept, head_kept, recomputed_kept
from launcher.plan.layout import Layout
from launcher.plan.parameters import Count, Parameters
from megamodel.config import Model
from parallel.mesh import Group
from parallel.tensor import VocabularyShard

LOGITS_HELD = 2  # micro-batches: DeepSpeed's buffer keeps the outputs of the one before
CHUNK_BYTES = {
    "cpu": 4 << 20,
    "gpu": 64 << 20,
}  # rows of logits in fp32 that the loss works on, megamodel/loss.py
REDUCED_AT_ONCE = 500_000_000  # numbers that DeepSpeed's bf16 optimizer joins in fp32 and rounds to reduce
BUCKET_BYTES = {"cpu": 0, "gpu": 4 * 500_000_000}  # DeepSpeed's reduce bucket in fp32; on a CPU never touched


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

    def __init__(self, model: Model, length: int, *, documents: bool, on_cpu: bool) -> None:
        self.model, self.length, self.documents = model, length, documents
        self.place = "cpu" if on_cpu else "gpu"
        self.parameters = Parameters(model)
        self._kept: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}

    def stages(self, layout: Layout, bounds: list[int], checkpoint: Checkpoint) -> list[Bytes]:
        """One rank of each stage; the tp and data ranks of a stage hold equally much."""
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
        workspace = tokens * max(whole[first:stop]) if layout.recompute == "block" else 0.0
        logits = 0.0
        if is_last:
            columns = VocabularyShard(self.model.vocab_size, _group(layout.tp)).true_rows
            activations += tokens * head_kept(self.model, layout).on_rank(layout)
            logits = min(LOGITS_HELD, m) * tokens * columns * b
            chunk = min(CHUNK_BYTES[self.place], 4 * tokens * columns)
            # The gradient of the head's matrix, before it is added to what is there; in 16 bit two chunks.
            head = chunk * (2 if b == 2 else 1) + b * columns * self.model.d_model
            workspace = max(workspace, head)
        gradients = (4 + b) * n
        if m == 1 and not is_last:
            gradients = 4 * n + _rising(b * n, activations)
        elif m == 1:
            gradients = 4 * n + _rising(b * n, activations + logits + workspace)
        computing = Bytes(
            weights=b * n,
            gradients=round(gradients),
            masters=round(4 * n / layout.dp),
            moments=round(8 * n / layout.dp),
            activations=round(activations),
            logits=round(logits),
            workspace=round(workspace),
            buffers=round(self._buffers(layout, stage, tokens, flight)),
            snapshots=round(_copies(checkpoint) * 12 * n / layout.dp),
        )
        if layout.precision == "fp32":
            return computing
        joined = (4 + b) * min(n, REDUCED_AT_ONCE)
        reducing = replace(computing, gradients=(4 + b) * n, activations=0, workspace=joined)
        return max(computing, reducing, key=lambda held: held.total)

    def _blocks(self, layout: Layout) -> tuple[list[float], list[float]]:
        """Bytes that each block keeps of a token until backward, and while it computes again."""
        key = (layout.tp, layout.sequence_parallel, layout.recompute, layout.precision)
        if key not in self._kept:
            seen: list[tuple[object, float, float]] = []
            kept, whole = [], []
            for own in self.model.layers:
                known = next(((a, c) for kind, a, c in seen if kind == own), None)
                if known is None:
                    full = block_kept(self.model, own, self.length, layout, documents=self.documents)
                    left = recomputed_kept(full, self.model, layout.recompute, layout)
                    known = (left.on_rank(layout), full.on_rank(layout))
                    seen.append((own, *known))
                kept.append(known[0])
                whole.append(known[1])
            self._kept[key] = (kept, whole)
        return self._kept[key]

    def _buffers(self, layout: Layout, stage: int, tokens: int, flight: int) -> float:
        """The stream at the stage's borders, once a micro-batch in flight and to receive; the bucket."""
        split = layout.tp if layout.sequence_parallel else 1
        stream = tokens * self.model.d_model * layout.number_bytes / split
        incoming = (1 + flight) * stream if stage else 0.0
        outgoing = (1 + flight) * stream if stage < layout.pp - 1 else 0.0
        bucket = BUCKET_BYTES[self.place] if layout.precision == "fp32" else 0
        return incoming + outgoing + bucket


def _group(tp: int) -> Group:
    return Group(tuple(range(tp)), 0, None)


def _rising(gradients: float, falling: float) -> float:
    """With one micro-batch gradients come as activations go: what they add to the peak."""
    return max(gradients - falling, 0.0)


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
    "logits": "lower train.micro_batch or raise parallel.tp, which splits the vocabulary",
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
