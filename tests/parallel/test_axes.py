"""Loss, norm and auxiliary losses of one model for each axis: every layout equals one process."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.parallel.training import Case, one_process, train
from tests.parallel.variants import VARIANTS
from tests.spawn import Ranks

BOTH = Case(tp=2, pp=2, sequence=True, micro_batch=4, steps=2)
WIDE = Case(tp=4, steps=2, micro_batch=8)
QUICK = (
    "layout double",
    "learned positions, tied",
    "tied, head bias",
    "QK-norm over the projection",
    "MLA, query latent",
)
CASES = [
    pytest.param(name, layout, marks=[] if name in QUICK or "experts" in name else pytest.mark.slow)
    for name in VARIANTS
    for layout in (BOTH, WIDE)
]


@cache
def reference(case: Case) -> dict[str, Any]:
    return one_process(case)


@pytest.mark.parametrize(("variant", "layout"), CASES, ids=str)
def test_a_model_of_each_axis_equals_one_process(variant: str, layout: Case, ranks: Ranks) -> None:
    case = replace(layout, variant=variant)
    expected = reference(replace(case, tp=1, pp=1, dp=1, sequence=False, micro_batch=1))
    assert len(expected["loss"]) == 2 and min(expected["norm"]) > 0.01
    # A router's choice is a step function: after an update, rounding noise of the first one shows.
    close = 1e-4 if expected["auxiliary"] else 1e-5
    for result in ranks.run(case.world, train, case):
        assert result["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-5)
        assert result["norm"][0] == pytest.approx(expected["norm"][0], rel=1e-5)
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=close)
        np.testing.assert_allclose(result["norm"], expected["norm"], rtol=close)
        if expected["auxiliary"]:
            np.testing.assert_allclose(result["auxiliary"], expected["auxiliary"], rtol=close)
