"""Text from a model in one process, by full forward passes.

B rows (1 here), S tokens so far, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megamodel.model import Transformer
from parallel.seed import generator


def filtered(logits: Tensor, *, temperature: float, top_k: int | None) -> Tensor:
    """logits (V) -> probabilities (V) in fp32: divided by the temperature, only the k likeliest kept."""
    scores = logits.float() / temperature
    if top_k is not None and top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
    return scores.softmax(-1)


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    context: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """New tokens one by one, until `stop` (not given out) or max_tokens.

    temperature 0 takes the likeliest token. context: only the last so many tokens are seen. vocabulary: only
    the first so many tokens can be drawn, where the model has more than the tokenizer. The draw of token n
    depends on (seed, n) alone.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one, such as the end-of-document token")
    model.eval()
    device = next(model.parameters()).device
    tokens = list(prompt)
    for number in range(max_tokens):
        seen = torch.tensor([tokens[-context:] if context else tokens], device=device)
        logits = model(seen)[0, -1, :vocabulary].cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            odds = filtered(logits, temperature=temperature, top_k=top_k)
            token = int(torch.multinomial(odds, 1, generator=generator(seed, "generate", number)))
        if token == stop:
            return
        tokens.append(token)
        yield token
