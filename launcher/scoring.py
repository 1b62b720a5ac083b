"""The command `evaluate`: how well a model predicts files, document by document."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from conf.typed import config, setting
from launcher.config import FORMAT_HELP, Format
from launcher.failure import DONE
from launcher.hardware import Hardware
from launcher.opening import Opened, asked, open_model
from megamodel.data.blocks import blocks
from megamodel.data.config import Data
from megamodel.data.records import Document, records
from megamodel.data.sources import discover
from megamodel.loss import cross_entropy
from megamodel.model import Transformer
from parallel.tensor import VocabularyShard


@config
class Score:
    """The loss of a model on files."""

    source: str = setting(
        "runs/run",
        on_resume="free",
        help="directory of a run, of one step, or of a model of transformers",
    )
    tokenizer: str | None = setting(None, on_resume="free", help="tokenizer file; null: the source's own")
    data: Data = setting(factory=Data, on_resume="free", help="what is read: data.paths=[...]")
    context: int | None = setting(
        None, on_resume="free", help="tokens seen at once; null: those of the training, else 1024"
    )
    stride: int | None = setting(
        None, on_resume="free", help="a longer document moves on by so many tokens; null: half the context"
    )
    documents: int | None = setting(None, on_resume="free", help="only the first so many; null: all")
    hardware: Hardware = setting(factory=Hardware, on_resume="free", help="the machine")
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 2:
            raise ValueError(f"context ({self.context}) must be at least 2 tokens")
        if self.stride is not None and not 1 <= self.stride <= (self.context or self.stride):
            raise ValueError(f"stride ({self.stride}) must be from 1 to context ({self.context})")


@dataclass(frozen=True)
class Result:
    """Sums over all documents. loss: nats per token, the end of each document included."""

    documents: int
    tokens: int
    bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float


def evaluate(config: Score) -> int:
    """The command: one line, or one JSON object."""
    with asked(config.hardware) as (device, parallel):
        opened = open_model(config.source, tokenizer=config.tokenizer, device=device, parallel=parallel)
        result = score(config, opened)
        if parallel.group.rank == 0:
            tell(config, opened, result)
    return DONE


def score(config: Score, opened: Opened) -> Result:
    """The sums over all documents; of several processes each gets the same."""
    tokenizer, context = opened.tokenizer, config.context or opened.context or 1024
    begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    total, tokens, size, count = 0.0, 0, 0, 0
    for text in texts(config.data):
        if config.documents is not None and count >= config.documents:
            break
        ids = [begin, *tokenizer.encode(text), tokenizer.eos_id]
        nats = document_loss(opened.model, ids, context=context, stride=config.stride or max(context // 2, 1))
        total, tokens, size = total + nats, tokens + len(ids) - 1, size + len(text.encode())
        count += 1
    if not tokens:
        raise ValueError("data.paths holds no document; nothing can be evaluated")
    loss = total / tokens
    return Result(count, tokens, size, loss, math.exp(min(loss, 700)), total / math.log(2) / max(size, 1))


def tell(config: Score, opened: Opened, result: Result) -> None:
    if config.format == "json":
        print(json.dumps({"source": str(opened.where), **asdict(result)}))
    else:
        print(
            f"loss {result.loss:.4f} nats per token, perplexity {result.perplexity:.3f}, "
            f"{result.bits_per_byte:.4f} bits per byte on {result.documents:,} documents of "
            f"{result.tokens:,} tokens and {result.bytes:,} bytes"
        )


def texts(data: Data) -> Iterator[str]:
    """The documents of all sources, in their order; what is no text is left out."""
    for source in data.sources().values():
        for file in discover(source, data.cache_path()):
            for block in blocks(file, source, eos_id=None):
                for record in records(block, text_key=source.text_key, eos_id=None):
                    if isinstance(record, Document) and record.ids is None:
                        yield record.text


@torch.no_grad()
def document_loss(model: Transformer, ids: list[int], *, context: int, stride: int) -> float:
    """Nats of ids[1:], each predicted once from what stands before it in its document.

    A document longer than the context is read in windows that move on by `stride`: a token sees at least
    context - stride tokens before it, where there are so many.
    """
    device = next(model.parameters()).device
    whole = torch.tensor(ids, device=device)
    shard = VocabularyShard(model.settings.vocab_size, model.parallel.group)
    total, done, start = 0.0, 1, 0  # ids[:done] need no prediction any more
    while done < len(ids):
        stop = min(start + context, len(ids) - 1)
        window = whole[start:stop][None]
        targets: Tensor = whole[start + 1 : stop + 1][None].clone()
        loss, _, _ = cross_entropy(model(window), targets, start=shard.start, group=shard.group)
        total += float(loss[0, done - start - 1 :].double().sum())
        done = stop + 1
        start += stride
    return total
