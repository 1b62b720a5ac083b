"""Which form of each operation is used, where a form is to be forced."""

from typing import Literal

from conf.typed import config, setting


@config
class Kernels:
    """How operations are computed; what they compute is the same up to rounding."""

    products: Literal["auto", "native", "widened", "float8"] = setting(
        "auto",
        on_resume="free",
        help="16-bit matrix products: in 16 bit, in fp32 (faster on CPUs without AMX), in 8 bit by torchao",
    )
    head: Literal["auto", "whole", "chunked"] = setting(
        "auto",
        on_resume="free",
        help="head and loss: with all logits in memory, or some tokens at a time, gradients at once",
    )
    workspace_bytes: int | None = setting(
        None,
        on_resume="free",
        help="memory for the logits that a chunked head holds at once; null: 128 MiB, on a GPU 384 MiB",
    )
    entropy: Literal["auto", "plain", "triton"] = setting(
        "auto", on_resume="free", help="loss and gradient of a chunk of logits: in torch, or our kernels"
    )
    norm: Literal["auto", "plain", "triton"] = setting(
        "auto", on_resume="free", help="norms, with the sum before them: in torch, or our kernels"
    )
    rotate: Literal["auto", "plain", "triton"] = setting(
        "auto", on_resume="free", help="rotation, with QK-norm before it: in torch, or our kernels"
    )
    gate: Literal["auto", "plain", "triton"] = setting(
        "auto", on_resume="free", help="activations and gates: in torch, or our kernels"
    )
    attention: Literal["auto", "whole", "sdpa", "blocked", "flex", "rebuilt"] = setting(
        "auto",
        on_resume="free",
        help="all scores in memory; torch's own with masks; blocks of queries; torch's flex_attention (GPU); "
        "blocks, with plain rows' scores made again in backward (compiled, bf16, CPU)",
    )
    experts: Literal["auto", "loop", "sorted", "grouped"] = setting(
        "auto",
        on_resume="free",
        help="each expert in turn; tokens sorted by expert; sorted and in grouped products (GPU)",
    )
    compile: Literal["none", "block"] = setting(
        "none",
        on_resume="free",
        help="torch.compile of each block: some seconds at the start, faster steps after; needs a compiler",
    )

    def __post_init__(self) -> None:
        if self.workspace_bytes is not None and self.workspace_bytes < 1 << 20:
            raise ValueError(
                f"kernels.workspace_bytes ({self.workspace_bytes}) must be at least 1048576 (1 MiB)"
            )
        idle = [f"kernels.entropy={self.entropy}"] if self.entropy != "auto" else []
        if self.workspace_bytes is not None:
            idle.append(f"kernels.workspace_bytes={self.workspace_bytes}")
        if self.head == "whole" and idle:
            raise ValueError(
                f"{' and '.join(idle)} would have no effect: kernels.head=whole makes no chunks of logits; "
                "leave it out or use kernels.head=chunked"
            )
