"""On a machine with a GPU: the same run there and on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.test_train import BASE, lines, place

__all__ = ["place"]
ROOT = Path(__file__).resolve().parents[2]


def curve(place: Path, name: str, *changes: str) -> list[float]:
    """Losses of a run in a process of its own."""
    arguments = [*BASE[:-1], f"run.name={name}", *changes]
    finished = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert finished.returncode == 0, finished.stderr
    return [line["loss/train"] for line in lines(place / "runs" / name)]


@pytest.mark.gpu
def test_a_gpu_gives_the_curve_of_the_cpu(place: Path) -> None:
    """Weights, order of samples and dropout masks are the same; only rounding differs."""
    expected = curve(place, "on-cpu", "hardware=cpu", "train.precision=fp32")
    assert curve(place, "on-gpu", "hardware=cuda", "train.precision=fp32") == pytest.approx(
        expected, rel=1e-4
    )
    # bf16 has 8 bits of mantissa: 0.4 % a rounding, on losses near 5.
    assert curve(place, "on-gpu-bf16", "hardware=cuda") == pytest.approx(expected, rel=2e-2)
