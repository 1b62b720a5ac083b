"""Compiles every kernel for a GPU that is not there; prints a JSON object: kernel -> its assembly's loads.

`python -m tests.megamodel.kernels.offline nvidia` (or amd), without TRITON_INTERPRET. The kernels are called
as in training, on CPU tensors; what would launch them compiles them instead.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megamodel.activation import ACTIVATIONS
from megamodel.kernels import triton_entropy, triton_gate, triton_norm, triton_rotate

TARGETS = {"nvidia": GPUTarget("cuda", 90, 32), "amd": GPUTarget("hip", "gfx942", 64)}
BF16 = torch.bfloat16


class Absent:
    """The driver of a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiling(found: dict[str, list[str]]) -> Callable[[JITFunction, Any], Callable[..., None]]:
    """Instead of kernel[grid]: compiles, and notes the instructions that load from global memory."""

    def launcher(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def compile_only(*arguments: Any, **options: Any) -> None:
            made = kernel.run(*arguments, grid=grid, warmup=True, **options)
            loads = re.findall(r"ld\.global[\w.]*|\w+_load_\w+", made.asm.get("ptx") or made.asm["amdgcn"])
            name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
            found[name] = sorted({*found.get(name, []), *loads})

        return compile_only

    return launcher


def there_and_back(result: Tensor | tuple[Tensor, ...], *inputs: Tensor) -> None:
    results = (result,) if isinstance(result, Tensor) else result
    torch.autograd.grad(results, inputs, [torch.ones_like(r) for r in results])


def call_everything() -> None:
    """Every kernel in every form that a model asks for, bf16, on the shapes of a small model."""
    for kind, bias in (("rmsnorm", False), ("layernorm", True)):
        options = {"kind": kind, "eps": 1e-5, "offset": 0.0, "rounds_first": not bias}
        x = torch.zeros(8, 4096, dtype=BF16, requires_grad=True)
        weight = torch.ones(4096, dtype=BF16, requires_grad=True)
        there_and_back(triton_norm.norm(x, weight, weight if bias else None, **options), x, weight)
        there_and_back(triton_norm.add_norm(x, x, weight, weight if bias else None, **options), x, weight)
        q = torch.zeros(2, 16, 24, 128, dtype=BF16)[:, :, :8].requires_grad_()
        for interleaved, rotated, gains in ((True, 128, 128), (False, 64, 8 * 128)):
            angle = torch.zeros(2, 16, rotated // 2)
            weight = torch.ones(gains, dtype=BF16, requires_grad=True)
            there_and_back(triton_rotate.rotate(q, angle, angle, interleaved=interleaved), q)
            there_and_back(
                triton_rotate.norm_rotate(
                    q, weight, weight if bias else None, angle, angle, interleaved=interleaved, **options
                ),
                q,
                weight,
            )
    gate, up = (t.requires_grad_() for t in torch.zeros(16, 2 * 2816, dtype=BF16).chunk(2, -1))
    for name in ACTIVATIONS:
        there_and_back(triton_gate.activate(gate, activation=name), gate)
        there_and_back(triton_gate.gate(gate, up, activation=name), gate, up)
    there_and_back(triton_gate.gate(gate, up, activation="silu", clamp=7.0), gate, up)
    logits, targets = torch.zeros(16, 128256, dtype=BF16), torch.zeros(16, dtype=torch.int64)
    same = (torch.zeros(16),) * 3
    triton_entropy.entropy(logits, targets, start=0)
    for softcap in (None, 30.0):
        triton_entropy.entropy_gradient(logits, targets, *same, start=0, softcap=softcap)


def call_with_ones() -> None:
    """Arguments of 1 are compiled in as constants: one row, one column, one head, one token."""
    options = {"kind": "layernorm", "eps": 1e-5, "offset": 0.0, "rounds_first": False}
    for shape in ((1, 1, 1, 2), (1, 3, 1, 6)):
        x, angle = torch.zeros(shape, requires_grad=True), torch.zeros(*shape[:2], 1)
        weight = torch.ones(shape[-1], requires_grad=True)
        there_and_back(triton_norm.add_norm(x, x, weight, weight, **options), x, weight)
        there_and_back(triton_norm.norm(x[..., :1], weight[:1], None, **options), x, weight)
        there_and_back(triton_rotate.rotate(x, angle, angle, interleaved=True), x)
        turned = triton_rotate.norm_rotate(x, weight, weight, angle, angle, interleaved=False, **options)
        there_and_back(turned, x, weight)
        there_and_back(triton_gate.gate(x[..., :1], x[..., 1:2], activation="silu"), x)
        there_and_back(triton_gate.activate(x[..., :1], activation="gelu"), x)
    logits, targets, one = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), torch.ones(1)
    triton_entropy.entropy(logits, targets, start=1)
    triton_entropy.entropy_gradient(logits, targets, one, one, one, start=1, softcap=1.0)


def main() -> None:
    driver.set_active(Absent(TARGETS[sys.argv[1]]))
    found: dict[str, list[str]] = {}
    JITFunction.__getitem__ = compiling(found)
    call_everything()
    call_with_ones()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
