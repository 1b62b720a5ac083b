"""What the planner predicts for runs whose speed was published, beside what was published.

Figures and their sources stand in published.csv. Where a source leaves a field open the assumption is shown.
"""

import csv
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from conf.typed import parse
from launcher.hardware import Machine
from launcher.plan.layout import METHODS, Layout, Recompute
from launcher.plan.parameters import Parameters
from launcher.plan.timing import Timing
from megamodel.accounting import flops_per_token
from megamodel.config import Model

T = TypeVar("T")
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
RECOMPUTE: dict[str, Recompute] = {"full": "block", "selective": "selective", "none": "none"}
PARALLELISM = {
    "hsdp": "fsdp",
    "zero3": "fsdp",
    "zero2": "zero1",
    "distributed_optimizer": "zero1",
}  # as good as


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
    tp, pp, dp = int(row["tp"]), int(row["pp"]), int(row["dp"])
    micro, chunks = _known(row, "micro_batch"), _known(row, "pipeline_chunks")
    share = int(row["global_batch_sequences"]) // dp
    method = PARALLELISM.get(row["dp_kind"], row["dp_kind"])
    # Megatron-LM in fp16 came before fused attention; its "selective" recomputes the scores alone.
    is_fused = not (method == "ddp" and row["precision"] == "fp16")
    recompute = _choice(row, "recompute", RECOMPUTE)
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch=micro or 1,
        accumulation=max(share // (micro or 1), 1),
        recompute="scores" if recompute == "selective" and not is_fused else recompute,
        sequence_parallel=tp > 1 and (is_fused or recompute == "selective"),
        chunks=chunks or 1,
        method=_choice({"dp_kind": method}, "dp_kind", {name: name for name in METHODS}),
        fused_attention=is_fused,
    )
    return Published(
        source=row["source"],
        name=row["model"],
        model=_model(row),
        length=int(row["sequence"]),
        gpu=row["gpu"],
        layout=layout,
        convention=_choice(row, "flops_convention", {name: name for name in CONVENTIONS}),
        flops_per_gpu=float(row["tflops_per_gpu"]) * 1e12 if row["tflops_per_gpu"] else None,
        tokens_per_second_per_gpu=float(row["tokens_per_second_per_gpu"] or 0) or None,
        micro_batch=micro,
        chunks=chunks,
    )


def _known(row: dict[str, str], key: str) -> int | None:
    return int(row[key]) if row[key].isdigit() else None


def _choice(row: dict[str, str], key: str, choices: Mapping[str, T]) -> T:
    if row[key] not in choices:
        raise ValueError(f"{key} {row[key]!r} is not known; there are {', '.join(choices)}")
    return choices[row[key]]


def _model(row: dict[str, str]) -> Model:
    """With d_ff = 4 D GPT's form: LayerNorm, GELU, biases, learned positions, tied; else Llama's, untied."""
    heads, width = int(row["heads"]), int(row["d_model"])
    is_gpt = int(row["d_ff"]) == 4 * width
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


def _n21_flops(model: Model, length: int) -> float:
    h, layers, vocabulary = model.d_model, model.n_layers, model.vocab_size
    return 96 * layers * h * h * (1 + length / (6 * h) + vocabulary / (16 * layers * h))


def _full_attention_flops(model: Model, length: int) -> float:
    causal = flops_per_token(model, length)
    return causal.training + 3 * causal.attention


# FLOPs of a token as a source counts them. n21: forward twice, attention as the whole square;
# model: forward and backward, causal attention as half the square; the last: as the whole one (PaLM's).
CONVENTIONS: dict[str, Callable[[Model, int], float]] = {
    "n21_hardware_full_attention": _n21_flops,
    "model": lambda model, length: flops_per_token(model, length).training,
    "model_full_attention": _full_attention_flops,
}


def options(row: Published) -> list[tuple[Layout, str]]:
    """The layouts that a row may mean, each with what it assumes."""
    layout, assumed = row.layout, []
    if row.chunks is None and layout.pp > 1:
        chunks = min(-(-row.model.n_layers // layout.pp), MOST_CHUNKS)
        layout = dataclasses.replace(layout, chunks=chunks)
        assumed.append(f"{chunks} chunks a stage")
    if row.micro_batch is not None:
        return [(layout, ", ".join(assumed))]
    share = layout.micro_batch * layout.accumulation
    return [
        (
            dataclasses.replace(layout, micro_batch=size, accumulation=share // size),
            ", ".join([*assumed, f"micro-batch {size}"]),
        )
        for size in MICRO_BATCHES
        if share % size == 0
    ]


def compare(row: Published, machine: Machine) -> Comparison:
    """Predict a row; an unknown micro-batch is the fastest of 1, 2, 4, 8, unknown chunks a layer each."""
    timing = Timing(row.model, machine, row.length)
    counts = Parameters(row.model).of_stages(timing.bounds(row.layout), row.layout.tp)
    parameters = [count.total for count in counts]
    predicted = [(timing.step(layout, parameters).total, layout, said) for layout, said in options(row)]
    seconds, layout, assumed = min(predicted, key=lambda found: found[0])
    tokens = layout.global_batch * row.length / seconds / layout.gpus
    cost = CONVENTIONS[row.convention](row.model, row.length)
    return Comparison(
        source=row.source,
        model=row.name,
        gpu=row.gpu,
        gpus=layout.gpus,
        layout=f"tp {layout.tp} pp {layout.pp} dp {layout.dp}",
        published=row.flops_per_gpu or (row.tokens_per_second_per_gpu or 0.0) * cost,
        predicted=tokens * cost,
        fitted=row.fitted,
        assumed=assumed,
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
