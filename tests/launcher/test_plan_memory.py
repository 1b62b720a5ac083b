"""Bytes that the planner predicts, against what autograd saves and what a step of the engine holds."""

from typing import Any

import pytest
import torch

from checkpoints.config import Checkpoint
from conf.compose import Composer
from conf.typed import parse
from launcher.config import Config
from launcher.plan.activations import block_kept
from launcher.plan.layout import Layout
from launcher.plan.memory import Bytes, Memory, verdict
from launcher.plan.parameters import Parameters
from launcher.plan.timing import block_bounds
from megamodel.accounting import parameter_count
from megamodel.config import Model
from megamodel.model import Transformer
from tests.launcher.live import peak_of_a_step
from tests.spawn import Ranks

HEADS = {"n_heads": 4, "n_kv_heads": 2, "head_width": 16}
BASE = {"vocab_size": 512, "d_model": 64, "n_layers": 2, "attention": HEADS, "feedforward": {"d_ff": 160}}
PLAIN = {"d_ff": 160, "gated": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "consensus": {},
    "post": {"layout": "post"},
    "double": {"layout": "double"},
    "output": {"layout": "output"},
    "parallel_shared": {"layout": "parallel_shared"},
    "parallel_two": {"layout": "parallel_two"},
    "layernorm": {"norm": {"kind": "layernorm"}},
    "no_gain": {"norm": {"kind": "layernorm", "gain": False, "bias": False}},
    "gemma_norm": {"norm": {"offset": 1.0, "rounding": "after_gain"}},
    "gelu": {"feedforward": {**PLAIN, "activation": "gelu", "bias": True}},
    "relu": {"feedforward": {**PLAIN, "activation": "relu"}},
    "relu2": {"feedforward": {**PLAIN, "activation": "relu2"}},
    "clamped": {"feedforward": {"d_ff": 160, "clamp": 7.0}},
    "window": {"attention": {**HEADS, "window": 8}},
    "qk_norm": {"attention": {**HEADS, "qk_norm": {"scope": "head"}}},
    "softcap": {"attention": {**HEADS, "softcap": 30.0}},
    "sinks": {"attention": {**HEADS, "sinks": True}},
    "alibi": {"position": {"kind": "alibi"}},
    "learned": {"position": {"kind": "learned", "max_positions": 64}},
    "half_rope": {"position": {"kind": "rope", "fraction": 0.5}},
    "attention_dropout": {"dropout": {"attention": 0.1}},
    "one_key_head": {"attention": {**HEADS, "n_kv_heads": 1}},
}


def preset(name: str) -> Model:
    composer = Composer(Config, "config")
    return composer.typed(composer.compose([f"model={name}"])).model


