"""What recomputation leaves out of memory, and what it computes a second time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from conf.typed import parse
from megamodel.attend import Attend
from megamodel.block import Block
from megamodel.config import Model
from megamodel.feedforward import FeedForward
from megamodel.model import layers
from parallel.tensor import TensorParallel

ROWS, LENGTH, WIDTH = 2, 64, 32
# x, and the positions and the samples in 64 bit: of them no row is repeated.
STREAM_BYTES = 4 * ROWS * LENGTH * WIDTH + 8 * LENGTH + 8 * ROWS
EXPERTS = {"kind": "routed", "n_experts": 4, "top_k": 2, "d_ff": 16, "balance_loss": 0.01}
MODELS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"layout": "post"},
    "double": {"layout": "double"},
    "parallel_shared": {"layout": "parallel_shared"},
    "parallel_two": {"layout": "parallel_two"},
    "experts": {"experts": EXPERTS},
    "soft cap, dropout": {
        "attention": {"n_heads": 4, "n_kv_heads": 2, "head_width": 8, "softcap": 5.0},
        "dropout": {"attention": 0.1, "residual": 0.1},
    },
}


def blocks(model: str, recompute: Any, every: int = 1) -> list[Block]:
    usual = {
        "vocab_size": 97,
        "d_model": WIDTH,
        "n_layers": 4,
        "attention": {"n_heads": 4, "n_kv_heads": 2, "head_width": 8},
        "feedforward": {"d_ff": 48},
    }
    settings = parse(Model, usual | MODELS[model])
    parts = layers(
        settings,
        seed=1,
        documents=False,
        parallel=TensorParallel(),
        recompute=recompute,
        recompute_every=every,
    )
    return [part.build() for part in parts if part.is_block]  # type: ignore[misc]


def stream() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    return x.requires_grad_(), torch.arange(LENGTH).expand(ROWS, -1), torch.arange(ROWS)


def saved_bytes(block: Block) -> int:
    """Memory that a forward pass keeps for the backward pass: each once, and no weights."""
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = block(stream())
    assert out[0].grad_fn is not None
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("model", MODELS)
def test_a_recomputed_block_keeps_its_input_only_and_a_recomputed_attention_less_than_all(model: str) -> None:
    none, attention, block = (saved_bytes(blocks(model, mode)[0]) for mode in ("none", "attention", "block"))
    assert block == STREAM_BYTES
    # At least what attention gives, the turned queries (32 wide each) and the turned keys (16) are not kept.
    assert block < attention <= none - 4 * ROWS * LENGTH * 80


def test_every_second_block_keeps_its_input_only() -> None:
    whole = saved_bytes(blocks("pre", "none")[0])
    assert [saved_bytes(b) for b in blocks("pre", "block", 2)] == [STREAM_BYTES, whole, STREAM_BYTES, whole]
    assert [saved_bytes(b) for b in blocks("pre", "block", 3)] == [STREAM_BYTES, whole, whole, STREAM_BYTES]
    assert [saved_bytes(b) for b in blocks("pre", "none", 2)] == [whole] * 4
    part = saved_bytes(blocks("pre", "attention")[0])
    assert [saved_bytes(b) for b in blocks("pre", "attention", 2)] == [part, whole, part, whole]


@pytest.mark.parametrize(
    ("recompute", "attentions", "feedforwards"), [("none", 1, 1), ("attention", 2, 1), ("block", 2, 2)]
)
@pytest.mark.parametrize("model", ["pre", "post", "parallel_shared"])
def test_what_was_not_kept_is_computed_once_more_and_nothing_else(
    model: str, recompute: str, attentions: int, feedforwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {Attend: 0, FeedForward: 0}
    for kind in calls:

        def counted(self: Any, *inputs: Any, kind: Any = kind, run: Any = kind.forward, **more: Any) -> Any:
            calls[kind] += 1
            return run(self, *inputs, **more)

        monkeypatch.setattr(kind, "forward", counted)
    (block, *_) = blocks(model, recompute)
    given = stream()
    x = block(given)[0]
    assert calls == {Attend: 1, FeedForward: 1}
    x.sum().backward()
    assert calls == {Attend: attentions, FeedForward: feedforwards}
    assert given[0].grad is not None


def test_evaluation_recomputes_nothing() -> None:
    """It has no backward pass, and one that asks for gradients all the same gets them as they come."""
    assert len({saved_bytes(blocks("pre", mode)[0].eval()) for mode in ("none", "attention", "block")}) == 1
