"""Texts that a model writes: at the end of a run, and while it trains, from what has just been saved."""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from checkpoints.files import Files
from checkpoints.weights import load_weights
from launcher.config import Config
from launcher.metrics import append_line
from launcher.rundirectory import RunDirectory, naming
from launcher.sections import Sample
from megamodel.accounting import parameter_count
from megamodel.data.batch import Cursor
from megamodel.data.prepared import Prepared
from megamodel.generate import generate
from megamodel.model import Transformer

log = logging.getLogger(__name__)

MOST_SAMPLE_PARAMETERS = 1_000_000_000  # larger models are not loaded into one process to write a text
SAMPLE_SECONDS = 30.0


def sample(config: Config, prepared: Prepared, checkpoint: Path, files: Files) -> str | None:
    """A text that the saved model wrote, computed in this process on the CPU.

    None where none is asked for, where there is no tokenizer to write it with, and for a model that is too
    large to be loaded into the main process.
    """
    settings = config.sample
    readable = prepared.tokenizer_path is not None
    if not settings.max_tokens or not readable or parameter_count(config.model) > MOST_SAMPLE_PARAMETERS:
        return None
    model = Transformer(config.model, seed=config.train.seed)
    load_weights(checkpoint, model, files=files)
    tokenizer = prepared.tokenizer
    prompt = [tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id]
    prompt += tokenizer.encode(settings.prompt) if settings.prompt else []
    written: list[int] = []
    deadline = time.monotonic() + SAMPLE_SECONDS
    for token in generate(
        model,
        prompt,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        seed=config.train.seed,
        stop=tokenizer.eos_id,
        context=config.train.sequence_length,
        vocabulary=tokenizer.vocab_size,
    ):
        written.append(token)
        if time.monotonic() > deadline:
            break
    return settings.prompt + tokenizer.decode(written)


def record_sample(path: Path, cursor: Cursor, settings: Sample, text: str) -> None:
    """One line of the file: {time, step, attempt, tokens, prompt, text}."""
    record = {"time": time.time(), "step": cursor.step, "attempt": cursor.attempt, "tokens": cursor.tokens}
    with naming(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            append_line(file, json.dumps({**record, "prompt": settings.prompt, "text": text}))
        finally:
            os.close(file)


@dataclass
class Sampler:
    """Writes a text from a checkpoint that was just completed. Made on every rank, the main rank works."""

    config: Config
    prepared: Prepared
    files: Files
    directory: RunDirectory
    is_main: bool
    _seconds: float | None = None

    def due(self, step: int) -> bool:
        """Whether a text is to be written of the state that was saved at this step; not of the last one."""
        every = self.config.sample.every
        return every > 0 and step % every == 0

    def write(self, cursor: Cursor, checkpoint: Path | None) -> str | None:
        """The text, recorded; what goes wrong is said and does not end the run."""
        if not self.is_main or checkpoint is None:
            return None
        start = time.perf_counter()
        try:
            text = sample(self.config, self.prepared, checkpoint, self.files)
            if text is not None:
                record_sample(self.directory.samples_file, cursor, self.config.sample, text)
        except Exception as error:
            log.warning(f"no text could be written ({type(error).__name__}: {error})", exc_info=True)
            return None
        finally:
            self._seconds = time.perf_counter() - start
        return text

    def take(self) -> float | None:
        """Seconds that the last text took, once."""
        seconds, self._seconds = self._seconds, None
        return seconds
