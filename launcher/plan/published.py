"""What the planner predicts for runs whose speed was published, beside what was published.

Figures and their sources stand in published.csv. Where a source leaves a field open the assumption is shown.
"""

import csv
import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.typed import parse
from launcher.hardware import Machine
from launcher.plan.layout import Layout
from launcher.plan.parameters import Parameters
from launcher.plan.timing import Timing
from megamodel.accounting import flops_per_token
from megamodel.config import Model

FILE = Path(__file__).with_name("published.csv")
MICRO_BATCHES = (1, 2, 4, 8)
MOST_CHUNKS = 8
# The rows that the efficiency of a GPU was fitted on: (source, model, GPUs). All others are held out.
FITTED = {
    ("N21", "gpt_7.5b", 128),
    ("N21", "gpt_145.6b", 1536),
    ("N21", "gpt_1008b", 3072),
    ("L3", "llama3_405b", 8192),
    ("TT", "llama3_8b", 8),
}
RECOMPUTE = {"full": "block", "selective": "selective", "none": "none"}


@dataclass(frozen=True)
class Published:
    """One row: what was run, and the speed in the unit that the source gives."""

    source: str
    name: str
    model: Model
    length: int
    gpu: str
    layout: Layout
    convention: str
    flops_per_gpu: float | None
    tokens_per_second_per_gpu: float | None
    micro_batch: int | None
    chunks: int | None

    @property
    def fitted(self) -> bool:
        return (self.source, self.name, self.layout.gpus) in FITTED


@dataclass(frozen=True)
class Comparison:
    """Published against predicted; FLOP/s per GPU under the source's own way of counting."""

    source: str
    model: str
    gpu: str
    gpus: int
    layout: str
    published: float
    predicted: float
    fitted: bool
    assumed: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def rows(file: Path = FILE) -> list[Published]:
    """The rows of a table of published runs."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [_row(row) for row in csv.DictReader(lines)]


def _row(row: dict[str, str]) -> Published:
    def number(key: str) -> int:
        return int(row[key])

    tp, pp, dp = number("tp"), number("pp"), number("dp")
    micro = int(row["micro_batch"]) if row["micro_batch"].isdigit() else None
    chunks = int(row["pipeline_chunks"]) if row["pipeline_chunks"].isdigit() else None
    share = number("global_batch_sequences") // dp
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch=micro or 1,
        accumulation=max(share // (micro or 1), 1),
        recompute=RECOMPUTE[row["recompute"]],  # type: ignore[arg-type]
        sequence_parallel=row["source"] == "L3" and tp > 1,
        chunks=chunks or 1,
        method=row["dp_kind"],
    )
    return Published(
        source=row["source"],
        name=row["model"],
        model=_model(row),
        length=number("sequence"),
        gpu=row["gpu"],
        layout=layout,
        convention=row["flops_convention"],
        flops_per_gpu=float(row["tflops_per_gpu"]) * 1e12 if row["tflops_per_gpu"] else None,
        tokens_per_second_per_gpu=float(row["tokens_per_second_per_gpu"] or 0) or None,
        micro_batch=micro,
        chunks=chunks,
    )


def _model(row: dict[str, str]) -> Model:
    """GPT: LayerNorm, GELU, biases, learned positions, tied; Llama: the defaults, untied."""
    heads, width = int(row["heads"]), int(row["d_model"])
    is_gpt = row["model"].startswith("gpt")
    raw: dict[str, Any] = {
        "vocab_size": int(row["vocabulary"]),
        "d_model": width,
        "n_layers": int(row["layers"]),
        "tie_embeddings": is_gpt,
        "attention": {
            "n_heads": heads,
            "n_kv_heads": int(row["kv_heads"]),
            "head_width": width // heads,
            "bias": is_gpt,
            "output_bias": is_gpt,
        },
        "feedforward": {"d_ff": int(row["d_ff"]), "gated": not is_gpt, "bias": is_gpt},
    }
    if is_gpt:
        raw["feedforward"]["activation"] = "gelu_tanh"
        raw["norm"] = {"kind": "layernorm"}
        raw["position"] = {"kind": "learned", "max_positions": int(row["sequence"])}
    return parse(Model, raw)


def flops_of_a_token(row: Published) -> float:
    """As the source counts: its own formula, or forward and backward of the model."""
    if row.convention == "n21_hardware_full_attention":
        model, s = row.model, row.length
        h, layers, v = model.d_model, model.n_layers, model.vocab_size
        return 96 * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    return flops_per_token(row.model, row.length).training


def compare(row: Published, machine: Machine) -> Comparison:
    """Predict a row; an unknown micro-batch is the fastest of 1, 2, 4, 8, unknown chunks a layer each."""
    layout, assumed = row.layout, []
    if row.chunks is None and layout.pp > 1:
        chunks = min(-(-row.model.n_layers // layout.pp), MOST_CHUNKS)
        layout = dataclasses.replace(layout, chunks=chunks)
        assumed.append(f"{chunks} chunks a stage")
    timing = Timing(row.model, machine, row.length)
    counts = Parameters(row.model).of_stages(timing.bounds(layout), layout.tp)
    parameters = [count.total for count in counts]
    options = [layout]
    if row.micro_batch is None:
        share = layout.micro_batch * layout.accumulation
        options = [
            dataclasses.replace(layout, micro_batch=size, accumulation=share // size)
            for size in MICRO_BATCHES
            if share % size == 0
        ]
    seconds, layout = min(
        ((timing.step(option, parameters).total, option) for option in options), key=lambda pair: pair[0]
    )
    if row.micro_batch is None:
        assumed.append(f"micro-batch {layout.micro_batch}")
    tokens = layout.global_batch * row.length / seconds / layout.gpus
    cost = flops_of_a_token(row)
    published = row.flops_per_gpu or (row.tokens_per_second_per_gpu or 0.0) * cost
    return Comparison(
        source=row.source,
        model=row.name,
        gpu=row.gpu,
        gpus=layout.gpus,
        layout=f"tp {layout.tp} pp {layout.pp} dp {layout.dp}",
        published=published,
        predicted=tokens * cost,
        fitted=row.fitted,
        assumed=", ".join(assumed),
    )


@dataclass(frozen=True)
class Summary:
    """Errors without their signs."""

    median: float
    worst: float
    median_held_out: float
    worst_held_out: float


def summary(found: list[Comparison]) -> Summary:
    errors = [abs(c.error) for c in found]
    held_out = [abs(c.error) for c in found if not c.fitted] or errors
    return Summary(statistics.median(errors), max(errors), statistics.median(held_out), max(held_out))
