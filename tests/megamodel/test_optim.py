"""Learning rates against numbers worked out by hand, parameter groups against a written list."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from conf.typed import config, parse, setting
from megamodel.optim import (
    Constant,
    Cosine,
    LearningRate,
    Linear,
    Optim,
    Schedule,
    Warmup,
    Wsd,
    adamw,
    learning_rate,
    parameter_groups,
    resolve,
    updates,
)

PEAK, FLOOR = 8e-4, 1e-4
ROOT_HALF = 0.7071067811865475244  # cos(pi / 4)


def rate(schedule: Warmup, steps: int, step_tokens: int = 1) -> LearningRate:
    return resolve(schedule, peak=PEAK, steps=steps, step_tokens=step_tokens)  # type: ignore[arg-type]


# N = 13, W = 4: the decay runs over N - 1 - W = 8 updates; a quarter is s = 6, the middle s = 8.
BY_HAND = [
    (Cosine, 6, FLOOR + 7e-4 * (1 + ROOT_HALF) / 2),
    (Cosine, 8, 4.5e-4),
    (Cosine, 10, FLOOR + 7e-4 * (1 - ROOT_HALF) / 2),
    (Linear, 5, 7.125e-4),
    (Linear, 8, 4.5e-4),
    (Linear, 11, 1.875e-4),
    (Constant, 5, PEAK),
    (Constant, 8, PEAK),
    (Constant, 11, PEAK),
]


@pytest.mark.parametrize(("variant", "step", "expected"), BY_HAND)
def test_the_middle_of_a_schedule(variant: type[Warmup], step: int, expected: float) -> None:
    assert rate(variant(warmup_steps=4, min_lr=FLOOR), 13).at(step) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("variant", [Cosine, Linear, Constant, Wsd])
def test_the_edges_are_exact(variant: type[Warmup]) -> None:
    schedule = rate(variant(warmup_steps=4, min_lr=FLOOR), 13)
    assert [schedule.at(step) for step in (0, 1, 2, 3, 4)] == [2e-4, 4e-4, PEAK * 0.75, PEAK, PEAK]
    last = PEAK if variant is Constant else FLOOR
    assert [schedule.at(step) for step in (12, 13, 1000)] == [last, last, last]


@pytest.mark.parametrize("variant", [Cosine, Linear, Constant, Wsd])
def test_without_warmup_the_first_update_has_the_peak(variant: type[Warmup]) -> None:
    schedule = rate(variant(warmup_steps=0, min_lr=FLOOR), 3)
    assert schedule.at(0) == PEAK
    assert schedule.at(1) == pytest.approx({Constant: PEAK, Wsd: PEAK}.get(variant, 4.5e-4), rel=1e-14)


# N = 13, W = 2, D = 5: the peak until s = 8, then u = 1/4, 1/2, 3/4, 1.
@pytest.mark.parametrize(
    ("decay", "shares"),
    [
        ("line", [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("one_minus_sqrt", [1.0, 1.0, 0.5, 1 - ROOT_HALF, 1 - math.sqrt(3) / 2, 0.0, 0.0]),
    ],
)
def test_warmup_stable_decay(decay: str, shares: list[float]) -> None:
    schedule = rate(Wsd(warmup_steps=2, decay_steps=5, decay=decay, min_lr=FLOOR), 13)  # type: ignore[arg-type]
    expected = [FLOOR + (PEAK - FLOOR) * share for share in shares]
    assert [schedule.at(step) for step in range(7, 14)] == pytest.approx(expected, rel=1e-14)
    assert schedule.at(8) == PEAK
    assert schedule.at(12) == FLOOR


def test_the_longest_decay_starts_right_after_the_warmup() -> None:
    schedule = rate(Wsd(warmup_steps=3, decay_steps=10, decay="line"), 13)
    assert schedule.at(2) == schedule.at(3) == PEAK
    assert schedule.at(4) == pytest.approx(PEAK * 8 / 9, rel=1e-14)
    assert schedule.at(12) == 0.0


@pytest.mark.parametrize(
    ("preset", "steps", "warmup"), [(2000, 101, 10), (2000, 100, 9), (2000, 2, 0), (5, 1000, 5), (0, 1000, 0)]
)
def test_null_warmup_is_the_presets_number_or_a_tenth_of_the_run(
    preset: int, steps: int, warmup: int
) -> None:
    assert rate(Cosine(preset_warmup_steps=preset), steps).warmup_steps == warmup


def test_tokens_become_updates_rounded_up() -> None:
    assert [updates(tokens, 1024) for tokens in (0, 1, 1024, 1025, 2048)] == [0, 1, 1, 2, 2]
    schedule = rate(Wsd(warmup_tokens=1025, decay_tokens=4000, decay="line"), 20, step_tokens=1024)
    assert (schedule.warmup_steps, schedule.decay_start) == (2, 16)
    in_steps = rate(Wsd(warmup_steps=2, decay_steps=4, decay="line"), 20)
    assert [schedule.at(s) for s in range(25)] == [in_steps.at(s) for s in range(25)]


def test_null_decay_is_a_tenth_of_the_run() -> None:
    assert rate(Wsd(), 1000).decay_start == 900
    assert rate(Wsd(), 2).decay_start == 0


REFUSED = [
    (Cosine(warmup_steps=12), 13, "schedule.warmup_steps of at most 11"),
    (Linear(warmup_steps=99), 13, "schedule.warmup_steps of at most 11"),
    (Linear(warmup_tokens=12 * 64), 13, r"schedule.warmup_tokens=768.*at most 11"),
    (Cosine(), 1, r"train.steps \(1\) is too short.*schedule=constant"),
    (Wsd(), 1, r"train.steps \(1\) is too short"),
    (Constant(warmup_steps=14), 13, "schedule.warmup_steps of at most 13"),
    (Wsd(warmup_steps=3, decay_steps=11), 13, "schedule.decay_steps of at least 2 and at most 10"),
    (Wsd(warmup_steps=3, decay_steps=1), 13, "schedule.decay_steps of at least 2 and at most 10"),
    (Wsd(warmup_steps=12, decay_steps=2), 13, "schedule.warmup_steps of at most 11"),
    (Wsd(warmup_steps=3, decay_tokens=1), 13, r"schedule.decay_tokens=1\).*at most 10"),
    (Cosine(min_lr=9e-4), 13, r"schedule.min_lr \(0.0009\) is above optim.lr \(0.0008\)"),
    (Constant(min_lr=9e-4), 13, "is above optim.lr"),
    (Constant(), 0, r"train.steps \(0\) must be at least 1"),
]


@pytest.mark.parametrize(("schedule", "steps", "message"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_way_out(schedule: Warmup, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rate(schedule, steps, step_tokens=64)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (Cosine(warmup_steps=11), 13),
        (Linear(warmup_steps=11), 13),
        (Constant(warmup_steps=13), 13),
        (Wsd(warmup_steps=11, decay_steps=2), 13),
        (Wsd(warmup_steps=3, decay_steps=10), 13),
        (Cosine(min_lr=PEAK), 13),
        (Constant(), 1),
    ],
)
def test_the_largest_allowed_values_are_allowed(schedule: Warmup, steps: int) -> None:
    values = [rate(schedule, steps).at(step) for step in range(steps)]
    assert max(values) == PEAK
    assert values[-1] == (PEAK if isinstance(schedule, Constant) else schedule.min_lr)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup_steps": 3, "warmup_tokens": 4}, "both given"),
        ({"warmup_steps": -1}, "must be 0 or more"),
        ({"min_lr": -1e-9}, "schedule.min_lr"),
        ({"min_lr": math.nan}, "schedule.min_lr"),
        ({"preset_warmup_steps": -1}, "schedule.preset_warmup_steps"),
    ],
)
def test_a_schedule_wrong_in_itself_is_refused(fields: dict[str, float], message: str) -> None:
    for variant in (Cosine, Linear, Constant, Wsd):
        with pytest.raises(ValueError, match=message):
            variant(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"schedule.decay_steps \(3\) and schedule.decay_tokens \(4\)"):
        Wsd(decay_steps=3, decay_tokens=4)


@given(
    variant=st.sampled_from([Cosine, Linear, Constant, Wsd]),
    steps=st.integers(2, 400),
    tenths=st.integers(0, 9),
    floor=st.floats(0, PEAK, allow_subnormal=False),  # a run in this process may have set them to be 0
)
def test_after_warmup_the_rate_never_rises_nor_leaves_its_range(
    variant: type[Warmup], steps: int, tenths: int, floor: float
) -> None:
    schedule = rate(variant(warmup_steps=min(steps - 2, steps * tenths // 12), min_lr=floor), steps)
    values = [schedule.at(step) for step in range(schedule.warmup_steps, steps + 5)]
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert all(floor <= value <= PEAK for value in values)


@given(warmup=st.integers(1, 300), data=st.data())
def test_warmup_is_the_exact_share_of_the_peak(warmup: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, warmup - 1))
    exact = Fraction(PEAK) * Fraction(step + 1, warmup)
    value = rate(Constant(warmup_steps=warmup), 300).at(step)
    assert abs(Fraction(value) - exact) <= exact * Fraction(1, 2**52)


def test_one_value_can_be_read_without_resolving_first() -> None:
    assert learning_rate(Linear(warmup_steps=4), peak=PEAK, step=8, steps=13) == pytest.approx(
        4e-4, rel=1e-14
    )


def test_schedules_are_told_apart_by_kind() -> None:
    @config
    class Root:
        schedule: Schedule = setting(factory=Cosine, on_resume="free", help="the schedule")

    parsed = parse(Root, {"schedule": {"kind": "wsd", "decay_steps": 7, "decay": "line"}})
    assert parsed.schedule == Wsd(decay_steps=7, decay="line")
    with pytest.raises(ValueError, match="decay_steps"):
        parse(Root, {"schedule": {"kind": "cosine", "decay_steps": 7}})
    with pytest.raises(ValueError, match="sine"):
        parse(Root, {"schedule": {"kind": "sine"}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("lr", math.inf),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("clip_norm", -1.0),
        ("clip_norm", math.nan),
    ],
)
def test_an_impossible_optimizer_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"optim.{name} \("):
        Optim(**{name: value})


class Tied(nn.Module):
    """An embedding used twice, a norm, a biased layer and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.layer = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_decay_touches_matrices_only_and_each_parameter_once() -> None:
    module = Tied()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = parameter_groups(module, 0.1)
    assert [[names[id(p)] for p in group["params"]] for group in groups] == [
        ["embedding.weight", "layer.weight"],
        ["norm.weight", "norm.bias", "layer.bias"],
    ]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert parameter_groups(nn.LayerNorm(3), 0.1)[0]["weight_decay"] == 0.0  # no empty group before it


