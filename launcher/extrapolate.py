"""The command `extrapolate`: the held-out loss of runs at longer contexts than they were trained on.

T the sequence length of the training, C a context, B documents.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from checkpoints import manifest
from checkpoints.files import LocalFiles
from checkpoints.weights import load_weights
from conf.typed import config, parse, setting
from launcher.curves import matching
from launcher.failure import DONE
from launcher.hardware import Hardware
from launcher.opening import step_directory, trained_with
from launcher.picture import overlay, save_png
from launcher.tables import markdown, shown
from megamodel.config import Model
from megamodel.data.prepare import prepare as prepare_data
from megamodel.data.prepared import Prepared
from megamodel.loss import cross_entropy
from megamodel.model import Transformer
from megamodel.position import Rope
from megamodel.rope_scaling import Unscaled
from parallel.start import pick_device

WIDTH = 160  # columns of the table in text
ROWS = 4  # documents in one pass
BASES = 10.0  # the base of the variant with another one, over the trained one
TRAINED = "as trained"


@config
class Extrapolate:
    """Runs at longer contexts."""

    runs: list[str] = setting(on_resume="free", help="directories of runs, or patterns")
    contexts: list[int] = setting(
        factory=list, on_resume="free", help="tokens seen at once; empty: 1, 2 and 4 times those of training"
    )
    scaled: bool = setting(
        True, on_resume="free", help="for RoPE also with its angles scaled and with another base, untrained"
    )
    documents: int = setting(64, on_resume="free", help="held-out documents to score at most")
    plot: str | None = setting(None, on_resume="free", help="PNG to draw the losses over the context in")
    hardware: Hardware = setting(factory=Hardware, on_resume="free", help="the machine")
    format: Literal["text", "markdown", "json"] = setting(
        "text", on_resume="free", help="text and markdown: a table; json: one object"
    )

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs must name at least one directory: runs=[runs/a, runs/b]")
        if any(context < 2 for context in self.contexts) or self.documents < 1:
            raise ValueError(
                f"contexts ({self.contexts}) must be at least 2 and documents ({self.documents}) at least 1"
            )


@dataclass(frozen=True)
class Row:
    """One model in one manner of positions. losses: nats per token by context; None: it cannot read it."""

    run: str
    position: str
    variant: str
    documents: int
    losses: dict[int, float | None]


def extrapolate(tree: Extrapolate) -> int:
    """Score every run at every context, print the table, draw the plot."""
    if tree.hardware.threads:
        torch.set_num_threads(tree.hardware.threads)
    device = pick_device(tree.hardware.device, 0)
    rows = [row for path in matching(tree.runs) for row in scored(tree, path, device)]
    if tree.plot is not None:
        draw(Path(tree.plot), rows)
    if tree.format == "json":
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    elif tree.format == "markdown":
        print(markdown(*cells(rows)))
    else:
        shown(*cells(rows), width=WIDTH)
    return DONE


def scored(tree: Extrapolate, path: Path, device: torch.device) -> Iterator[Row]:
    """The rows of one run, from its newest checkpoint."""
    step = step_directory(path)
    content, _ = manifest.read(LocalFiles(), step)
    trained = trained_with(content.configuration)
    length = trained.train.sequence_length
    contexts = sorted(set(tree.contexts)) or [length, 2 * length, 4 * length]
    texts = held_out(prepare_data(trained.data, trained.tokenizer), max(contexts), tree.documents)
    weights = Transformer(trained.model, initial=False)
    load_weights(step, weights)
    for variant in variants(trained.model, tree.scaled):
        losses: dict[int, float | None] = {}
        for context in contexts:
            settings = positioned(trained.model, variant, context / length, length)
            readable = settings.longest is None or context <= settings.longest
            losses[context] = (
                loss_at(model_with(weights, settings, device), texts, context, targets=length // 2)
                if readable
                else None
            )
        yield Row(path.name, trained.model.position.kind, variant, len(texts), losses)


def held_out(prepared: Prepared, longest: int, count: int) -> np.ndarray:
    """(B, longest + 1) tokens: the beginnings of the first held-out documents that are so long."""
    found = [
        corpus.tokens[start : start + longest + 1].astype(np.int64)
        for corpus in prepared.held_out.values()
        for start, stop in zip(corpus.starts[:-1], corpus.starts[1:], strict=True)
        if stop - start > longest
    ]
    if not found:
        raise ValueError(
            f"no held-out document has {longest + 1} tokens; ask for shorter contexts=[...], or train on "
            "longer documents (data.held_out_fraction)"
        )
    return np.stack(found[:count])


def variants(model: Model, scaled: bool) -> list[str]:
    """How positions are read: as trained, and for plain RoPE each manner of scaling."""
    plain = isinstance(model.position, Rope.Config) and isinstance(model.position.scaling, Unscaled)
    return (
        [TRAINED, "linear", "ntk", "dynamic", "yarn", f"base x {BASES:g}"] if scaled and plain else [TRAINED]
    )


def positioned(model: Model, variant: str, factor: float, length: int) -> Model:
    """The model with its rotary positions stretched by `factor` beyond the `length` of its training."""
    if variant == TRAINED or factor <= 1:
        return model

    def changed(position: Any) -> Any:
        if not isinstance(position, Rope.Config):
            return position
        if variant.startswith("base"):
            return dataclasses.replace(position, base=position.base * BASES)
        scaling: dict[str, Any] = {"kind": variant, "factor": factor}
        if variant in ("dynamic", "yarn"):
            scaling["original_length"] = length
        fields = {f.name: getattr(position, f.name) for f in dataclasses.fields(position)}
        return parse(Rope.Config, fields | {"scaling": scaling})

    kinds = {
        name: dataclasses.replace(kind, position=changed(kind.position)) for name, kind in model.kinds.items()
    }
    return dataclasses.replace(model, position=changed(model.position), kinds=kinds)


def model_with(weights: Transformer, settings: Model, device: torch.device) -> Transformer:
    """The same weights behind other positions."""
    model = Transformer(settings, initial=False)
    model.load_state_dict(weights.state_dict())
    return model.eval().to(device)


@torch.no_grad()
def loss_at(model: Transformer, texts: np.ndarray, context: int, *, targets: int) -> float:
    """Nats per token of the last `targets` tokens of each row (B, longest + 1), read from `context` before.

    Every context is asked for the same tokens: what differs is how much stands before them.
    """
    device = next(model.parameters()).device
    found = []
    for first in range(0, len(texts), ROWS):
        rows = torch.from_numpy(texts[first : first + ROWS]).to(device)
        window = rows[:, -context - 1 :]
        loss, _, _ = cross_entropy(model(window[:, :-1]), window[:, 1:].contiguous())
        found += loss[:, -min(targets, context) :].double().mean(1).tolist()
    return fmean(found)


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    contexts = sorted({context for row in rows for context in row.losses})
    body = [
        [
            row.run,
            row.position,
            row.variant,
            str(row.documents),
            *("-" if (loss := row.losses.get(c)) is None else f"{loss:.4f}" for c in contexts),
        ]
        for row in rows
    ]
    return ["run", "position", "read", "documents", *(f"{context:,} tokens" for context in contexts)], body


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Loss over context, a line for each row."""
    curves = {}
    for row in rows:
        points = [(context, loss) for context, loss in row.losses.items() if loss is not None]
        curves[f"{row.run}  {row.position}, {row.variant}"] = ([c for c, _ in points], [v for _, v in points])
    save_png(overlay(curves), path)
