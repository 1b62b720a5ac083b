"""How the model is split over the processes."""

from typing import Literal

from conf.typed import config, setting

BUCKET_BYTES = 128 << 20


@config
class Parallel:
    """Data parallelism is what remains of the world size: dp = processes / (tp x pp)."""

    tp: int = setting(1, on_resume="free", help="tensor-parallel size: each layer split over tp processes")
    pp: int = setting(1, on_resume="free", help="pipeline stages")
    sequence_parallel: bool = setting(
        False,
        on_resume="free",
        help="split activations between the tp regions over the sequence; needs tp > 1",
    )
    recompute: Literal["none", "block", "attention"] = setting(
        "none",
        on_resume="free",
        help="make activations again in backward instead of keeping them: of whole blocks, or attentions",
    )
    recompute_every: int = setting(
        1, on_resume="free", help="recompute only every n-th block, from the first on"
    )
    bucket_bytes: int = setting(
        BUCKET_BYTES,
        on_resume="free",
        help="sum gradients over dp in pieces of about this size while backward goes on; 0: after it",
    )
    stage_layers: list[int] | None = setting(
        None, on_resume="free", help="blocks of each pipeline stage; null balances by cost"
    )

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ValueError(f"parallel.tp ({self.tp}) and parallel.pp ({self.pp}) must be at least 1")
        if self.recompute_every < 1:
            raise ValueError(f"parallel.recompute_every ({self.recompute_every}) must be at least 1")
        if self.recompute_every > 1 and self.recompute == "none":
            raise ValueError(nothing_recomputed(self.recompute_every))
        check_bucket(self.bucket_bytes)
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "parallel.sequence_parallel=true needs parallel.tp of 2 or more (it is 1); "
                "set parallel.sequence_parallel=false"
            )
        if self.stage_layers is not None:
            if len(self.stage_layers) != self.pp:
                raise ValueError(
                    f"parallel.stage_layers names {len(self.stage_layers)} stages but parallel.pp is "
                    f"{self.pp}; give one number of blocks a stage"
                )
            if min(self.stage_layers) < 1:
                raise ValueError(
                    f"parallel.stage_layers {self.stage_layers}: each stage needs at least one block"
                )


def check_bucket(bucket_bytes: int) -> None:
    """ValueError for less than nothing; for runs and for plans."""
    if bucket_bytes < 0:
        raise ValueError(
            f"parallel.bucket_bytes ({bucket_bytes}) must be at least 0, which is: after backward"
        )


def nothing_recomputed(every: int) -> str:
    """Of every n-th block that is recomputed, where none is."""
    return (
        f"parallel.recompute_every ({every}) has no effect with parallel.recompute=none; use "
        "parallel.recompute=block or attention, or parallel.recompute_every=1"
    )
