"""When checkpoints are written, where, and which of them stay."""

from typing import Literal

from conf.typed import config, setting


@config
class Checkpoint:
    """Room on the disk: keep + keep_best + 3 checkpoints, one for each multiple of keep_every, and the one
    being written: the old ones go after the new one is complete.

    Room in host memory, in copies of this process's masters and moments: `snapshots` with snapshot_every, and
    one more with `background`.
    """

    every: int = setting(
        500,
        on_resume="free",
        help="save when the step reaches a multiple; 0 = only at the end and on a signal",
    )
    background: bool = setting(
        True,
        on_resume="free",
        help="training stops only for a copy in host memory, which is written while it goes on",
    )
    snapshot_every: int = setting(
        100, on_resume="free", help="copy the state into host memory, for rewinding, at multiples; 0 = never"
    )
    snapshots: int = setting(2, on_resume="free", help="the last so many of those copies stay")
    keep: int = setting(
        3, on_resume="free", help="the last so many stay, and up to 3 more that a rewind may need; 0 = all"
    )
    keep_best: int = setting(
        1,
        on_resume="free",
        help="so many with the lowest held-out loss stay, of those saved when it was taken",
    )
    keep_every: int = setting(
        0, on_resume="free", help="steps that are multiples of this stay for ever, beside `keep`; 0 = none"
    )
    store: str | None = setting(
        None,
        on_resume="free",
        help="directory or fsspec URL (s3://bucket/run) of the checkpoints; null: checkpoints/ in run.dir",
    )
    commit: Literal["rename", "manifest"] = setting(
        "rename",
        on_resume="free",
        help="what completes a checkpoint: the renaming of its directory, or its manifest, written last, "
        "where directories cannot be renamed (always so at a URL)",
    )

    def __post_init__(self) -> None:
        for name in ("every", "snapshot_every", "keep", "keep_best", "keep_every"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"checkpoint.{name} ({value}) must not be negative; 0 switches it off")
        if self.snapshots < 1:
            raise ValueError(
                f"checkpoint.snapshots ({self.snapshots}) must be at least 1; snapshot_every=0 takes none"
            )
        if self.store == "":
            raise ValueError("checkpoint.store is empty; give a directory or a URL, or null")

    @property
    def copies(self) -> int:
        """The most copies of the state that lie in host memory."""
        return (self.snapshots if self.snapshot_every else 0) + self.background
