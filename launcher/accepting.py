"""Whether a checkpoint is one that this configuration goes on from."""

from checkpoints.imported import IMPORTED
from checkpoints.manager import Restored
from conf.schema import Difference, plain
from launcher.config import Plan, allowed, check_resume
from megamodel.data.prepared import Prepared


class Acceptor:
    """Refuses a checkpoint that this configuration does not continue; `changed`: what was overridden."""

    def __init__(self, settled: Plan, prepared: Prepared) -> None:
        self._settled, self._prepared = settled, prepared
        self.changed: list[Difference] = []

    def __call__(self, restored: Restored) -> None:
        settled, prepared = self._settled, self._prepared
        if restored.extra.get(IMPORTED):  # weights from elsewhere: nothing but the model must agree
            model = restored.about.configuration["model"]
            check_resume({**plain(settled.config), "model": model}, settled.config)
            return
        found = check_resume(restored.about.configuration, settled.config)
        if restored.about.tokenizer != prepared.tokenizer.hash:
            raise ValueError(
                f"{restored.path} was trained with another tokenizer ({restored.about.tokenizer[:12]}, here "
                f"{prepared.tokenizer.hash[:12]}); use its tokenizer, or another run.name"
            )
        # Another mixture or other paths may be asked for by name, and then feed other tokens.
        moved = any(allowed(path, settled.config.resume_override) for path in ("data.paths", "data.mixture"))
        if restored.extra.get("data") != prepared.digest and not moved:
            raise ValueError(
                f"{restored.path} was trained on other data ({str(restored.extra.get('data'))[:12]}, here "
                f"{prepared.digest[:12]}): a source has changed; restore it, or use another run.name"
            )
        self.changed = [d for d in found if d.on_resume == "needs_override"]
