"""What every entry of the training benchmark is given: models, batches, the optimizer.

B micro-batch rows, S sequence length, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megamodel.attention import GroupedAttention
from megamodel.config import Model
from megamodel.data.batch import Batch
from megamodel.feedforward import FeedForward
from megamodel.optim import Optim


@dataclass(frozen=True)
class Shape:
    """What all entries of a turn are given."""

    model: Model
    rows: int
    precision: Literal["fp32", "bf16"]
    device: torch.device


FIXED = Model(
    vocab_size=32000,
    d_model=512,
    n_layers=8,
    tie_embeddings=False,
    attention=GroupedAttention.Config(n_heads=8, n_kv_heads=4, head_width=64),
    feedforward=FeedForward.Config(d_ff=1376),
)
MODELS = {
    "fixed": FIXED,
    "long": replace(FIXED, attention=replace(FIXED.attention, window=1024)),
    # As TinyLlama 1.1B, for a GPU.
    "billion": Model(
        vocab_size=32000,
        d_model=2048,
        n_layers=22,
        tie_embeddings=False,
        attention=GroupedAttention.Config(n_heads=32, n_kv_heads=4, head_width=64),
        feedforward=FeedForward.Config(d_ff=5632),
    ),
    "smoke": Model(
        vocab_size=512,
        d_model=64,
        n_layers=2,
        tie_embeddings=False,
        attention=GroupedAttention.Config(n_heads=4, n_kv_heads=2, head_width=16),
        feedforward=FeedForward.Config(d_ff=176),
    ),
}
OPTIM = Optim(lr=3e-4)
BATCHES = 4  # different ones, taken in turn

CPU = torch.device("cpu")
Step = Callable[[Batch], float]  # one update, its loss


def batches(model: Model, rows: int, length: int) -> list[Batch]:
    """Random tokens, the same for every entry; targets are the next ones."""
    source = torch.Generator().manual_seed(0)
    made = []
    for number in range(BATCHES):
        ids = torch.randint(model.vocab_size, (rows, length + 1), generator=source)
        positions = torch.arange(length).expand(rows, length).contiguous()
        samples = torch.arange(number * rows, (number + 1) * rows)
        made.append(Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, samples))
    return made
