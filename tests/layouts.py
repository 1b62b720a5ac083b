"""How a tensor may lie in memory: what every operation must take, as input and as upstream gradient."""

from collections.abc import Callable

import torch
from torch import Tensor

# expanded is another tensor: its first column everywhere, with stride 0.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "expanded": lambda x: x[..., :1].expand_as(x),
}
