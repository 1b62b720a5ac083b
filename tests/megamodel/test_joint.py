"""Parallel blocks with one norm multiply once for all that reads it."""

from typing import Any

import pytest

from conf.typed import parse
from megamodel.config import Model
from megamodel.model import Transformer
from parallel.piece import pieces_of


@pytest.mark.parametrize(
    ("changes", "joint"),
    [
        ({"layout": "parallel_shared"}, True),
        ({"layout": "parallel_shared", "feedforward": {"gated": False, "d_ff": 64}}, True),
        ({"layout": "parallel_shared", "feedforward": {"bias": True, "d_ff": 64}}, False),  # one has biases
        ({"layout": "parallel_two"}, False),
        ({"layout": "pre"}, False),
    ],
)
def test_one_product_where_everything_reads_the_same(changes: dict[str, Any], joint: bool) -> None:
    usual = {"d_model": 32, "n_layers": 1, "feedforward": {"d_ff": 64}}
    usual["attention"] = {"n_heads": 4, "n_kv_heads": 2, "head_width": 8}
    model = Transformer(parse(Model, usual | changes))
    block = model.layers[1]
    assert (block.joint is not None) == joint
    names = {piece.name for p in model.parameters() for piece in pieces_of(p)}
    assert {f"blocks.0.attention.{n}.weight" for n in "qkv"} < names, "the names are the same either way"
    if joint:
        rows = 32 + 16 + 16 + 64 * (2 if model.settings.feedforward.gated else 1)
        assert block.joint.weight.shape == (rows, 32)
