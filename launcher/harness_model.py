"""A model as lm-eval asks it. Imported only where lm-eval is installed."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]
from lm_eval.evaluator import simple_evaluate  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-not-found]

from launcher.likelihood import likelihoods
from launcher.opening import Opened
from megamodel.generate import Sampling, generate_rows

GENERATED = 256  # new tokens where a task says nothing


class HarnessModel(TemplateLM):
    """Every text begins as the documents of the training did."""

    def __init__(self, opened: Opened, *, context: int, rows: int) -> None:
        super().__init__()
        self.opened, self.context, self.rows = opened, context, rows
        self._device = next(opened.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.opened.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.opened.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.opened.tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(self._begun(before), after) for _, before, after in requests]
        return likelihoods(self.opened.model, pairs, context=self.context, rows=self.rows)

    def _begun(self, ids: list[int]) -> list[int]:
        return ids if ids[:1] == [self.prefix_token_id] else [self.prefix_token_id, *ids]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(
                token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.context, context_len=1
            )
            pairs = [make_disjoint_window(window) for window in windows]
            scored = likelihoods(self.opened.model, pairs, context=self.context, rows=self.rows)
            found.append(sum(nats for nats, _ in scored))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._written(*request.args) for request in requests]

    def _written(self, prompt: str, how: dict[str, Any]) -> str:
        ends = how.get("until") or []
        ends = [ends] if isinstance(ends, str) else list(ends)
        count = int(how.get("max_gen_toks") or how.get("max_new_tokens") or GENERATED)
        count = min(count, self.context - 1)
        sampled = how.get("do_sample", False)
        sampling = Sampling(
            temperature=float(how.get("temperature", 1.0)) if sampled else 0.0,
            top_k=how.get("top_k"),
            top_p=how.get("top_p"),
            vocabulary=self.opened.tokenizer.vocab_size,
        )
        ids = self._begun(self.tok_encode(prompt)[-(self.context - count - 1) :])
        written: list[int] = []
        for found in generate_rows(
            self.opened.model, [ids], max_tokens=count, sampling=sampling, stop=[self.eot_token_id]
        ):
            written += [token for token in found if token is not None]
            text = self.opened.tokenizer.decode(written)
            if any(end in text for end in ends):
                break
        text = self.opened.tokenizer.decode(written)
        return text[: min((text.index(end) for end in ends if end in text), default=len(text))]


def results(
    opened: Opened,
    *,
    tasks: list[str],
    include: str | None,
    shots: int | None,
    limit: int | None,
    rows: int,
    context: int,
) -> dict[str, dict[str, Any]]:
    """Metric values by task; ValueError for a task that lm-eval does not know."""
    manager = TaskManager(include_path=include)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(f"lm-eval has no task {', '.join(unknown)}; your own need include=FOLDER")
    found = simple_evaluate(
        model=HarnessModel(opened, context=context, rows=rows),
        tasks=list(tasks),
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    assert found is not None
    return {task: dict(values) for task, values in found["results"].items()}
