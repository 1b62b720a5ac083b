"""Matrix products in 8 bit through torchao. Imported only where torchao is installed.

Each operand is scaled by its largest element at the moment of use; both gradients are 8-bit products too.
"""

import torch.nn.functional as F
from torch import Tensor
from torchao.float8 import Float8LinearConfig  # type: ignore[import-not-found]
from torchao.float8.float8_linear import (  # type: ignore[import-not-found]
    matmul_with_hp_or_float8_args,
)
from torchao.float8.float8_training_tensor import (  # type: ignore[import-not-found]
    LinearMMConfig,
    ScaledMMConfig,
)

from megamodel.kernels.products import FLOAT8_MULTIPLE


class Float8Product:
    """y = x W^T + b in 8 bit; products whose sides are no multiples of 16 stay as they are.

    emulate: with the same rounding, but no 8-bit unit, for tests.
    """

    def __init__(self, *, emulate: bool = False) -> None:
        self.config = Float8LinearConfig(emulate=emulate)
        forms = (self.config.gemm_config_output, self.config.gemm_config_grad_input)
        forms += (self.config.gemm_config_grad_weight,)
        made = [ScaledMMConfig(emulate, form.use_fast_accum, False, False) for form in forms]
        self.products = LinearMMConfig(*made)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # The number of tokens is a side of the product that makes the weight's gradient.
        if any(size % FLOAT8_MULTIPLE for size in (*weight.shape, x.numel() // x.shape[-1])):
            return F.linear(x, weight, bias)
        y = matmul_with_hp_or_float8_args.apply(x, weight.t(), self.products, self.config)
        return y if bias is None else y + bias