def test_one_update_is_adamw_by_hand() -> None:
    """First update, gradient g: the moments' corrections cancel, so w (1 - lr wd) - lr g / (|g| + eps)."""
    module = nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.bias.fill_(2.0)
    module.weight.grad, module.bias.grad = torch.full((1, 1), 0.5), torch.full((1,), -0.25)
    settings = Optim(lr=0.1, weight_decay=0.5, eps=0.25, beta1=0.8, beta2=0.9)
    optimizer = adamw(module, settings)
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is True
    assert module.weight.item() == pytest.approx(2.0 * (1 - 0.05) - 0.1 * 0.5 / 0.75, rel=1e-6)
    assert module.bias.item() == pytest.approx(2.0 + 0.1 * 0.25 / 0.5, rel=1e-6)
    state = optimizer.state[module.weight]
    assert state["exp_avg"].item() == pytest.approx(0.2 * 0.5, rel=1e-6)
    assert state["exp_avg_sq"].item() == pytest.approx(0.1 * 0.25, rel=1e-6)


class Names(TorchDispatchMode):
    """Of the operations that change an optimizer's parameters, those that were run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_adamw_is_fused_on_this_device() -> None:
    """One operation updates all tensors of a group, and nothing else touches them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = Tied().to(device)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer = adamw(module, Optim())
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    optimizer.step()  # makes the moments
    with Names() as names:
        optimizer.step()
    assert names.seen.count("_fused_adamw_") == 2
    assert not {"lerp_", "addcmul_", "addcdiv_", "_foreach_addcdiv_"} & set(names.seen)


def test_adamw_is_not_fused_where_torch_has_no_such_form() -> None:
    optimizer = adamw(Tied().to("meta"), Optim())
    assert [group["fused"] for group in optimizer.param_groups] == [False, False]