def saved_bytes(model: Model, dtype: torch.dtype, rows: int, length: int, *, documents: bool) -> int:
    """Of the storages that autograd saves in a block's forward pass, the weights left out."""
    transformer = Transformer(model, documents=documents).to(dtype)
    block = next(module for module in transformer.layers if type(module).__name__ == "Block")
    own = {p.untyped_storage().data_ptr() for p in transformer.parameters()}
    held: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes() > 2000:  # a gain in fp32 is not for each token
            held[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(rows, length, model.d_model, dtype=dtype, requires_grad=True) * 1
    positions = torch.arange(length).expand(rows, length).contiguous()
    if documents:
        positions[:, length // 2 :] -= length // 2
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block((x, positions, torch.arange(rows)))
    assert out is not None
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_keeps_what_autograd_saves(name: str, precision: Any) -> None:
    model, rows, length = parse(Model, {**BASE, **VARIANTS[name]}), 8, 64
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    layout = Layout(precision=precision)
    kept = block_kept(model, model.layer(0), length, layout, documents=False)
    measured = saved_bytes(model, dtype, rows, length, documents=False)
    shared = 7 / 8 * mask_bytes(name, length, layout.number_bytes)  # one mask for all rows
    assert kept.on_rank(layout) - shared == pytest.approx(measured / (rows * length), rel=0.01)


def mask_bytes(name: str, length: int, b: int) -> float:
    return {"window": length * b, "softcap": length, "sinks": length, "attention_dropout": length}.get(
        name, 0.0
    )


def test_documents_cost_their_outputs_once_more() -> None:
    model, rows, length = parse(Model, BASE), 4, 64
    kept = block_kept(model, model.layer(0), length, Layout(precision="fp32"), documents=True)
    measured = saved_bytes(model, torch.float32, rows, length, documents=True)
    assert kept.whole + kept.split == pytest.approx(measured / (rows * length), rel=0.01)


SNAPSHOTS = parse(Checkpoint, {})
STEP = {
    "vocab_size": 1024,
    "d_model": 128,
    "n_layers": 4,
    "attention": {"n_heads": 4, "n_kv_heads": 2, "head_width": 32},
    "feedforward": {"d_ff": 320},
    "tie_embeddings": False,
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("split", "micro", "accumulation", "documents"),
    [
        ({}, 4, 2, False),
        ({}, 8, 1, False),
        ({"recompute": "block"}, 8, 2, True),
        ({"recompute": "block"}, 1, 2, False),
        ({"recompute": "attention"}, 8, 2, False),
        ({"recompute": "block", "recompute_every": 2}, 8, 2, False),
        ({"pp": 2}, 4, 4, False),
        ({"tp": 2}, 4, 2, False),
        ({"tp": 2, "sequence_parallel": True}, 4, 2, True),
    ],
    ids=str,
)
def test_the_peak_of_a_step_within_a_tenth(
    ranks: Ranks, split: dict[str, Any], micro: int, accumulation: int, documents: bool, precision: Any
) -> None:
    model, length = parse(Model, STEP), 256
    measured = ranks.run(
        split.get("tp", 1) * split.get("pp", 1),
        peak_of_a_step,
        STEP,
        split,
        precision,
        micro,
        accumulation,
        length,
        documents,
    )
    layout = Layout(**split, micro_batch=micro, accumulation=accumulation, precision=precision)
    stages = predicted(model, layout, length, documents=documents)
    for rank, peak in enumerate(measured):
        stage = rank if layout.pp > 1 else 0
        assert stages[stage].total == pytest.approx(peak, rel=0.1), (rank, stages[stage])


def predicted(model: Model, layout: Layout, length: int, *, documents: bool) -> list[Bytes]:
    memory = Memory(model, length, documents=documents, on_cpu=True)
    return memory.stages(layout, block_bounds(model, layout.pp, None), SNAPSHOTS)


@pytest.mark.parametrize(
    "name", ["tiny", "gpt2", "llama3_70b", "mixtral_8x7b", "gemma2_9b", "deepseek_v2_lite"]
)
def test_parameters_over_stages_and_ranks_add_up(name: str) -> None:
    """Without padding the ranks of all stages hold the published number, replicated vectors besides."""
    model = preset(name)
    counts = Parameters(model).of_stages([0, model.n_layers], 1)
    padding = -model.vocab_size % 64 * model.d_model * (1 if model.tie_embeddings else 2)
    assert counts[0].total - padding == parameter_count(model)


def test_a_tied_matrix_stands_on_the_first_and_the_last_stage() -> None:
    model = preset("tiny")
    one = Parameters(model).of_stages([0, 4], 1)[0].total
    first, last = Parameters(model).of_stages([0, 2, 4], 1)
    assert first.total + last.total - one == model.vocab_size * model.d_model


def test_zero_splits_masters_and_moments_over_dp() -> None:
    model, bounds = preset("llama3_8b"), [0, 32]
    memory = Memory(model, 8192, documents=False, on_cpu=False)
    one, many = (memory.stages(Layout(dp=dp, accumulation=2), bounds, SNAPSHOTS)[0] for dp in (1, 64))
    n = 8_030_261_248  # a multiple of 64 rows: no padding
    assert (one.weights, one.gradients, one.masters, one.moments) == (2 * n, 4 * n, 4 * n, 8 * n)
    assert (many.weights, many.gradients, many.masters, many.moments) == (2 * n, 4 * n, n // 16, n // 8)
    assert one.snapshots == 3 * 12 * n  # a ring of two and one for the background writer


def test_in_flight_falls_from_stage_to_stage() -> None:
    layout = Layout(pp=4, accumulation=3)
    assert [layout.in_flight(stage) for stage in range(4)] == [3, 3, 2, 1]


def test_the_verdict_names_stage_kind_and_lever() -> None:
    model = preset("llama3_8b")
    memory = Memory(model, 8192, documents=False, on_cpu=False)
    layout = Layout(dp=64, micro_batch=4)
    found = verdict(memory.stages(layout, [0, 32], SNAPSHOTS), layout, 80e9)
    assert not found.fits and found.short_bytes > 0 and "recompute=block" in found.lever
    assert str(found).startswith("does not fit: short by ") and "because of activations" in str(found)
    roomy = verdict(memory.stages(layout, [0, 32], SNAPSHOTS), layout, 1e15)
    assert roomy.fits and "to spare" in str(roomy)
