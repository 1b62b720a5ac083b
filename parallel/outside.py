"""Functions that no graph of torch.compile holds.

torch.compiler.disable does that, but brings a second's worth of imports to every start; here it is asked for
only where something is compiled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_all: list["Outside"] = []


class Outside:
    """A function before whose call a graph ends and after which it goes on."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function: Callable[..., Tensor] = function
        self._is_kept = False
        _all.append(self)

    def __call__(self, *inputs: Any) -> Tensor:
        return self._function(*inputs)

    def keep(self) -> None:
        """From now on graphs leave it out."""
        if not self._is_kept:
            self._function = torch.compiler.disable(self._function)  # type: ignore[assignment]
            self._is_kept = True


def keep_all() -> None:
    """To be called before anything is compiled."""
    for function in _all:
        function.keep()
