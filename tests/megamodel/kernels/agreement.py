"""What the proofs of the Triton kernels share: the device, the tolerances, and how agreement is judged.

On a GPU where there is one, else under Triton's interpreter (TRITON_INTERPRET=1), which is slow: small sizes.
Importing this skips a test module where neither is at hand.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install 'megamodel[gpu]'")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
NORMS = pytest.mark.parametrize(
    ("kind", "offset", "rounds_first", "bias"),
    [("rmsnorm", 0.0, True, False), ("rmsnorm", 1.0, False, False), ("layernorm", 0.0, False, True),
     ("layernorm", 1.0, True, True)],
    ids=["llama", "gemma", "layernorm", "layernorm1p"],
)  # fmt: skip


def norm_options(kind: str, offset: float, rounds_first: bool) -> dict[str, Any]:
    return {"kind": kind, "eps": 1e-2, "offset": offset, "rounds_first": rounds_first}


def draw(*shape: int, dtype: torch.dtype = FP32, step: float | None = None) -> Tensor:
    """Normal numbers; with a step, multiples of it up to 2 in size, which bf16 holds, and their sums too."""
    x = torch.randn(*shape)
    x = x if step is None else (x.clamp(-2, 2) / step).round() * step
    return x.to(DEVICE, dtype)


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def tolerance(dtype: torch.dtype) -> float:
    """Of the largest element; 2^-7 is two roundings of bf16 in a row that both go the wrong way."""
    return 1e-5 if dtype == FP32 else 2**-7


def close(actual: Tensor, expected: Tensor, limit: float) -> None:
    assert actual.shape == expected.shape
    if expected.numel():
        worst, largest = (actual.double() - expected).abs().max().item(), expected.abs().max().item()
        assert worst <= limit * largest, f"off by {worst:.3e}, largest {largest:.3e}, limit {limit:.1e}"


Function = Callable[..., Any]


def agree(
    ours: Function,
    definition: Function,
    inputs: Sequence[Tensor | None],
    limit: float,
    upstream: Callable[[Tensor], Tensor] = torch.randn_like,
    **options: Any,
) -> None:
    """Values and the gradients of all inputs that want one, against the definition in fp64."""
    exact = [None if t is None else leaf(t.double()) if t.requires_grad else t.double() for t in inputs]
    results, expected = ours(*inputs, **options), definition(*exact, **options)
    results, expected = ((r,) if isinstance(r, Tensor) else r for r in (results, expected))
    for mine, other in zip(results, expected, strict=True):
        close(mine, other, limit)
    given = [upstream(r.detach()) for r in results]
    wanted = [i for i, t in enumerate(inputs) if t is not None and t.requires_grad]
    mine = torch.autograd.grad(results, [inputs[i] for i in wanted], given)
    theirs = torch.autograd.grad(expected, [exact[i] for i in wanted], [g.double() for g in given])
    for i, a, b in zip(wanted, mine, theirs, strict=True):
        assert a.dtype == inputs[i].dtype
        close(a, b, limit)


def vectors(width: int, dtype: torch.dtype, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    weight = leaf(draw(width, dtype=dtype, step=1 / 64))
    return weight, leaf(draw(width, dtype=dtype, step=1 / 16).flip(0)) if bias else None


def angles(batch: int, length: int, rotated: int) -> tuple[Tensor, Tensor]:
    """cos is one row for the whole batch, expanded; sin is a slice."""
    turn = 3 * draw(1, length, rotated)
    cos, sin = turn[..., : rotated // 2].cos().contiguous(), turn.sin()
    return cos.expand(batch, -1, -1), sin[..., : rotated // 2].expand(batch, -1, -1)
