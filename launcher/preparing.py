"""The command `prepare`: tokenizer and token files, without the engine and what it imports."""

import json
import logging
from collections.abc import Callable
from typing import Any

from launcher.config import Prepare
from launcher.failure import DONE
from launcher.log import logging_to
from megamodel.data.config import Data
from megamodel.data.prepare import prepare as prepare_data
from megamodel.data.prepared import Prepared
from megamodel.tokenizer import TokenizerConfig

log = logging.getLogger(__name__)
TOLD_EVERY_TOKENS = 10_000_000


def prepare(config: Prepare) -> int:
    """Build what is missing and say what there is."""
    with logging_to(None, rank=0, level="info"):
        prepared = prepare_data(config.data, config.tokenizer, progress=progress())
    print(prepared_text(prepared) if config.format == "text" else json.dumps(prepared_facts(prepared)))
    return DONE


class Asked(Exception):
    """A signal asks for a stop."""


def prepare_unless(asked: Callable[[], int], data: Data, tokenizer: TokenizerConfig) -> bool:
    """Build what is missing; False where a stop was asked for before it was complete.

    What was built until then is thrown away. Ctrl-C reaches the encoding processes too, so that any error
    after a request is its consequence.
    """
    told = progress()

    def tell(source: str, tokens: int) -> None:
        if asked():
            raise Asked
        told(source, tokens)

    try:
        prepare_data(data, tokenizer, progress=tell)
    except Exception as error:
        if not asked():
            raise
        log.info(f"the data are not prepared: asked to stop before ({type(error).__name__})")
        return False
    return True


def progress() -> Callable[[str, int], None]:
    """Tells how far the tokenising is, about every ten million tokens."""
    told = 0

    def tell(source: str, tokens: int) -> None:
        nonlocal told
        if tokens - told >= TOLD_EVERY_TOKENS:
            told = tokens
            log.info(f"tokenised {tokens:,} tokens of {source}")

    return tell


def prepared_facts(prepared: Prepared) -> dict[str, Any]:
    """What `prepare` made, as plain JSON."""
    report = prepared.report
    return {
        "directory": str(prepared.directory),
        "digest": prepared.digest,
        "tokenizer": prepared.tokenizer.hash,
        "vocab_size": prepared.tokenizer.vocab_size,
        "train_tokens": {name: corpus.count for name, corpus in prepared.train.items()},
        "held_out_tokens": {name: corpus.count for name, corpus in prepared.held_out.items()},
        "records": report.lines,
        "written": report.written,
        "skipped": report.skipped,
        "rejected": report.rejected,
        "reasons": report.reasons,
        "examples": report.examples,
    }


def prepared_text(prepared: Prepared) -> str:
    """The same for people."""
    report = prepared.report
    lines = [
        f"prepared in {prepared.directory}",
        (
            f"records  {report.lines:,} = written {report.written:,} + skipped {report.skipped:,} + rejected "
            f"{report.rejected:,}"
        ),
    ]
    for name, corpus in prepared.train.items():
        lines.append(f"{name}  {corpus.count:,} training tokens, {prepared.held_out[name].count:,} held out")
    lines += [f"  {reason}: {count:,}" for reason, count in sorted(report.reasons.items())]
    lines += [f"  {example}" for example in report.examples]
    return "\n".join(lines)
