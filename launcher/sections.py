"""The sections of the configuration that say how a run proceeds: run, train, evaluate, sample,
statistics, faults."""

import math
from typing import Any, Literal

from conf.typed import config, setting

DEFAULT_STEPS = 600


@config
class Run:
    """The place and the manners of a run."""

    name: str = setting("run", on_resume="free", help="name of the run; its directory is runs/NAME")
    dir: str | None = setting(None, on_resume="free", help="directory of the run; null: runs/<run.name>")
    timeout_seconds: float = setting(
        600.0, on_resume="free", help="longest wait for the other processes in a collective or at the start"
    )
    time_limit_seconds: float | None = setting(
        None,
        on_resume="free",
        help="save and stop at the first step that ends so long after the start; null: no limit",
    )
    garbage_collect_every: int = setting(
        100,
        on_resume="free",
        help="collect Python's garbage every so many steps, on all ranks at once; 0 = whenever Python likes",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", on_resume="free", help="what goes into logs/rank-N.log; debug adds tracebacks on the terminal"
    )
    log_every: int = setting(10, on_resume="free", help="steps between plain progress lines")

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ValueError(f"run.name ({self.name!r}) must be a plain name; a path goes into run.dir")
        if self.timeout_seconds <= 0:
            raise ValueError(f"run.timeout_seconds ({self.timeout_seconds}) must be above 0; 600 is usual")
        if self.time_limit_seconds is not None and self.time_limit_seconds <= 0:
            raise ValueError(
                f"run.time_limit_seconds ({self.time_limit_seconds}) must be above 0; null sets no limit"
            )
        if self.garbage_collect_every < 0 or self.log_every < 1:
            raise ValueError(
                f"run.garbage_collect_every ({self.garbage_collect_every}) must be 0 or more and "
                f"run.log_every ({self.log_every}) at least 1"
            )


@config
class Ramp:
    """From when on the global batch has another size."""

    from_step: int | None = setting(
        None, on_resume="needs_override", help="first update (counted from 0) with this size"
    )
    from_tokens: int | None = setting(
        None, on_resume="needs_override", help="instead: the first update after so many nominal tokens"
    )
    global_batch: int = setting(on_resume="needs_override", help="sequences in one update from then on")

    def __post_init__(self) -> None:
        given = [n for n in (self.from_step, self.from_tokens) if n is not None]
        if len(given) != 1 or given[0] < 0 or self.global_batch < 1:
            raise ValueError(
                f"train.ramp: {{from_step: {self.from_step}, from_tokens: {self.from_tokens}, global_batch: "
                f"{self.global_batch}}}: give from_step or from_tokens, 0 or more, and a positive batch"
            )


