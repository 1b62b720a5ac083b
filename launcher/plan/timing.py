"""How long a step takes, part by part: a roofline for the computation, rings for the collectives, 1F1B.

A product of F operations that moves M bytes takes F / (efficiency x peak) + M / (efficiency x bandwidth):
the second term is what makes small or thin products slow. A ring of n ranks carries (n - 1) / n of the bytes
to gather or to reduce and scatter, twice that for an all-reduce, at the link's rate; a group that leaves the
node has one network adapter for each of its ranks in a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from launcher.hardware import Machine
from launcher.plan.layout import RECOMPUTED, Layout, Recomputed
from launcher.plan.work import LayerWork, block_work, embedding_work, head_work
from megamodel.config import LayerSettings, Model
from parallel.stages import stage_bounds

# Start of a collective: half the bandwidth is reached at about 8 MB within a node, 64 MB between nodes, which
# is what nccl-tests usually shows on such machines; an assumption, not fitted.
COLLECTIVE_SECONDS = 15e-6
FAR_COLLECTIVE_SECONDS = 150e-6
BLOCK_LAUNCH_SECONDS = 120e-6  # CPU time to start a block's forward kernels, about 25 at 5 us each
# Times that unfused attention writes or reads a score: product, scaled mask, softmax, dropout, product.
SCORE_PASSES = 6.5
NO_RECOMPUTE = RECOMPUTED["none"]


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch in one layer or stage."""

    forward: float = 0.0
    backward: float = 0.0
    communication: float = 0.0  # of tensor parallelism, in both passes

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(
            self.forward + other.forward,
            self.backward + other.backward,
            self.communication + other.communication,
        )

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.communication


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. compute and tensor: of the busiest stage over all its micro-batches."""

    compute: float
    tensor: float
    bubble: float
    transfer: float
    data: float  # reduction and gathering over dp that nothing hides
    hidden: float  # of the same, behind the computation: not part of the total
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.bubble + self.transfer + self.data + self.optimizer

    def parts(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "tensor_parallel": self.tensor,
            "pipeline_bubble": self.bubble,
            "pipeline_transfer": self.transfer,
            "data_parallel": self.data,
            "optimizer": self.optimizer,
        }


def group_bandwidth(machine: Machine, size: int, *, in_node: int) -> float:
    """Bytes a second that a rank of a ring sends; in_node: neighbours of the group in one node."""
    rate = machine.node_bytes_per_second
    if size > in_node:
        rate = min(rate, machine.network_bytes_per_second * max(in_node, 1))
    return rate * machine.link_efficiency


def ring_seconds(machine: Machine, bytes_: float, size: int, *, in_node: int, passes: int = 1) -> float:
    """A gather or a scatter of so many bytes in all (passes 1), or an all-reduce (2)."""
    if size == 1 or not bytes_:
        return 0.0
    share = passes * (size - 1) / size
    start = FAR_COLLECTIVE_SECONDS if size > in_node else COLLECTIVE_SECONDS
    return share * bytes_ / group_bandwidth(machine, size, in_node=in_node) + start


class Timing:
    """Times of one model on one kind of machine at one sequence length; layers are counted once a layout."""

    def __init__(self, model: Model, machine: Machine, length: int) -> None:
        self.model, self.machine, self.length = model, machine, length
        self._passes: dict[tuple[object, ...], list[Pass]] = {}
        self._bounds: dict[tuple[int, tuple[int, ...] | None], list[int]] = {}

    @cached_property
    def kinds(self) -> list[tuple[LayerSettings, list[int]]]:
        """Each different kind of block with the numbers of its layers."""
        found: list[tuple[LayerSettings, list[int]]] = []
        for number, own in enumerate(self.model.layers):
            same = next((numbers for seen, numbers in found if seen == own), None)
            if same is None:
                found.append((own, [number]))
            else:
                same.append(number)
        return found

    def bounds(self, layout: Layout) -> list[int]:
        """First block of each stage, and the end; the head's cost counts as the engine counts it."""
        key = (layout.pp, layout.stage_layers)
        if key not in self._bounds:
            self._bounds[key] = block_bounds(self.model, layout.pp, layout.stage_layers)
        return self._bounds[key]

    def stages(self, layout: Layout) -> list[Pass]:
        """The passes of one micro-batch in each stage."""
        sequence = layout.sequence_parallel and layout.tp > 1
        key = (
            layout.tp,
            sequence,
            layout.micro_batch,
            layout.recompute,
            layout.recompute_every,
            layout.fused_attention,
            layout.precision,
        )
        if key not in self._passes:
            self._passes[key] = self._layers(layout)
        first, *blocks, last = self._passes[key]
        bounds = self.bounds(layout)
        sums = [sum(blocks[a:b], Pass()) for a, b in pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        return sums

    def _layers(self, layout: Layout) -> list[Pass]:
        """Of the embedding, each block, the head."""
        tp, again = layout.tp, RECOMPUTED[layout.recompute]
        passes: list[Pass] = [Pass()] * self.model.n_layers
        for own, numbers in self.kinds:
            work = block_work(self.model, own, length=self.length, tp=tp)
            one = self._pass(work, layout, again, collectives=2, launch=BLOCK_LAUNCH_SECONDS)
            kept = self._pass(work, layout, NO_RECOMPUTE, collectives=2, launch=BLOCK_LAUNCH_SECONDS)
            for number in numbers:
                passes[number] = kept if number % layout.recompute_every else one
        embedding = self._pass(embedding_work(self.model), layout, NO_RECOMPUTE, collectives=1)
        head = self._pass(head_work(self.model, tp=tp), layout, NO_RECOMPUTE, collectives=1)
        return [embedding, *passes, head]

    def _pass(
        self, work: LayerWork, layout: Layout, again: Recomputed, *, collectives: int, launch: float = 0.0
    ) -> Pass:
        """collectives: all-reduces of the stream in each direction; a gather and a scatter cost the same."""
        tokens = layout.micro_batch * self.length
        products = self._products(work, layout, tokens)
        attention = self._attention(work, layout, tokens)
        pointwise = self._pointwise(work, layout, tokens)
        forward = products + attention + pointwise
        repeated = again.products * products + again.attention * attention + again.pointwise * pointwise
        # Two products for each of the forward pass, a gradient summed in fp32; fused attention repeats q k^T.
        weights = sum(product.weights for product in work.products)
        summing = 8 * weights / self._memory
        backward = 2 * products + (2.5 if layout.fused_attention else 2) * attention + 2 * pointwise
        backward += summing + repeated
        stream = tokens * self.model.d_model * layout.number_bytes
        in_node = min(layout.tp, self.machine.node_gpus)
        reduce = ring_seconds(self.machine, stream, layout.tp, in_node=in_node, passes=2)
        return Pass(
            forward=max(forward, launch),
            backward=max(backward, 2 * launch + (launch if again.products else 0.0)),
            communication=collectives * reduce * (2 + again.communication),
        )

    @property
    def _memory(self) -> float:
        return self.machine.memory_bytes_per_second * self.machine.memory_efficiency

    def _products(self, work: LayerWork, layout: Layout, tokens: int) -> float:
        peak = self.machine.flops(layout.precision) * self.machine.matmul_efficiency
        moved = sum(p.moved * tokens + p.weights for p in work.products) * layout.number_bytes
        return work.product_flops * tokens / peak + moved / self._memory

    def _attention(self, work: LayerWork, layout: Layout, tokens: int) -> float:
        if not work.attention_flops:
            return 0.0
        peak = self.machine.flops(layout.precision)
        if layout.fused_attention:
            return work.attention_flops * tokens / (peak * self.machine.attention_efficiency)
        # Unfused: the whole square, as products of narrow matrices whose scores go through memory.
        scores = SCORE_PASSES * layout.number_bytes * work.scores * tokens / self._memory
        return 2 * work.attention_flops * tokens / (peak * self.machine.matmul_efficiency) + scores

    def _pointwise(self, work: LayerWork, layout: Layout, tokens: int) -> float:
        outer = work.outer / (layout.tp if layout.sequence_parallel else 1)
        return (work.inner + outer) * tokens * layout.number_bytes / self._memory

    def step(self, layout: Layout, parameters: Sequence[float]) -> StepTime:
        """One step; parameters: of one rank of each stage."""
        stages = self.stages(layout)
        totals = [stage.total for stage in stages]
        busiest = max(range(layout.pp), key=totals.__getitem__)
        most, m, v = totals[busiest], layout.accumulation, layout.chunks
        # 1F1B: the first micro-batch passes all stages, the busiest stage sets the pace of the others.
        bubble = (sum(totals) - most) / v
        compute = stages[busiest].forward + stages[busiest].backward
        transfer = 2 * m * v * self._transfer_seconds(layout)
        data = self._data_seconds(layout, max(parameters))
        space = (compute * m if layout.how.every_micro_batch else compute) * layout.how.overlap
        hidden = min(data * layout.how.overlap, space)
        updated = max(parameters) / (layout.dp if layout.how.shard_state else 1)
        return StepTime(
            compute=m * compute,
            tensor=m * stages[busiest].communication,
            bubble=bubble,
            transfer=transfer,
            data=data - hidden,
            hidden=hidden,
            optimizer=updated * layout.how.update_bytes / self._memory,
        )

    def _transfer_seconds(self, layout: Layout) -> float:
        """The stream of a micro-batch to the next stage."""
        if layout.pp == 1:
            return 0.0
        split = layout.tp if layout.how.split_transfers or layout.sequence_parallel else 1
        bytes_ = layout.micro_batch * self.length * self.model.d_model * layout.number_bytes / split
        far = layout.tp * layout.dp * layout.pp > self.machine.node_gpus
        machine = self.machine
        rate = machine.network_bytes_per_second if far else machine.node_bytes_per_second
        return bytes_ / (rate * machine.link_efficiency) + COLLECTIVE_SECONDS

    def _data_seconds(self, layout: Layout, parameters: float) -> float:
        """Reduction of gradients and gathering of weights over dp, hidden or not."""
        how, machine = layout.how, self.machine
        in_node = max(1, min(layout.dp, machine.node_gpus // layout.tp))

        def ring(bytes_: float, passes: int) -> float:
            return ring_seconds(machine, bytes_, layout.dp, in_node=in_node, passes=passes)

        once = ring(parameters * how.gradient_bytes, how.reduction)
        once += how.gathers * ring(parameters * how.weight_bytes, 1)
        return once * (layout.accumulation if how.every_micro_batch else 1)


def block_bounds(model: Model, pp: int, stage_layers: Sequence[int] | None) -> list[int]:
    """The engine's split of the blocks over the stages: [first of stage 0, ..., n_layers]."""
    from megamodel.model import layers, needs_entry
    from parallel.tensor import TensorParallel

    built = layers(model, seed=0, documents=False, parallel=TensorParallel())
    bounds = stage_bounds(
        [layer.cost for layer in built],
        [layer.is_block for layer in built],
        pp=pp,
        stage_layers=stage_layers,
    )
    before = 1 + needs_entry(model)
    return [0, *(bound - before for bound in bounds[1:-1]), model.n_layers]
