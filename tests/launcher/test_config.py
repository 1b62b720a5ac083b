"""Checks across sections, the settled numbers of a run, and what a resume may change."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from conf.schema import fields, plain
from conf.typed import InvalidConfiguration, parse
from launcher.config import Config, Prepare, check_resume, check_same, plan, run_directory


def problems(raw: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InvalidConfiguration) as caught:
        parse(Config, raw)
    return {problem.path: str(problem) for problem in caught.value.problems}


MODEL = {"attention": {"n_heads": 8, "n_kv_heads": 2}, "feedforward": {"d_ff": 64}, "n_layers": 4}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_any_tp_that_divides_heads_and_width(tp: int) -> None:
    assert parse(Config, {"model": MODEL, "parallel": {"tp": tp}}).parallel.tp == tp


def test_key_value_heads_are_split_or_replicated() -> None:
    raw = {"model": {**MODEL, "attention": {"n_heads": 12, "n_kv_heads": 4}, "feedforward": {"d_ff": 96}}}
    assert parse(Config, {**raw, "parallel": {"tp": 2}}).parallel.tp == 2
    assert parse(Config, {**raw, "parallel": {"tp": 12}}).parallel.tp == 12
    found = problems({**raw, "parallel": {"tp": 6}})
    assert list(found) == ["model.attention.n_kv_heads"]
    assert found["model.attention.n_kv_heads"].endswith("use parallel.tp in [1, 2, 4, 12]")


def test_all_that_does_not_divide_is_listed() -> None:
    found = problems(
        {
            "model": MODEL,
            "parallel": {"tp": 3, "pp": 5, "sequence_parallel": True},
            "train": {"sequence_length": 100},
        }
    )
    assert found == {
        "model.attention.n_heads": "model.attention.n_heads (8) must be divisible by parallel.tp (3); "
        "use parallel.tp in [1, 2, 4, 8]",
        "model.feedforward.d_ff": "model.feedforward.d_ff (64) must be divisible by parallel.tp (3); "
        "use parallel.tp in [1, 2, 4, 8, 16, 32, 64]",
        "model.attention.n_kv_heads": "model.attention.n_kv_heads (2) must be divisible by parallel.tp (3), "
        "or tp by it; use parallel.tp in [1, 2, 4, 8]",
        "train.sequence_length": "train.sequence_length (100) must be divisible by parallel.tp (3) under "
        "parallel.sequence_parallel=true; use 99 or 102",
        "parallel.pp": "parallel.pp (5) is more than model.n_layers (4); use at most 4",
    }


def test_stages_add_up_to_the_layers() -> None:
    raw = {"model": MODEL, "parallel": {"pp": 2, "stage_layers": [1, 2]}}
    assert problems(raw) == {
        "parallel.stage_layers": "parallel.stage_layers [1, 2] add up to 3, but model.n_layers is 4"
    }


def test_the_model_has_room_for_the_tokenizer() -> None:
    raw = {"model": {"vocab_size": 1000}, "tokenizer": {"vocab_size": 1001}}
    assert list(problems(raw)) == ["tokenizer.vocab_size"]


def test_steps_and_tokens_exclude_each_other() -> None:
    assert "set one to null" in problems({"train": {"steps": 1, "tokens": 1}})["train"]


def settled(world_size: int = 1, cuda: bool = False, **raw: Any) -> Any:
    return plan(parse(Config, raw), world_size=world_size, cuda=cuda)


def test_the_plan_of_a_run() -> None:
    found = settled(
        8,
        model=MODEL,
        parallel={"tp": 2, "pp": 2},
        train={"micro_batch": 3, "accumulation": 4, "steps": 50, "sequence_length": 16},
        schedule={"warmup_steps": 10},
        optim={"lr": 1e-3},
    )
    assert (found.data_size, found.steps, found.precision) == (2, 50, "fp32")
    assert (found.batches.global_batch, found.batches.at(0).accumulation) == (24, 4)
    assert found.learning_rate.at(9) == 1e-3
    assert found.directory == Path("runs/run")
    train = found.config.train
    assert (train.global_batch, train.micro_batch, train.accumulation, train.precision) == (
        24,
        3,
        None,
        "fp32",
    )
    assert found.config.run.dir is None  # the saved configuration runs elsewhere under another name


def test_tokens_become_updates_rounded_up() -> None:
    train = {"tokens": 16 * 24 * 50 + 1, "micro_batch": 24, "sequence_length": 16}
    assert settled(train=train).steps == 51
    train["tokens"] -= 1
    assert settled(train=train).steps == 50


def test_precision_follows_the_device_unless_given() -> None:
    assert settled(cuda=True).precision == "bf16"
    assert settled(cuda=False).precision == "fp32"
    assert settled(cuda=True, train={"precision": "fp32"}).precision == "fp32"


def test_settling_twice_changes_nothing() -> None:
    once = settled(2, train={"global_batch": 8}).config
    assert plan(once, world_size=2, cuda=False).config == once


def test_a_settled_run_on_more_processes_keeps_its_global_batch() -> None:
    once = settled(1, train={"micro_batch": 2, "accumulation": 4}).config
    more = plan(once, world_size=4, cuda=False)
    assert (more.batches.global_batch, more.batches.at(0).accumulation) == (8, 1)


@pytest.mark.parametrize(
    ("world_size", "raw", "message"),
    [
        (3, {"parallel": {"tp": 2}, "model": MODEL}, "3 processes cannot be split"),
        (1, {"train": {"steps": 10}, "schedule": {"warmup_steps": 9}}, "schedule.warmup_steps of at most 8"),
        (1, {"schedule": {"min_lr": 1.0}}, "min_lr"),
        (2, {"train": {"global_batch": 5}}, "use 4 or 6"),
    ],
)
def test_what_does_not_fit_the_processes_or_the_length(world_size: int, raw: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settled(world_size, **raw)


@pytest.mark.parametrize(
    ("run", "path"), [({}, "runs/run"), ({"name": "x"}, "runs/x"), ({"dir": "a/b"}, "a/b")]
)
def test_the_directory_of_a_run(run: dict[str, str], path: str) -> None:
    assert run_directory(parse(Config, {"run": run})) == Path(path)


@pytest.mark.parametrize("name", ["", "a/b", ".."])
def test_names_that_are_no_names(name: str) -> None:
    assert "run" in problems({"run": {"name": name}})


@pytest.mark.parametrize("root", [Config, Prepare])
def test_every_field_says_what_a_resume_does_and_what_it_means(root: type) -> None:
    rows = fields(root)
    assert len({(row.path, row.variant) for row in rows}) == len(rows) > 20
    for row in rows:
        assert row.on_resume in ("must_equal", "needs_override", "free"), row.path
        assert len(row.help) > 2, row.path


def test_the_defaults_of_every_section_pass_their_own_door() -> None:
    assert parse(Config, {}) == Config()
    assert parse(Config, plain(Config())) == Config()
    assert parse(Prepare, plain(Prepare())) == Prepare()


def test_a_resume_may_change_what_is_free() -> None:
    old = settled().config
    new = dataclasses.replace(old, evaluate=dataclasses.replace(old.evaluate, every=7))
    assert [(d.path, d.new) for d in check_resume(plain(old), new)] == [("evaluate.every", 7)]


def test_a_resume_may_change_what_it_names() -> None:
    old = settled().config
    changed = dataclasses.replace(old, optim=dataclasses.replace(old.optim, lr=1.0))
    with pytest.raises(
        ValueError, match=r"optim.lr was 0.0003 and is 1.0: it needs resume_override=\[optim.lr\]"
    ):
        check_resume(plain(old), changed)
    for names in (["optim.lr"], ["optim"]):
        named = dataclasses.replace(changed, resume_override=names)
        assert [d.path for d in check_resume(plain(old), named)] == ["optim.lr", "resume_override"]
    with pytest.raises(ValueError, match=r"optim\.lr"):
        check_resume(plain(old), dataclasses.replace(changed, resume_override=["optim.l"]))


def test_a_resume_never_changes_the_model() -> None:
    old = settled().config
    new = dataclasses.replace(
        old, model=dataclasses.replace(old.model, d_model=64), resume_override=["model.d_model"]
    )
    with pytest.raises(ValueError, match=r"model.d_model was \d+ and is 64: it cannot change"):
        check_resume(plain(old), new)


def test_all_ranks_must_be_started_alike() -> None:
    first = settled(2).config
    check_same(first, plain(first), rank=1)
    machine = dataclasses.replace(first, hardware=dataclasses.replace(first.hardware, threads=3))
    check_same(machine, plain(first), rank=1)
    other = dataclasses.replace(first, run=dataclasses.replace(first.run, dir="elsewhere"))
    with pytest.raises(ValueError, match=r"run\.dir is None on rank 0 and elsewhere on rank 1"):
        check_same(other, plain(first), rank=1)


def test_more_processes_alone_do_not_stand_in_the_way_of_a_resume() -> None:
    raw = {"micro_batch": 2, "global_batch": 8}
    old, new = settled(1, train=raw).config, settled(4, train=raw).config
    assert check_resume(plain(old), new) == []
    grown = settled(4, train={"micro_batch": 2, "accumulation": 4}).config
    with pytest.raises(ValueError, match=r"train\.global_batch was 8 and is 32"):
        check_resume(plain(old), grown)


def test_experts_are_split_whole_and_dense_widths_only_where_there_are_dense_layers() -> None:
    experts = {"kind": "routed", "n_experts": 6, "d_ff": 7, "shared_d_ff": 9}
    raw = {"model": {**MODEL, "feedforward": {"d_ff": 63}, "experts": experts}, "parallel": {"tp": 4}}
    assert list(problems(raw)) == ["model.experts.n_experts", "model.experts.shared_d_ff"]
    raw["model"]["experts"] = {**experts, "n_experts": 8, "shared_d_ff": 0}
    assert parse(Config, raw).parallel.tp == 4
    raw["model"]["experts"] = {**experts, "n_experts": 8, "shared_d_ff": 0, "dense_layers": [0]}
    assert list(problems(raw)) == ["model.feedforward.d_ff"]


def test_a_table_that_all_layers_share_stands_on_one_stage() -> None:
    raw = {"model": {**MODEL, "position": {"kind": "buckets"}}, "parallel": {"pp": 2}}
    assert "model.position.shared=false" in problems(raw)["parallel.pp"]
    raw["model"]["position"] = {"kind": "buckets", "shared": False}
    assert parse(Config, raw).parallel.pp == 2


def test_learned_positions_end_somewhere() -> None:
    raw = {
        "model": {**MODEL, "position": {"kind": "learned", "max_positions": 128}},
        "train": {"sequence_length": 129},
    }
    assert list(problems(raw)) == ["train.sequence_length"]
