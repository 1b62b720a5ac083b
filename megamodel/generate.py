"""Text from a model, with a memory for each attention: one pass over the prompts, then one token a pass.

B rows, S tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamodel.cache import Cache
from megamodel.model import Transformer
from parallel.collectives import gather_last
from parallel.seed import generator


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. temperature 0 takes the likeliest. The rest cuts the odds, in this order:

    vocabulary: only the first so many tokens, where the model has more than the tokenizer; top_k: the k
    likeliest; top_p: the fewest that together have this probability.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    vocabulary: int | None = None
    seed: int = 0


def filtered(
    logits: Tensor, *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """logits (V) -> probabilities (V) in fp32: divided by the temperature, only the likeliest kept."""
    scores = logits.float() / temperature
    if top_k is not None and top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
    odds = scores.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, index = odds.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # what stands before it is enough already
        odds = odds.index_fill(0, index[beyond], 0.0)
        odds = odds / odds.sum()
    return odds


def drawn(logits: Tensor, sampling: Sampling, *, row: int, number: int) -> int:
    """The token number `number` of a row from its logits (V): a function of (seed, row, number)."""
    logits = logits[: sampling.vocabulary].float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    odds = filtered(logits, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    key = (number,) if row == 0 else (row, number)
    return int(torch.multinomial(odds, 1, generator=generator(sampling.seed, "generate", *key)))


def padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, positions), both (B, S): prompts end together, positions start at 0, padding is at -1."""
    length = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), length, dtype=torch.int64)
    positions = torch.full_like(tokens, -1)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = torch.tensor(list(prompt))
        positions[row, length - len(prompt) :] = torch.arange(len(prompt))
    return tokens.to(device), positions.to(device)


@torch.no_grad()
def generate_rows(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[int] = (),
) -> Iterator[list[int | None]]:
    """New tokens of all rows, a list of B a time; None for a row that has stopped. Ends when all have.

    A stop token is not given out. On several tp ranks every rank calls it and gets the same.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens; give at least one, such as the end-of-document token")
    model.eval()
    device = next(model.parameters()).device
    tokens, positions = padded(prompts, device)
    longest = model.settings.longest
    if longest is not None and tokens.shape[1] + max_tokens > longest:
        raise ValueError(
            f"{tokens.shape[1]} tokens of prompt and {max_tokens} new ones are more than the "
            f"{longest} positions of the model; ask for at most {max(longest - tokens.shape[1], 0)}"
        )
    capacity, regimes = tokens.shape[1] + max_tokens, []
    caches: list[Cache] = []
    whole, places = tokens, positions
    done = [False] * len(prompts)
    for number in range(max_tokens):
        before, regimes = regimes, [model.regime(int(last) + 1) for last in places[:, -1]]
        if regimes != before:  # the first pass, and whenever earlier tokens would be turned otherwise
            caches, tokens, positions = model.caches(capacity), whole, places
        logits = gather_last(model(tokens, positions, caches=caches)[:, -1], model.parallel.group)
        found = [drawn(row, sampling, row=i, number=number) for i, row in enumerate(logits)]
        done = [over or token in stop for over, token in zip(done, found, strict=True)]
        if all(done):
            return
        yield [None if over else token for over, token in zip(done, found, strict=True)]
        tokens = torch.tensor(found, device=device)[:, None]
        positions = positions[:, -1:] + 1
        whole, places = torch.cat((whole, tokens), dim=1), torch.cat((places, positions), dim=1)


def generate_batch(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """The new tokens of every prompt; the prompts may differ in length."""
    written: list[list[int]] = [[] for _ in prompts]
    for found in generate_rows(
        model, prompts, max_tokens=max_tokens, sampling=sampling or Sampling(), stop=stop
    ):
        for row, token in zip(written, found, strict=True):
            if token is not None:
                row.append(token)
    return written


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    context: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """New tokens one by one, until `stop` (not given out) or max_tokens.

    context: only the last so many tokens are seen; beyond it every token is a full pass over them.
    """
    sampling = Sampling(temperature, top_k, top_p, vocabulary, seed)
    if context is None or len(prompt) + max_tokens <= context:
        stops = () if stop is None else (stop,)
        for found in generate_rows(model, [prompt], max_tokens=max_tokens, sampling=sampling, stop=stops):
            assert found[0] is not None
            yield found[0]
        return
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one, such as the end-of-document token")
    model.eval()
    device = next(model.parameters()).device
    tokens = list(prompt)
    for number in range(max_tokens):
        logits = model(torch.tensor([tokens[-context:]], device=device))[0, -1]
        token = drawn(gather_last(logits, model.parallel.group), sampling, row=0, number=number)
        if token == stop:
            return
        tokens.append(token)
        yield token
