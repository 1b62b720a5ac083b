"""Every YAML file of conf composes and types, and the names that scripts rely on are there."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from conf.compose import Composer
from conf.schema import NO_DEFAULT, accepts, fields, plain
from launcher.commands import COMMANDS
from launcher.config import Config
from launcher.replay import Replay

CONF = Path(__file__).resolve().parents[1] / "conf"
PRESETS = sorted(path for path in CONF.rglob("*.yaml") if path.parent != CONF)
NEEDS = {
    "data/mixture": [
        "data.mixture={code: {kind: stdlib, weight: 1}}"
    ],  # presets that ask for a value of the user's
    "data/files": ["data.paths=[x.txt]"],
    "tokenizer/file": ["tokenizer.path=tokenizer.json"],
    "tokenizer/ids": ["tokenizer.vocab_size=2048", "tokenizer.eos_id=0"],
}
NAMES = """
run.dir run.name
train.steps train.sequence_length train.global_batch train.micro_batch train.precision train.seed
train.accumulation train.tokens
parallel.tp parallel.pp parallel.sequence_parallel parallel.recompute parallel.stage_layers
optim.lr optim.weight_decay optim.clip_norm optim.beta1 optim.beta2 optim.eps
schedule.kind schedule.warmup_steps schedule.min_lr schedule.warmup_tokens schedule.decay_steps schedule.decay
model.vocab_size model.d_model model.n_layers model.tie_embeddings model.z_loss
model.attention.n_heads model.attention.n_kv_heads model.attention.head_width
model.feedforward.d_ff model.feedforward.activation model.feedforward.gated
model.dropout.embedding model.dropout.attention model.dropout.residual
model.norm.kind model.norm.eps model.position.kind
data.paths data.text_key data.isolate_documents data.workers data.held_out_fraction data.mixture
tokenizer.path tokenizer.vocab_size tokenizer.add_bos
evaluate.every evaluate.batches checkpoint.every checkpoint.keep checkpoint.keep_every
resume resume_override dry_run
""".split()


def typed(overrides: list[str], root: type = Config, primary: str = "config") -> Any:
    composer = Composer(root, primary)
    request = composer.request(overrides)
    return composer.typed(composer.compose(request.overrides), request.problems)


def covered(given: Any, tree: Any) -> bool:
    """Whether a typed tree, made plain, has each value of a file."""
    if isinstance(given, dict) and isinstance(tree, dict):
        return all(key in tree and covered(value, tree[key]) for key, value in given.items())
    return given == tree or given == "???"


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_preset_composes_to_what_it_says(path: Path) -> None:
    group, name = path.parent.relative_to(CONF).as_posix(), path.stem
    if group.startswith("experiment/"):  # experiments may lie in folders
        group, name = "experiment", f"{group.removeprefix('experiment/')}/{name}"
    overrides = NEEDS.get(f"{group}/{name}", [])
    if group == "experiment" or accepts(Config, group.replace("/", ".")):
        tree = plain(typed([f"{group}={name}", *overrides]))
    else:
        tree = plain(typed([f"{group}={name}", "files=[x.csv]"], Replay, "replay"))
    given = OmegaConf.to_container(OmegaConf.load(path))
    for override in overrides:
        given.pop(override.split("=")[0].split(".")[1], None)  # type: ignore[union-attr]
    if group == "experiment":  # about several sections at once
        given.pop("defaults", None)  # type: ignore[union-attr]
        given.pop("hydra", None)  # type: ignore[union-attr]  # what a multirun varies
    else:
        for part in group.split("/"):
            tree = tree[part]
    assert covered(given, tree)


def test_a_value_that_got_lost_is_seen() -> None:
    assert covered({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}})
    assert not covered({"a": {"b": 1}}, {"a": {"b": 2}})
    assert not covered({"a": {"b": 1}}, {"a": {}})


def test_every_primary_file_has_its_command() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {c.config_name for c in COMMANDS.values()}
    for command in COMMANDS.values():
        root = command.load_root()
        asked = [row for row in fields(root) if row.default is NO_DEFAULT and "." not in row.path]
        given = [f"{row.path}={'[x]' if row.type.startswith('list') else 'x'}" for row in asked]
        assert isinstance(typed(given, root, command.config_name), root)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_scripts_rely_on(name: str) -> None:
    assert accepts(Config, name)


def test_a_name_that_is_not_there_is_seen() -> None:
    assert not accepts(Config, "optim.learning_rate")
