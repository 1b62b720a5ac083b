"""The command `generate`: text from a model."""

import contextlib
import io
import json
import math
import sys
import time
from typing import Any

from conf.typed import config, setting
from launcher.config import FORMAT_HELP, Format
from launcher.failure import DONE
from launcher.hardware import Hardware
from launcher.opening import Opened, asked, open_model
from megamodel.generate import Sampling, generate_batch, generate_rows


@config
class Writing:
    """What is written, and how a token is drawn."""

    prompt: str = setting("", on_resume="free", help="what it goes on from; empty: the start of a document")
    prompts: list[str] = setting(factory=list, on_resume="free", help="several prompts at once instead")
    max_tokens: int = setting(100, on_resume="free", help="tokens to write at most")
    temperature: float = setting(0.8, on_resume="free", help="0 always takes the likeliest token")
    top_k: int | None = setting(None, on_resume="free", help="only the k likeliest tokens; null: all")
    top_p: float | None = setting(
        None, on_resume="free", help="only the likeliest that together have this probability; null: all"
    )
    seed: int = setting(0, on_resume="free", help="of the draws")
    stop: list[str] = setting(
        factory=list,
        on_resume="free",
        help="texts of one token that end it, like the end of a document",
    )

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"generate.max_tokens ({self.max_tokens}) must be at least 1 and generate.temperature "
                f"({self.temperature}) 0 or more"
            )
        if (self.top_k is not None and self.top_k < 1) or (
            self.top_p is not None and not 0 < self.top_p <= 1
        ):
            raise ValueError(
                f"generate.top_k ({self.top_k}) must be at least 1 and top_p ({self.top_p}) in (0, 1]"
            )
        if self.prompt and self.prompts:
            raise ValueError("generate.prompt and generate.prompts are both given; leave one out")


@config
class Generate:
    """Text from a model."""

    source: str = setting(
        "runs/run",
        on_resume="free",
        help="directory of a run, of one step, or of a model of transformers",
    )
    tokenizer: str | None = setting(None, on_resume="free", help="tokenizer file; null: the source's own")
    generate: Writing = setting(factory=Writing, on_resume="free", help="what is written")
    hardware: Hardware = setting(factory=Hardware, on_resume="free", help="the machine")
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)


def generate(config: Generate) -> int:
    """The command: one prompt is written as it comes, several are written together.

    Processes that were started together share the model's heads (tp); rank 0 tells the text.
    """
    with asked(config.hardware) as (device, parallel):
        opened = open_model(config.source, tokenizer=config.tokenizer, device=device, parallel=parallel)
        with contextlib.redirect_stdout(io.StringIO() if parallel.group.rank else sys.stdout):
            return _write(config, opened)


def _write(config: Generate, opened: Opened) -> int:
    texts = config.generate.prompts or [config.generate.prompt]
    if config.format == "text" and len(texts) == 1:
        return _aloud(config.generate, opened, texts[0])
    start = time.perf_counter()
    written = generate_batch(
        opened.model, [encoded(opened, text) for text in texts], **_sampling(config.generate, opened)
    )
    found = [
        {"prompt": text, "text": opened.tokenizer.decode(ids), "tokens": ids}
        for text, ids in zip(texts, written, strict=True)
    ]
    if config.format == "json":
        seconds = time.perf_counter() - start
        print(json.dumps({"source": str(opened.where), "results": found, "seconds": seconds}))
    else:
        print("\n\n".join(f"{one['prompt']}{one['text']}" for one in found))
    return DONE


def encoded(opened: Opened, text: str) -> list[int]:
    """A prompt's tokens, begun as the documents of the training were."""
    tokenizer = opened.tokenizer
    begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    return [begin, *tokenizer.encode(text)]


def _sampling(settings: Writing, opened: Opened) -> dict[str, Any]:
    stop = [opened.tokenizer.eos_id]
    for text in settings.stop:
        ids = opened.tokenizer.encode(text, allow_special=True)
        if len(ids) != 1:
            raise ValueError(f"generate.stop: {text!r} is {len(ids)} tokens; it must be one")
        stop += ids
    sampling = Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        vocabulary=opened.tokenizer.vocab_size,
        seed=settings.seed,
    )
    return {"max_tokens": settings.max_tokens, "sampling": sampling, "stop": stop}


def _aloud(settings: Writing, opened: Opened, text: str) -> int:
    """Print the text as it grows: what later tokens may still change of a character is held back."""
    print(text, end="")
    ids: list[int] = []
    told = ""
    for found in generate_rows(opened.model, [encoded(opened, text)], **_sampling(settings, opened)):
        ids += [token for token in found if token is not None]
        whole = opened.tokenizer.decode(ids)
        if whole.startswith(told) and not whole.endswith("\ufffd"):
            print(whole[len(told) :], end="")
            sys.stdout.flush()
            told = whole
    whole = opened.tokenizer.decode(ids)
    print(whole[len(told) :] if whole.startswith(told) else "")
    return DONE
