"""Norms of gradient and weights by layer, exact at every layout: each logical number is counted once.

The gradient is the reduced one, before clipping, so the squares of all layers add up to that of norm/grad.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from launcher.metrics import append_line, encoded
from launcher.rundirectory import RunDirectory, naming
from parallel.engine import Engine
from parallel.exchange import Exchange


def layer_of(name: str) -> str:
    """blocks.7.attention.q.weight -> blocks.7; embedding.weight -> embedding."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def in_order(layers: Iterable[str]) -> list[str]:
    """As the model has them: what stands before the blocks, the blocks by number, what stands behind."""

    def place(layer: str) -> tuple[int, int, str]:
        if layer.startswith("blocks."):
            return 1, int(layer.removeprefix("blocks.")), ""
        return (0 if layer.startswith("embed") else 2), 0, layer

    return sorted(set(layers), key=place)


class LayerStatistics:
    """Made on every rank; `look` while there are gradients, `write` after the attempt. every: of steps."""

    def __init__(self, directory: RunDirectory, exchange: Exchange, *, every: int) -> None:
        self._path, self._exchange, self._every = directory.layers_file, exchange, every
        self._found: dict[str, list[float]] | None = None

    def due(self, tried: int) -> bool:
        return self._every > 0 and tried % self._every == 0

    @torch.no_grad()
    def look(self, engine: Engine) -> None:
        """This rank's share: sums of squares of what it owns. Not collective; one transfer to the host."""
        names: list[str] = []
        sums = []
        partition = engine.partition
        for stretch, gradient in partition.gradients():
            master = partition.masters[stretch.group].detach().narrow(0, stretch.at, stretch.length)
            for piece, _, at, length in stretch.overlaps():
                if piece.owner:
                    names.append(piece.name)
                    sums += [view.narrow(0, at, length).float().norm() for view in (gradient, master)]
        found: dict[str, list[float]] = {}
        values = torch.stack(sums).double().square().tolist() if sums else []
        for name, own, weight in zip(names, values[::2], values[1::2], strict=True):
            total = found.setdefault(layer_of(name), [0.0, 0.0])
            total[0] += own
            total[1] += weight
        self._found = found

    def write(self, heading: Mapping[str, Any]) -> None:
        """One line of layers.jsonl: {step, attempt, segment, time, layers, gradient_norm, weight_norm}.

        Collective. Nothing where `look` was not called since.
        """
        if self._found is None:
            return
        ranks = self._exchange.gather(encoded(self._found))
        self._found = None
        if self._exchange.rank != 0:
            return
        layers = in_order(name for found in ranks for name in found)
        norms = [
            [_norm(found.get(name, (0.0, 0.0))[k] for found in ranks) for name in layers] for k in (0, 1)
        ]
        record = {**heading, "time": time.time(), "layers": layers}
        line = json.dumps(encoded({**record, "gradient_norm": norms[0], "weight_norm": norms[1]}))
        with naming(self._path):
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                append_line(file, line)
            finally:
                os.close(file)


def _norm(squares: Iterable[Any]) -> float:
    return math.sqrt(sum(float(square) for square in squares))
