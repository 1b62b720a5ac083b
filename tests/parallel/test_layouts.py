"""Loss, norm and state of every layout equal one process that knows nothing of DeepSpeed."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.parallel.training import Case, join, one_process, train
from tests.spawn import Ranks

FIVE_STEPS = [
    Case(tied=True),
    Case(tp=2, sequence=True),
    Case(tp=4, kv_heads=2),
    Case(tp=4, kv_heads=1, sequence=True, tied=True),
    Case(pp=2, micro_batch=2),
    Case(dp=4),
    Case(tp=2, pp=2, dp=2, sequence=True, tied=True),
    Case(tp=2, pp=2, dp=2, vocabulary=257),
    Case(pp=2, dp=2, tied=True, ragged=True, documents=True, recompute="block"),
    Case(pp=2, tp=2, n_layers=5, stage_layers=(2, 3), sequence=True, documents=True, micro_batch=4),
]


@cache
def reference(case: Case) -> dict[str, Any]:
    return one_process(case)


@pytest.mark.parametrize("case", FIVE_STEPS, ids=str)
def test_losses_and_norms_over_five_steps_equal_one_process(case: Case, ranks: Ranks) -> None:
    expected = reference(case)
    results = ranks.run(case.world, train, case)
    for result in results:
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(result["z_loss"], expected["z_loss"], rtol=1e-5)
        np.testing.assert_allclose(result["norm"], expected["norm"], rtol=1e-5)
        assert result["norm"] == results[0]["norm"], "ranks disagree on the norm"
        total, count = result["evaluation"]
        assert count == expected["evaluation"][1]
        assert total == pytest.approx(expected["evaluation"][0], rel=1e-5)


ONE_STEP = [
    Case(tp=2, pp=2, dp=2, sequence=True, tied=True, steps=1),
    Case(tp=4, kv_heads=2, sequence=True, vocabulary=257, steps=1),
    Case(dp=4, ragged=True, steps=1),
]


@pytest.mark.parametrize("case", ONE_STEP, ids=str)
def test_state_after_a_clipped_step_equals_one_process(case: Case, ranks: Ranks) -> None:
    expected = reference(case)
    assert expected["norm"][0] > case.clip, "the step must be clipped to test clipping"
    state = join([part for result in ranks.run(case.world, train, case) for part in result["state"]])
    assert state.keys() == expected["state"].keys()
    for (name, kind), values in state.items():
        want = expected["state"][name, kind]
        assert values.shape == want.shape
        if kind != "master":
            np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
            continue
        # The first Adam update is about lr sign(g): where g is rounding noise, so is the sign.
        gradient = expected["state"][name, "exp_avg"]
        clear = np.abs(gradient) > 1e-6 * np.abs(gradient).max()
        np.testing.assert_allclose(values[clear], want[clear], rtol=1e-5, atol=1e-7)


def test_unequal_counts_in_any_split_give_one_loss_and_gradient(ranks: Ranks) -> None:
    cases = [
        Case(ragged=True, steps=1, micro_batch=1),
        Case(ragged=True, steps=1, micro_batch=8),
        Case(ragged=True, steps=1, micro_batch=2, dp=2),
        Case(ragged=True, steps=1, micro_batch=1, dp=2, pp=2),
    ]
    expected = one_process(cases[0])
    for case in cases:
        result = ranks.run(case.world, train, case)[0]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5)


def test_a_skipped_update_leaves_no_trace(ranks: Ranks) -> None:
    """Step 3 is refused: what follows equals a run without that update, and Adam counts one less."""
    for case in (Case(skip_at=3), Case(skip_at=3, tp=2, pp=2, dp=2, sequence=True, tied=True)):
        expected = reference(case)
        for result in ranks.run(case.world, train, case):
            np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
            np.testing.assert_allclose(result["norm"], expected["norm"], rtol=1e-5)
            assert result["adam_step"] == case.steps - 1


def test_dropout_masks_are_the_same_at_every_layout(ranks: Ranks) -> None:
    case = Case(dropout=0.2, steps=2)
    expected = reference(case)
    assert expected["loss"][0] != pytest.approx(reference(Case(steps=2))["loss"][0], abs=1e-3)
    for layout in (
        Case(dropout=0.2, steps=2, tp=2, sequence=True, micro_batch=2),
        Case(dropout=0.2, steps=2, pp=2, dp=2, recompute="block"),
    ):
        for result in ranks.run(layout.world, train, layout):
            np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
            np.testing.assert_allclose(result["norm"], expected["norm"], rtol=1e-5)


def test_initial_weights_do_not_depend_on_the_layout(ranks: Ranks) -> None:
    """Bit for bit, at tp, pp, dp and all of them, against the model built in this process."""
    for case in (
        Case(tp=4, kv_heads=2, vocabulary=257, steps=0),
        Case(tp=2, pp=2, dp=2, sequence=True, tied=True, steps=0),
    ):
        parts = [part for result in ranks.run(case.world, initial_state, case) for part in result]
        state = join(parts)
        expected = initial_weights(case)
        assert state.keys() == expected.keys()
        for key, values in state.items():
            np.testing.assert_array_equal(values, expected[key])


def initial_state(case: Case) -> Any:
    from tests.parallel.training import build, logical_state

    return [part for part in logical_state(build(case)) if part[1] == "master"]


def initial_weights(case: Case) -> dict[tuple[str, str], np.ndarray]:
    from megamodel.model import Transformer
    from parallel.piece import pieces_of
    from tests.parallel.training import settings

    found = {}
    for parameter in Transformer(settings(case), seed=7).parameters():
        for piece in pieces_of(parameter):
            flat = parameter.detach().reshape(-1)[piece.start : piece.start + piece.numel]
            found[piece.name, "master"] = flat.view(piece.extent).numpy()
    return found


BF16 = [Case(), Case(pp=2, micro_batch=2), Case(tp=2, dp=2, sequence=True), Case(pp=2, tied=True)]


@pytest.mark.parametrize("case", BF16, ids=str)
def test_in_bf16_micro_batches_add_up_to_the_same_gradient(case: Case, ranks: Ranks) -> None:
    """Within a few roundings of 2^-8: gradients of several micro-batches counted twice would be far off."""
    expected = reference(replace(case, steps=1, tp=1, pp=1, dp=1, sequence=False, micro_batch=1))
    for result in ranks.run(case.world, train, replace(case, steps=1, precision="bf16")):
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=5e-3)
        np.testing.assert_allclose(result["norm"], expected["norm"], rtol=2e-2)
