"""The gradient of the head's matrix, added up over many chunks of 16-bit logits."""

import pytest
import torch

from megamodel.kernels.head import MOST_ROUNDED, Chunked, VocabularyRows, linear_cross_entropy, projected

TOKENS, WIDTH, VOCABULARY = 512, 96, 250
LINE = 2 * VOCABULARY  # bytes of a token's logits
SUM = 4 * VOCABULARY * WIDTH  # bytes of the sum in fp32


def relative_error(workspace_bytes: int) -> float:
    """Of the matrix's gradient, to the same in fp64 from the same 16-bit operands."""
    source = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, WIDTH, generator=source).bfloat16()
    # All tokens have one target, so that its row gets as many summands of one sign as there are tokens.
    x[:, 0] = 4.0
    weight = (0.1 * torch.randn(VOCABULARY, WIDTH, generator=source)).bfloat16()
    targets = torch.full((TOKENS,), 7)
    rows = VocabularyRows(VOCABULARY)

    def gradient(x: torch.Tensor, weight: torch.Tensor, how: Chunked) -> torch.Tensor:
        weight = weight.clone().requires_grad_()
        projection = projected(x[None], weight, None, rows)
        objective = linear_cross_entropy(projection, targets[None], torch.tensor(1 / TOKENS), how=how)[0]
        objective.backward()
        assert weight.grad is not None
        return weight.grad

    found = gradient(x, weight, Chunked(workspace_bytes)).double()
    exact = weight.double().requires_grad_()
    torch.nn.functional.cross_entropy(x.double() @ exact.t(), targets).backward()
    assert exact.grad is not None
    return float((found - exact.grad).abs().max() / exact.grad.abs().max())


@pytest.mark.parametrize(
    "workspace_bytes",
    [
        1 << 20,  # all tokens at once
        LINE,  # a token at a time, 512 sums
        LINE * TOKENS // 64,
        2 * SUM,  # the sum in fp32 takes half of it
        LINE * TOKENS // MOST_ROUNDED,  # eight sums in bf16
    ],
)
def test_the_number_of_chunks_costs_no_digits(workspace_bytes: int) -> None:
    # bf16 logits and their gradients are off by 2^-9, independently; eight rounded sums by 2^-9 each.
    assert relative_error(workspace_bytes) < 2**-7
