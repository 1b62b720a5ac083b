"""What the proofs of all forms share: the device, the tolerances, the layouts, and how agreement is judged.

Kernels run on a GPU where there is one, else under Triton's interpreter (TRITON_INTERPRET=1), which is slow:
small sizes. The plain forms run on the CPU, always.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
NORMS = pytest.mark.parametrize(
    ("kind", "offset", "rounds_first", "bias"),
    [("rmsnorm", 0.0, True, False), ("rmsnorm", 1.0, False, False), ("layernorm", 0.0, False, True),
     ("layernorm", 1.0, True, True)],
    ids=["llama", "gemma", "layernorm", "layernorm1p"],
)  # fmt: skip


def triton_module(operation: str) -> Any:
    """megamodel.kernels.triton_<operation>; skips the test module that asks where no kernel can run."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'megamodel[gpu]'")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)
    return importlib.import_module(f"megamodel.kernels.triton_{operation}")


def norm_options(kind: str, offset: float, rounds_first: bool) -> dict[str, Any]:
    return {"kind": kind, "eps": 1e-2, "offset": offset, "rounds_first": rounds_first}


def draw(
    *shape: int, dtype: torch.dtype = FP32, step: float | None = None, device: torch.device = DEVICE
) -> Tensor:
    """Normal numbers; with a step, multiples of it up to 2 in size, which bf16 holds, and their sums too."""
    x = torch.randn(*shape)
    x = x if step is None else (x.clamp(-2, 2) / step).round() * step
    return x.to(device, dtype)


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

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded to all": lambda y: torch.ones((), dtype=y.dtype, device=y.device).expand_as(y),
    "expanded over the batch": lambda y: torch.randn_like(y[:1]).expand_as(y),
    "expanded over the tokens": lambda y: torch.randn_like(y[:, :1]).expand_as(y),
    "transposed": lambda y: torch.randn_like(y.transpose(0, 3).contiguous()).transpose(0, 3),
    "reversed dimensions": lambda y: torch.randn_like(y.permute(2, 1, 0, 3).contiguous()).permute(2, 1, 0, 3),
    "every second": lambda y: torch.randn_like(torch.cat((y, y), -1))[..., ::2],
    "some heads": lambda y: torch.randn_like(torch.cat((y, y), 2))[:, :, 1 : y.shape[2] + 1],
}  # of x (B, S, H, E) or its gradient


def storages(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Every byte of the memory that the tensors lie in: theirs and what is between and around them."""
    return [
        torch.tensor([], dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        for t in tensors
        if t is not None
    ]


def agree(
    ours: Function,
    definition: Function,
    inputs: Sequence[Tensor | None],
    limit: float,
    upstream: Callable[[Tensor], Tensor] = torch.randn_like,
    **options: Any,
) -> None:
    """Values and the gradients of all inputs that want one, against the definition in fp64.

    And inputs, upstream gradients and the memory around them stay as they were.
    """
    exact = [None if t is None else leaf(t.double()) if t.requires_grad else t.double() for t in inputs]
    kept = [s.clone() for s in storages(inputs)]
    results, expected = ours(*inputs, **options), definition(*exact, **options)
    results, expected = ((r,) if isinstance(r, Tensor) else r for r in (results, expected))
    for mine, other in zip(results, expected, strict=True):
        close(mine, other, limit)
    assert [r.requires_grad for r in results] == [r.requires_grad for r in expected]
    results, expected = ([r for r in rs if r.requires_grad] for rs in (results, expected))
    given = [upstream(r.detach()) for r in results]
    kept_given = [s.clone() for s in storages(given)]
    leaves, exact_leaves = ([t for t in ts if t is not None and t.requires_grad] for ts in (inputs, exact))
    mine = torch.autograd.grad(results, leaves, given)
    theirs = torch.autograd.grad(expected, exact_leaves, [g.double() for g in given])
    for x, a, b in zip(leaves, mine, theirs, strict=True):
        assert a.dtype == x.dtype
        close(a, b, limit)
    for now, before in zip(storages([*inputs, *given]), kept + kept_given, strict=True):
        assert torch.equal(now, before)


def vectors(
    width: int, dtype: torch.dtype, bias: bool = True, device: torch.device = DEVICE
) -> tuple[Tensor, Tensor | None]:
    weight = leaf(draw(width, dtype=dtype, step=1 / 64, device=device))
    return weight, leaf(draw(width, dtype=dtype, step=1 / 16, device=device).flip(0)) if bias else None


def angles(batch: int, length: int, rotated: int) -> tuple[Tensor, Tensor]:
    """cos is one row for the whole batch, expanded; sin is a slice.

    Both 1.3 times as large, as by YaRN: a backward pass that turns back divides where it should multiply.
    """
    turn = 3 * draw(1, length, rotated)
    cos, sin = 1.3 * turn[..., : rotated // 2].cos().contiguous(), 1.3 * turn.sin()
    return cos.expand(batch, -1, -1), sin[..., : rotated // 2].expand(batch, -1, -1)
