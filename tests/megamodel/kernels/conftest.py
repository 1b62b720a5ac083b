"""The same numbers in every test, and an interpreter of Triton that rounds as hardware does."""

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cuts fp32 off to bf16 where every GPU rounds to nearest: it is given torch's cast."""
    torch.manual_seed(0)
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def nearest(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        rounded = torch.from_numpy(np.array(data, dtype=np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", nearest)
