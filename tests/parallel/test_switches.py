"""Any switch on or off, the same curve: 20 steps of every form at several layouts against plain torch."""

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from megamodel.kernels.compiler import counted, problem
from tests.parallel.training import Case, one_process, train
from tests.spawn import Ranks

SWITCHES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "recompute blocks": {"recompute": "block"},
    "recompute attentions": {"recompute": "attention"},
    "recompute every second block": {"recompute": "block", "recompute_every": 2},
    "whole head": {"kernels": (("head", "whole"),)},
    "whole attention": {"kernels": (("attention", "whole"),)},
    "sdpa": {"kernels": (("attention", "sdpa"),)},
}
LAYOUTS = {"one": {}, "tp": {"tp": 2}, "pp": {"pp": 2}}
MODEL = Case(steps=20, documents=True, ragged=True, tied=True, micro_batch=2)


@cache
def reference(case: Case) -> dict[str, Any]:
    return one_process(case)


def check(case: Case, like: Case, ranks: Ranks) -> None:
    expected = reference(like)
    for result in ranks.run(case.world, train, case):
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(result["norm"], expected["norm"], rtol=1e-5)


# Beside all of them in one process; the others are in the long form.
QUICK = {
    ("as it comes", "pp"),
    ("whole head", "pp"),
    *itertools.product(("recompute attentions", "recompute every second block"), ("tp", "pp")),
}
COMBINATIONS = [
    pytest.param(*both, marks=[] if both[1] == "one" or both in QUICK else [pytest.mark.slow])
    for both in itertools.product(SWITCHES, LAYOUTS)
]


@pytest.mark.parametrize(("switch", "layout"), COMBINATIONS)
def test_the_curve_is_the_same(switch: str, layout: str, ranks: Ranks) -> None:
    check(replace(MODEL, **SWITCHES[switch], **LAYOUTS[layout]), MODEL, ranks)


# Weights, activations and gradients of 16 bit are rounded by up to 2^-8 each, and 20 updates carry that on.
# Losses, means over some tens of tokens, came 1.2e-3 from those in fp32, norms of whole gradients 9.9e-3.
# Rounding goes both ways: what does not vanish in the mean over the steps would be something else.
OF_BF16 = {"loss": (2.5e-3, 5e-4), "norm": (2e-2, 2.5e-3)}
LARGER = replace(MODEL, micro_batch=4)


@pytest.mark.parametrize("form", ["native", "widened"])
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_the_forms_of_products_in_bf16(form: str, layout: str, ranks: Ranks) -> None:
    case = replace(LARGER, precision="bf16", kernels=(("products", form),), **LAYOUTS[layout])
    expected = reference(LARGER)
    for result in ranks.run(case.world, train, case):
        for name, (each, mean) in OF_BF16.items():
            error = np.divide(result[name], expected[name]) - 1
            assert abs(error).max() < each and abs(error.mean()) < mean, name


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_small_workspace(layout: str, ranks: Ranks) -> None:
    """The smallest there is, 1 MiB: half of a micro-batch's logits on each of two ranks, or a quarter."""
    like = replace(LARGER, vocabulary=16384)
    check(replace(like, kernels=(("workspace_bytes", 1 << 20),), **LAYOUTS[layout]), like, ranks)


@pytest.mark.parametrize("form", ["loop", "sorted"])
def test_the_forms_of_experts_too(form: str, ranks: Ranks) -> None:
    like = replace(MODEL, variant="experts", steps=5)
    check(replace(like, tp=2, kernels=(("experts", form),)), like, ranks)


@pytest.mark.skipif(problem(cuda=False) is not None, reason=str(problem(cuda=False)))
def test_compiled_blocks_are_compiled_once(ranks: Ranks) -> None:
    """All blocks share a graph, a step is no reason for another, and the curve is the same."""
    like = replace(MODEL, steps=4)
    expected = reference(like)
    compiled = replace(like, kernels=(("compile", "block"),))
    (found,) = ranks.run(1, train_and_count, compiled)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    made = found["compiled"]
    # The pieces of one block between what stays outside (7 were seen), not those of 4 blocks and 4 steps.
    assert 1 <= made.graphs <= 8 and not made.beyond_limit


def train_and_count(case: Case) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    return {"loss": train(case)["loss"], "compiled": counted()}


@pytest.mark.slow
@pytest.mark.skipif(problem(cuda=False) is not None, reason=str(problem(cuda=False)))
@pytest.mark.parametrize("variant", ["consensus", "layout parallel, one norm", "experts", "QK-norm per head"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "recompute", "sequence"])
def test_compiled_blocks_too(layout: str, variant: str, ranks: Ranks) -> None:
    more = {"recompute": {"recompute": "block"}, "sequence": {"tp": 2, "sequence": True}}
    like = replace(MODEL, variant=variant)
    check(replace(like, kernels=(("compile", "block"),), **(LAYOUTS | more)[layout]), like, ranks)
