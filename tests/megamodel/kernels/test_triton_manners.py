"""What all Triton kernels keep to: any layout, no write outside, nothing saved beside; and they compile."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamodel.kernels import reference
from tests.megamodel.kernels.agreement import (
    FP32,
    LAYOUTS,
    Function,
    agree,
    angles,
    draw,
    leaf,
    norm_options,
    triton_module,
    vectors,
)

triton_norm = triton_module("norm")
triton_rotate = triton_module("rotate")
triton_gate = triton_module("gate")
triton_entropy = triton_module("entropy")
triton_rows = triton_module("rows")

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = norm_options("layernorm", 0.0, False)


def operations() -> dict[str, tuple[Function, Function, list[Tensor]]]:
    """Name -> (kernel, definition, inputs that want gradients), x (2, 3, 4, 20) first."""
    x = [leaf(draw(2, 3, 4, 20)) for _ in range(2)]
    weight, bias = vectors(20, FP32)
    cos, sin = angles(2, 3, 10)

    def both(name: str, module: Any, call: Callable[[Any], Function]) -> tuple[Function, Function]:
        return call(getattr(module, name)), call(getattr(reference, name))

    def turned(f: Function) -> Function:
        return lambda x: f(x, cos.to(x), sin.to(x), interleaved=False)

    def normed(f: Function) -> Function:
        return lambda *a: f(*a, **OPTIONS)

    def normed_turned(f: Function) -> Function:
        return lambda x, w, b: f(x, w, b, cos.to(x), sin.to(x), interleaved=True, **OPTIONS)

    def silu(f: Function) -> Function:
        return lambda *a: f(*a, activation="silu")

    return {
        "norm": (*both("norm", triton_norm, normed), [x[0], weight, bias]),
        "add_norm": (*both("add_norm", triton_norm, normed), [*x, weight, bias]),
        "rotate": (*both("rotate", triton_rotate, turned), [x[0]]),
        "norm_rotate": (*both("norm_rotate", triton_rotate, normed_turned), [x[0], weight, bias]),
        "gate": (*both("gate", triton_gate, silu), x),
        "activate": (*both("activate", triton_gate, silu), [x[0]]),
    }


OPERATIONS = pytest.mark.parametrize(
    "name", ["norm", "add_norm", "rotate", "norm_rotate", "gate", "activate"]
)


@OPERATIONS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_inputs_and_upstream_gradients(name: str, layout: str) -> None:
    ours, definition, inputs = operations()[name]
    agree(ours, definition, inputs, 1e-5, LAYOUTS[layout])
    strided = [leaf(LAYOUTS[layout](t)) if t.ndim == 4 else t for t in inputs]
    agree(ours, definition, strided, 1e-5)


def test_five_dimensions_that_cannot_be_walked_are_copied() -> None:
    x = leaf(draw(2, 3, 2, 3, 40).permute(3, 2, 1, 0, 4)[..., :17])
    agree(triton_norm.norm, reference.norm, (x, *vectors(17, FP32)), 1e-5, **OPTIONS)


@OPERATIONS
def test_without_a_graph_and_with_frozen_weights(name: str) -> None:
    ours, definition, inputs = operations()[name]
    with torch.no_grad():
        result = ours(*inputs)
    assert not any(r.requires_grad for r in ((result,) if isinstance(result, Tensor) else result))
    agree(ours, definition, [inputs[0], *(t.detach() for t in inputs[1:])], 1e-5)
    if inputs[1:] and inputs[1].ndim == 1:
        agree(ours, definition, [inputs[0].detach(), inputs[1], *(t.detach() for t in inputs[2:])], 1e-5)


@OPERATIONS
def test_nothing_is_written_outside_the_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer comes from torch.empty: here from the middle of a larger one that must stay as it was."""
    ours, _, inputs = operations()[name]
    kept, untouched = [t.detach().clone() for t in inputs], []
    empty = torch.empty

    def guarded(shape: Any, **options: Any) -> Tensor:
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        buffer = empty(size.numel() + 256, **options).fill_(7.5)
        untouched.append((buffer[:128], buffer[128 + size.numel() :]))
        return buffer[128 : 128 + size.numel()].view(size)

    monkeypatch.setattr(torch, "empty", guarded)
    results = ours(*inputs)
    results = (results,) if isinstance(results, Tensor) else results
    torch.autograd.grad(results, inputs, [torch.ones_like(r) for r in results])
    monkeypatch.undo()
    assert len(untouched) >= 2
    assert all((side == 7.5).all() for sides in untouched for side in sides)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


@pytest.mark.parametrize(
    ("name", "floats"),  # x (2, 3, 4, 20): 480 numbers in 24 rows; gain and bias 20 each; cos and sin 30 each
    [("norm", 480 + 40 + 48), ("add_norm", 480 + 40 + 48), ("rotate", 60), ("norm_rotate", 480 + 40 + 60),
     ("gate", 960), ("activate", 480)],
)  # fmt: skip
def test_what_is_saved_for_the_backward_pass(name: str, floats: int) -> None:
    ours, _, inputs = operations()[name]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()), lambda _: None):
        ours(*inputs)
    assert sum(saved) == floats


def test_tiles_and_warps_are_powers_of_two() -> None:
    """Which Triton asks for; 16 elements a thread, and never more than 1024 threads or 65536 elements."""
    for elements, warps in ((1, 1), (511, 1), (1024, 2), (1536, 2), (2048, 4), (16384, 32), (65536, 32)):
        assert triton_rows.warps(elements) == (warps if not torch.version.hip else max(1, warps // 2))
    assert [triton_rows.tile_rows(c, 2048) for c in (1, 96, 160, 2048, 65536)] == [2048, 16, 8, 1, 1]
    assert [triton_rows.block(w) for w in (1, 3, 4097, 65536)] == [1, 4, 8192, 65536]


def test_rows_are_walked_where_they_lie() -> None:
    """A slice of a product and heads before tokens are not copied; what has no neighbours is."""
    product = draw(2, 3, 12, 20)
    for x in (
        product[:, :, :4],
        product.transpose(1, 2),
        product[:, ::2, 1:5],
        product[:1, 0].expand(5, 12, 20),
    ):
        assert triton_rows.rows(x)[0] is x
    assert triton_rows.rows(product.transpose(2, 3))[0].is_contiguous()
    x = product.transpose(1, 2)  # (2, 12, 3, 20)
    middle, inner, outer, step, last = triton_rows.rows(x)[1]
    assert (middle, inner) == (12, 3) and (outer, step, last) == x.stride()[:3]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["nvidia", "amd"])
def test_every_kernel_compiles_for_gpus_that_are_not_here(target: str, tmp_path: Path) -> None:
    """And loads 16 bytes at once wherever it reads rows of bf16."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.megamodel.kernels.offline", target],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loads = json.loads(done.stdout.splitlines()[-1])
    modules = (triton_norm, triton_rotate, triton_gate, triton_entropy)
    launched = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in modules
        for name in re.findall(r"^ +(?:\w+ = )?(_\w+)\[", Path(module.__file__).read_text(), re.MULTILINE)
    }
    assert len(launched) == 11 and set(loads) == launched
    if target == "nvidia":
        assert {name for name, found in loads.items() if "ld.global.v4.b32" not in found} == set()