@config
class Train:
    """How long, in which portions and how precisely. Batches are counted in sequences."""

    steps: int | None = setting(
        None,
        on_resume="needs_override",
        help=f"updates of the run; null: from train.tokens, or else {DEFAULT_STEPS}",
    )
    tokens: int | None = setting(
        None,
        on_resume="needs_override",
        help="length in nominal tokens (global_batch x sequence_length) instead, rounded up to whole updates",
    )
    sequence_length: int = setting(256, on_resume="must_equal", help="tokens of one sequence")
    global_batch: int | None = setting(
        None, on_resume="needs_override", help="sequences of one update, over all processes"
    )
    micro_batch: int | None = setting(
        None, on_resume="free", help="sequences of one forward pass of one data-parallel rank"
    )
    accumulation: int | None = setting(
        None,
        on_resume="free",
        help="forward passes in one update; global = micro x accumulation x dp: two give the third",
    )
    ramp: list[Ramp] = setting(
        factory=list,
        on_resume="needs_override",
        help="smaller batches first: [{from_step: 0, global_batch: 4}, {from_step: 100, global_batch: 8}]; "
        "from the last entry on the batch is train.global_batch",
    )
    precision: Literal["fp32", "bf16"] | None = setting(
        None,
        on_resume="needs_override",
        help="of weights and activations (masters and moments are fp32); null: bf16 on CUDA, fp32 on CPU",
    )
    seed: int = setting(1234, on_resume="must_equal", help="of the weights, the order of the data, dropout")

    def __post_init__(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise ValueError(
                f"train.steps ({self.steps}) and train.tokens ({self.tokens}) are both given; set one to null"
            )
        for name in ("steps", "tokens", "sequence_length", "global_batch", "micro_batch", "accumulation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"train.{name} ({value}) must be at least 1")
        if self.seed < 0:
            raise ValueError(f"train.seed ({self.seed}) must be 0 or more")


@config
class Evaluate:
    """The loss on held-out text. The last step evaluates too, unless batches is 0."""

    every: int = setting(
        100, on_resume="free", help="evaluate when the step reaches a multiple; 0 = only at the end"
    )
    batches: int | None = setting(
        20,
        on_resume="free",
        help="held-out sequences of each source, in global batches of sequences; null: all, 0: never",
    )

    def __post_init__(self) -> None:
        if self.every < 0 or (self.batches is not None and self.batches < 0):
            raise ValueError(
                f"evaluate.every ({self.every}) and evaluate.batches ({self.batches}) must be 0 or more"
            )


@config
class Sample:
    """The text that the model writes when the run ends, and if asked while it trains."""

    every: int = setting(
        0,
        on_resume="free",
        help="also while training, when the step reaches a multiple: one of checkpoint.every; 0 = never",
    )
    prompt: str = setting(
        "", on_resume="free", help="what it goes on from; empty: from the start of a document"
    )
    max_tokens: int = setting(100, on_resume="free", help="tokens to write; 0 = no text")
    temperature: float = setting(0.8, on_resume="free", help="0 always takes the likeliest token")
    top_k: int | None = setting(50, on_resume="free", help="only the k likeliest tokens; null: all")

    def __post_init__(self) -> None:
        if self.max_tokens < 0 or not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"sample.max_tokens ({self.max_tokens}) and sample.temperature ({self.temperature}) must be "
                "0 or more"
            )
        if self.every < 0:
            raise ValueError(f"sample.every ({self.every}) must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"sample.top_k ({self.top_k}) must be at least 1, or null")


@config
class Statistics:
    """What is recorded of the inside of the model."""

    layers_every: int = setting(
        0,
        on_resume="free",
        help="norms of gradient and weights of each layer into layers.jsonl, when the update tried is a "
        "multiple; 0 = never",
    )

    def __post_init__(self) -> None:
        if self.layers_every < 0:
            raise ValueError(f"statistics.layers_every ({self.layers_every}) must be 0 or more")


@config
class Fault:
    """One fault. poison: random ids in place of samples; nan_gradient: one NaN in a rank's gradient; lr: the
    learning rate times `factor`; bit_flip: the highest exponent bit of one weight of a rank; tokens: random
    ids in place of what a data-parallel rank was given."""

    kind: Literal["poison", "nan_gradient", "lr", "bit_flip", "tokens"] = setting(
        on_resume="free", help="poison, nan_gradient, lr, bit_flip or tokens"
    )
    step: int | None = setting(None, on_resume="free", help="update, counted from 1, at which it fires")
    samples: list[int] | None = setting(None, on_resume="free", help="poison: [first, stop) sample numbers")
    rank: int = setting(
        0, on_resume="free", help="nan_gradient, bit_flip: global rank; tokens: data-parallel rank"
    )
    steps: int = setting(1, on_resume="free", help="lr, tokens: attempts that it lasts")
    factor: float = setting(30.0, on_resume="free", help="lr: of the learning rate")

    def __post_init__(self) -> None:
        if self.kind == "poison":
            given = self.samples or []
            if self.step is not None or len(given) != 2 or not 0 <= given[0] < given[1]:
                raise ValueError(
                    f"faults: {{kind: poison, step: {self.step}, samples: {self.samples}}} needs samples: "
                    "[first, stop) with 0 <= first < stop, and no step"
                )
            return
        least = min(self.step or 0, self.steps, self.rank + 1)
        if self.samples is not None or least < 1:
            raise ValueError(
                f"faults: {{kind: {self.kind}, step: {self.step}, samples: {self.samples}, rank: "
                f"{self.rank}, steps: {self.steps}}} needs step and steps of 1 or more, rank 0 or more, "
                "no samples"
            )

    def as_json(self) -> dict[str, Any]:
        """What its event holds, and what an event is recognised by."""
        own = {"kind": self.kind, "rank": self.rank}
        if self.kind == "poison":
            return {"kind": self.kind, "samples": list(self.samples or [])}
        if self.kind == "lr":
            return {"kind": self.kind, "step": self.step, "steps": self.steps, "factor": self.factor}
        if self.kind == "tokens":
            return own | {"step": self.step, "steps": self.steps}
        return own | {"step": self.step}
