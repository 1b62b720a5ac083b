"""A turn of the training benchmark that is a real run: the command `train` with all it does beside the step.

Loader, judge, metrics, TensorBoard, heartbeat and progress are on; evaluation, checkpoints and samples, which
most steps do not have, are off. Seconds of an update are those between two lines of metrics.jsonl.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from megamodel.config import Model

EOS = 0


def overrides(
    folder: Path, name: str, model: Model, *, rows: int, length: int, steps: int, precision: str
) -> list[str]:
    """The command line of a run of so many updates on random tokens."""
    attention, window = model.attention, model.attention.window
    tokens = folder / f"{name}.npy"
    count = (steps + 8) * rows * length
    source = np.random.default_rng(0)
    np.save(tokens, source.integers(EOS, model.vocab_size, count, dtype=np.uint16))
    values = {
        "run.dir": folder / name,
        "data": "files",
        "data.paths": f"[{tokens}]",
        "data.isolate_documents": "false",  # the other entries' rows are one document each
        "tokenizer": "ids",
        "tokenizer.vocab_size": model.vocab_size,
        "tokenizer.eos_id": EOS,
        "model.vocab_size": model.vocab_size,
        "model.d_model": model.d_model,
        "model.n_layers": model.n_layers,
        "model.tie_embeddings": "false",
        "model.attention.n_heads": attention.n_heads,
        "model.attention.n_kv_heads": attention.n_kv_heads,
        "model.attention.head_width": attention.head_width,
        "model.attention.window": "null" if window is None else window,
        "model.feedforward.d_ff": model.feedforward.d_ff,
        "train.steps": steps,
        "train.sequence_length": length,
        "train.micro_batch": rows,
        "train.global_batch": rows,
        "train.precision": precision,
        "schedule": "constant",
        "optim.lr": 3e-4,
        "kernels.compile": "block",
        "hardware": "cpu",
        "hardware.threads": "2",
        "evaluate.batches": 0,
        "checkpoint.every": 0,
        "sample.max_tokens": 0,
    }
    return [f"{key}={value}" for key, value in values.items()]


def train(folder: Path, name: str, model: Model, **shape: Any) -> list[dict[str, Any]]:
    """The command, in this process; the records of its updates. RuntimeError where it fails."""
    from launcher.__main__ import main

    arguments = ["train", *overrides(folder, name, model, **shape)]
    with contextlib.redirect_stdout(sys.stderr):
        code = main(arguments)
    if code:
        raise RuntimeError(f"{' '.join(arguments)} ended with {code}")
    text = (folder / name / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
