"""The held-out loss, source by source."""

from dataclasses import dataclass

from megamodel.data.held_out import HeldOut
from parallel.engine import Engine


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean cross-entropy in nats per held-out token: of all sources together, and of each."""

    mean: float
    sources: dict[str, float]
    tokens: int


def evaluate(
    engine: Engine, held_out: HeldOut, *, micro_batch: int, windows: int | None
) -> HeldOutLoss | None:
    """The loss on the first `windows` held-out sequences of each source (None: all). Collective.

    The same number at every layout and micro-batch. None when nothing is held out.
    """
    mesh = engine.mesh
    total, count, sources = 0.0, 0, {}
    for name in held_out.names:
        rows = held_out.batches(micro_batch, windows, mesh.dp.rank, mesh.dp.size, source=name)
        loss, tokens = engine.evaluate(list(rows))
        if tokens:
            sources[name] = loss / tokens
            total, count = total + loss, count + tokens
    return HeldOutLoss(total / count, sources, count) if count else None
