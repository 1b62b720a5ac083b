"""How weights are updated: AdamW, its parameter groups, and the learning rate as a pure function of the step.

Time: s = 0 .. N-1 is the update about to be applied, W the warm-up updates, D the decay updates of `wsd`.
torch is imported by the functions that need it, so that settings can be checked before it is loaded.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from conf.typed import config, setting, union

if TYPE_CHECKING:
    import torch


@config
class Optim:
    """AdamW (Loshchilov & Hutter 2019): decay is applied to the weight, not to the gradient."""

    lr: float = setting(3e-4, on_resume="needs_override", help="peak learning rate")
    beta1: float = setting(0.9, on_resume="needs_override", help="decay of the mean of the gradient")
    beta2: float = setting(0.95, on_resume="needs_override", help="decay of the mean of its square")
    eps: float = setting(1e-8, on_resume="needs_override", help="added to the root of the mean square")
    weight_decay: float = setting(
        0.1, on_resume="needs_override", help="of tensors with two or more dimensions only"
    )
    clip_norm: float = setting(
        1.0, on_resume="needs_override", help="largest global gradient norm; 0 clips nothing"
    )

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"optim.lr ({self.lr}) must be above 0 and finite")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim.{name} ({getattr(self, name)}) must be at least 0 and below 1")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"optim.eps ({self.eps}) must be above 0 and finite; 1e-8 is usual")
        for name in ("weight_decay", "clip_norm"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"optim.{name} ({value}) must be 0 or more and finite; 0 switches it off")


@config
class Warmup:
    """What every schedule shares: a linear rise to the peak, and a floor."""

    warmup_steps: int | None = setting(
        None,
        on_resume="needs_override",
        help="updates of warm-up; null: schedule.preset_warmup_steps, at most a tenth of the run",
    )
    warmup_tokens: int | None = setting(
        None, on_resume="needs_override", help="warm-up in tokens instead, rounded up to whole updates"
    )
    preset_warmup_steps: int = setting(
        2000, on_resume="needs_override", help="warm-up of this preset where the run is long enough for it"
    )
    min_lr: float = setting(0.0, on_resume="needs_override", help="lowest learning rate, absolute")

    def __post_init__(self) -> None:
        exclusive("warmup", self.warmup_steps, self.warmup_tokens)
        if self.preset_warmup_steps < 0:
            raise ValueError(f"schedule.preset_warmup_steps ({self.preset_warmup_steps}) must be 0 or more")
        if not (self.min_lr >= 0 and math.isfinite(self.min_lr)):
            raise ValueError(f"schedule.min_lr ({self.min_lr}) must be 0 or more and finite")


def exclusive(name: str, steps: int | None, tokens: int | None) -> None:
    """ValueError when a length is given in both units or is negative."""
    if steps is not None and tokens is not None:
        raise ValueError(
            f"schedule.{name}_steps ({steps}) and schedule.{name}_tokens ({tokens}) are both given; "
            "set one to null"
        )
    for unit, value in (("steps", steps), ("tokens", tokens)):
        if value is not None and value < 0:
            raise ValueError(f"schedule.{name}_{unit} ({value}) must be 0 or more")


@config
class Cosine(Warmup):
    """Half a cosine from the peak at s = W to min_lr at s = N - 1."""

    kind: Literal["cosine"] = setting("cosine", on_resume="needs_override", help="shape of the schedule")


@config
class Linear(Warmup):
    """A line from the peak at s = W to min_lr at s = N - 1."""

    kind: Literal["linear"] = setting("linear", on_resume="needs_override", help="shape of the schedule")


@config
class Constant(Warmup):
    """The peak after warm-up; min_lr has no effect."""

    kind: Literal["constant"] = setting("constant", on_resume="needs_override", help="shape of the schedule")


@config
class Wsd(Warmup):
    """Warm-up, stable, decay: the peak until s = N - D, then down to min_lr at s = N - 1."""

    kind: Literal["wsd"] = setting("wsd", on_resume="needs_override", help="shape of the schedule")
    decay_steps: int | None = setting(
        None, on_resume="needs_override", help="updates of the decay; null: a tenth of the run, at least 2"
    )
    decay_tokens: int | None = setting(
        None, on_resume="needs_override", help="decay in tokens instead, rounded up to whole updates"
    )
    decay: Literal["line", "one_minus_sqrt"] = setting(
        "one_minus_sqrt", on_resume="needs_override", help="shape of the decay"
    )

    def __post_init__(self) -> None:
        Warmup.__post_init__(self)
        exclusive("decay", self.decay_steps, self.decay_tokens)


Schedule = Annotated[Cosine | Wsd | Linear | Constant, union("kind")]

# Share of the way from min_lr back up to the peak, at u = 0 .. 1 of the decay.
SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "line": lambda u: 1 - u,
    "one_minus_sqrt": lambda u: 1 - math.sqrt(u),
}


@dataclass(frozen=True)
class LearningRate:
    """A schedule whose lengths are all known, in updates: peak until decay_start, floor from steps - 1 on."""

    peak: float
    floor: float
    steps: int
    warmup_steps: int
    decay_start: int
    shape: str | None  # a key of SHAPES; None: no decay

    def at(self, step: int) -> float:
        """The learning rate of update `step` (0 is the first one)."""
        if step < self.warmup_steps:
            return self.peak * ((step + 1) / self.warmup_steps)
        if self.shape is None or step <= self.decay_start:
            return self.peak
        if step >= self.steps - 1:
            return self.floor
        progress = (step - self.decay_start) / (self.steps - 1 - self.decay_start)
        value = self.floor + (self.peak - self.floor) * SHAPES[self.shape](progress)
        return min(max(value, self.floor), self.peak)  # rounding must not leave the promised range


def updates(tokens: int, step_tokens: int) -> int:
    """Updates that see at least `tokens`, when one sees step_tokens = global_batch x sequence_length."""
    return -(-tokens // step_tokens)


def warmup_updates(schedule: Warmup, *, steps: int, step_tokens: int) -> int:
    """Warm-up in updates, whatever it was given in."""
    if schedule.warmup_tokens is not None:
        return updates(schedule.warmup_tokens, step_tokens)
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return min(schedule.preset_warmup_steps, max(steps - 1, 0) // 10)


def decay_updates(schedule: Wsd, *, steps: int, step_tokens: int) -> int:
    """Decay in updates, whatever it was given in."""
    if schedule.decay_tokens is not None:
        return updates(schedule.decay_tokens, step_tokens)
    if schedule.decay_steps is not None:
        return schedule.decay_steps
    return max(2, steps // 10)


def resolve(schedule: Schedule, *, peak: float, steps: int, step_tokens: int) -> LearningRate:
    """The learning rate of a run of `steps` updates of `step_tokens` nominal tokens each.

    Raises ValueError, with the largest allowed values, for a schedule that does not fit the run.
    """
    if steps < 1:
        raise ValueError(f"train.steps ({steps}) must be at least 1")
    if schedule.min_lr > peak:
        raise ValueError(
            f"schedule.min_lr ({schedule.min_lr}) is above optim.lr ({peak}); min_lr may be at most optim.lr"
        )
    warmup = warmup_updates(schedule, steps=steps, step_tokens=step_tokens)
    rate = LearningRate(peak, schedule.min_lr, steps, warmup, decay_start=warmup, shape=None)
    match schedule:
        case Constant():
            if warmup > steps:
                raise ValueError(
                    f"a warm-up of {described(schedule, warmup)} does not fit train.steps ({steps}); "
                    f"use schedule.warmup_steps of at most {steps}"
                )
            return rate
        case Wsd():
            decay = decay_updates(schedule, steps=steps, step_tokens=step_tokens)
            check_decay(schedule, steps=steps, warmup=warmup, decay=decay)
            return dataclasses.replace(rate, decay_start=steps - decay, shape=schedule.decay)
        case _:
            check_warmup(schedule, steps=steps, warmup=warmup)
            return dataclasses.replace(rate, shape={"cosine": "cosine", "linear": "line"}[schedule.kind])


def learning_rate(schedule: Schedule, *, peak: float, step: int, steps: int, step_tokens: int = 1) -> float:
    """`resolve` and one value of it, for reading a schedule; a run resolves once."""
    return resolve(schedule, peak=peak, steps=steps, step_tokens=step_tokens).at(step)


def described(schedule: Warmup, warmup: int) -> str:
    given = "" if schedule.warmup_tokens is None else f" (schedule.warmup_tokens={schedule.warmup_tokens})"
    return f"{warmup} updates{given}"


def check_warmup(schedule: Cosine | Linear, *, steps: int, warmup: int) -> None:
    """Refuse a warm-up that leaves no update to decay in."""
    if steps < 2:
        raise ValueError(
            f"train.steps ({steps}) is too short for schedule.kind={schedule.kind}, which needs 2 or more; "
            "use schedule=constant"
        )
    if steps - 1 <= warmup:
        raise ValueError(
            f"a warm-up of {described(schedule, warmup)} leaves schedule.kind={schedule.kind} nothing to "
            f"decay in with train.steps ({steps}); use schedule.warmup_steps of at most {steps - 2}"
        )


def check_decay(schedule: Wsd, *, steps: int, warmup: int, decay: int) -> None:
    """Refuse unless 2 <= D <= N - W."""
    if steps < 2:
        raise ValueError(
            f"train.steps ({steps}) is too short for schedule.kind=wsd, which needs 2 or more; "
            "use schedule=constant"
        )
    if steps - warmup < 2:
        raise ValueError(
            f"a warm-up of {described(schedule, warmup)} leaves schedule.kind=wsd nothing to decay in with "
            f"train.steps ({steps}); use schedule.warmup_steps of at most {steps - 2}"
        )
    if not 2 <= decay <= steps - warmup:
        given = "" if schedule.decay_tokens is None else f" (schedule.decay_tokens={schedule.decay_tokens})"
        raise ValueError(
            f"a decay of {decay} updates{given} does not fit train.steps ({steps}) after a warm-up of "
            f"{warmup}; use schedule.decay_steps of at least 2 and at most {steps - warmup}"
        )


def parameter_groups(module: "torch.nn.Module", weight_decay: float) -> list[dict[str, Any]]:
    """Groups for AdamW: decay on tensors of two or more dimensions, none on norms and biases.

    Each trainable parameter is in exactly one group, a tied one once; an empty group is left out.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2]
    plain = [parameter for parameter in trainable if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(module: "torch.nn.Module", settings: Optim) -> "torch.optim.AdamW":
    """torch's AdamW over the parameter groups of `module`, fused where torch has that for the device."""
    import torch

    groups = parameter_groups(module, settings.weight_decay)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=devices <= {"cpu", "cuda"},
    )
