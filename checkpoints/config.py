"""When checkpoints are written and which of them stay."""

from conf.typed import config, setting


@config
class Checkpoint:
    """A save needs room for one checkpoint more than stay: the old ones go after the new one is complete."""

    every: int = setting(
        500,
        on_resume="free",
        help="save when the step reaches a multiple; 0 = only at the end and on a signal",
    )
    keep: int = setting(
        3, on_resume="free", help="the last so many stay, and up to 2 more that a rewind needs; 0 = all"
    )
    keep_every: int = setting(
        0, on_resume="free", help="steps that are multiples of this stay for ever, beside `keep`; 0 = none"
    )

    def __post_init__(self) -> None:
        for name in ("every", "keep", "keep_every"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"checkpoint.{name} ({value}) must not be negative; 0 switches it off")
