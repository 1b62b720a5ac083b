"""A small tree of sections for the tests of the door: every shape of field once."""

from typing import Annotated, Literal

from conf.typed import config, setting, union


@config
class Rope:
    kind: Literal["rope"] = setting("rope", on_resume="must_equal", help="rotary")
    base: float = setting(10000.0, on_resume="must_equal", help="base")
    scale: float = setting(1.0, on_resume="free", help="scale")


@config
class Alibi:
    kind: Literal["alibi"] = setting("alibi", on_resume="must_equal", help="slopes")
    slope: float = setting(8.0, on_resume="must_equal", help="slope")
    scale: float = setting(2.0, on_resume="free", help="scale")


@config
class Model:
    width: int = setting(64, on_resume="must_equal", help="width")
    tied: bool = setting(True, on_resume="must_equal", help="tied")
    window: int | None = setting(None, on_resume="must_equal", help="window")
    position: Annotated[Rope | Alibi, union("kind")] = setting(
        factory=Rope, on_resume="must_equal", help="positions"
    )

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"model.width ({self.width}) must be even; use {self.width + 1}")


@config
class Optim:
    lr: float = setting(3e-4, on_resume="needs_override", help="peak")
    betas: list[float] = setting(factory=lambda: [0.9, 0.95], on_resume="free", help="betas")
    precision: Literal["fp32", "bf16"] | None = setting(None, on_resume="needs_override", help="precision")


@config
class Source:
    path: str = setting(on_resume="must_equal", help="where")
    weight: float = setting(1.0, on_resume="needs_override", help="share")


@config
class Root:
    name: str = setting("run", on_resume="free", help="name")
    model: Model = setting(factory=lambda: Model(width=128), on_resume="must_equal", help="model")
    optim: Optim = setting(factory=Optim, on_resume="needs_override", help="optimizer")
    mixture: dict[str, Source] = setting(factory=dict, on_resume="needs_override", help="sources")
    stages: list[Source] = setting(factory=list, on_resume="free", help="list of sections")
