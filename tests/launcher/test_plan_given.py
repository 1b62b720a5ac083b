"""What a plan takes for given and what it chooses: batches, lengths, machines; figures worked out by hand."""

from pathlib import Path

import pytest

from conf.compose import Composer
from conf.typed import InvalidConfiguration, parse
from launcher import __main__ as command_line
from launcher.hardware import Machine
from launcher.plan.advice import active_parameters, comments, decode_intensity
from launcher.plan.command import Plan, PlannedSplit, made, step_tokens
from launcher.report.outlook import tree_of
from launcher.report.reading import Record
from launcher.sections import Train
from parallel.config import Parallel


def composed(*overrides: str) -> Plan:
    composer = Composer(Plan, "plan")
    request = composer.request(list(overrides))
    return composer.typed(composer.compose(request.overrides), request.problems)


@pytest.mark.parametrize(
    ("arguments", "sequences"),
    [
        (("gpus=8",), 1024),  # 4M / 4096 = 976.6 = 7.6 x 128
        (("gpus=24",), 960),  # 5.1 x 24 x 8
        (("gpus=512",), 1024),  # 1.9 x 512
        (("gpus=4000",), 4000),  # one for each, so that dp may be all of them
        (("gpus=8", "train.micro_batch=3"), 960),  # 5.1 x 8 x 3 x 8
        (("gpus=8", "train.sequence_length=8192"), 512),  # 488.3 = 7.6 x 64
    ],
)
def test_the_batch_that_is_chosen_can_be_split(arguments: tuple[str, ...], sequences: int) -> None:
    tree = composed("model=tiny", *arguments, "parallel.tp=1", "parallel.pp=1")
    found = made(tree).found
    assert {x.layout.global_batch for x in found} == {sequences}
    assert {x.layout.dp for x in found} == {tree.gpus}


def test_no_split_is_lost_to_a_batch_that_nothing_divides() -> None:
    """With 977 sequences the best of 8 GPUs had one replica; with 1024 it is that of a given 1024."""
    chosen, given = (
        made(composed("model=llama3_8b", "gpus=8", *more)).winner
        for more in ((), ("train.global_batch=1024",))
    )
    assert chosen == given
    assert (chosen.layout.tp, chosen.layout.pp, chosen.layout.dp) == (1, 2, 4)


@pytest.mark.parametrize(
    ("model", "length", "rows", "expected"),
    [
        ("deepseek_v3", 4096, 1, 1 / (4096 * 576 / (2 * 7168**2) + 1)),  # 0.9776: 512 + 64 are remembered
        ("mistral_7b", 131072, 64, 1 / (4096 * 8 / (4096 * 32) + 1 / 64)),  # 3.765: its window is 4096
        ("mistral_7b", 1024, 64, 1 / (1024 * 8 / (4096 * 32) + 1 / 64)),  # 12.8
        # 2,880 wide, 64 heads, 8 for keys; every other layer sees 128: (128 + 4096) / 2 on average
        ("gpt_oss_20b", 4096, 1, 1 / (2112 * 8 / (2880 * 64) + 1)),
    ],
)
def test_writing_reads_what_is_remembered(model: str, length: int, rows: int, expected: float) -> None:
    settings = composed(f"model={model}").model
    assert decode_intensity(settings, length=length, rows=rows) == pytest.approx(expected)


def test_biases_of_idle_experts_are_not_active() -> None:
    """20,914,757,184 less 24 layers x 28 experts x (3 x 2880^2 + 3 x 2880)."""
    assert active_parameters(composed("model=gpt_oss_20b").model) == 20_914_757_184 - 24 * 28 * 24_891_840
    assert 20_914_757_184 - 24 * 28 * 24_891_840 == 4_187_440_704


@pytest.mark.parametrize(
    ("model", "kept"), [("deepseek_v3", True), ("gpt_oss_20b", True), ("mixtral_8x7b", False)]
)
def test_many_small_experts_are_usual(model: str, kept: bool) -> None:
    """8 of 256, 4 of 32, 2 of 8."""
    tree = composed(f"model={model}")
    (comment,) = [c for c in comments(tree.model, tree.optim) if c.rule == "active / all experts"]
    assert comment.kept == kept and comment.usual == "0.03 to 0.125"


def test_steps_are_priced() -> None:
    tree = composed("model=tiny", "gpus=8", "train.steps=10", "train.global_batch=1024")
    report = made(tree)
    assert (report.cost.tokens, report.cost.why) == (10 * 1024 * 4096, "train.steps")
    assert report.cost.days == pytest.approx(10 * report.winner.time.total / 86400)


def test_steps_of_a_ramp_are_priced_as_they_are() -> None:
    """4 updates of 8, then 6 of 16 sequences; of 3 steps none of 16."""
    ramp = [{"from_step": 0, "global_batch": 8}, {"from_step": 4, "global_batch": 16}]
    train = parse(Train, {"sequence_length": 32, "ramp": ramp})
    assert step_tokens(train, 10, 16) == (4 * 8 + 6 * 16) * 32
    assert step_tokens(train, 3, 16) == 3 * 8 * 32


@pytest.mark.parametrize("value", [0, -1])
def test_recomputing_every_0th_block_is_refused(value: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", "model=tiny", f"parallel.recompute_every={value}"]) == 2
    assert f"parallel.recompute_every ({value}) must be at least 1" in capsys.readouterr().err
    assert parse(PlannedSplit, {"recompute_every": 2}).recompute_every == 2


def test_what_is_searched_is_what_training_accepts() -> None:
    """Every second block of none is refused there."""
    given = ("parallel.recompute_every=2", "parallel.tp=1", "parallel.pp=1", "gpus=1")
    layouts = [x.layout for x in made(composed("model=tiny", "hardware=h100", *given)).found]
    modes = {(layout.recompute, layout.recompute_every) for layout in layouts}
    assert modes == {("none", 1), ("block", 2), ("attention", 2)}


def test_a_bucket_of_less_than_nothing_is_refused_and_the_defaults_are_those_of_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["plan", "model=tiny", "parallel.bucket_bytes=-1"]) == 2
    assert "parallel.bucket_bytes (-1) must be at least 0" in capsys.readouterr().err
    planned, trained = parse(PlannedSplit, {}), parse(Parallel, {})
    shared = {"bucket_bytes", "recompute_every", "stage_layers"}
    assert all(getattr(planned, name) == getattr(trained, name) for name in shared)


@pytest.mark.parametrize(
    "name",
    [
        "bf16_flops",
        "fp32_flops",
        "memory_bytes",
        "memory_bytes_per_second",
        "node_bytes_per_second",
        "network_bytes_per_second",
    ],
)
def test_a_machine_without_speed_or_memory_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", "model=tiny", f"hardware.machine.{name}=0"]) == 2
    assert f"hardware.machine.{name} (0.0) must be above 0" in capsys.readouterr().err


def test_a_machine_may_cost_nothing_but_not_less() -> None:
    assert made(composed("model=tiny", "hardware.machine.price_per_gpu_hour=0")).cost.money == 0
    with pytest.raises(InvalidConfiguration, match="price_per_gpu_hour"):
        composed("hardware.machine.price_per_gpu_hour=-1")
    with pytest.raises(InvalidConfiguration, match="node_gpus"):
        composed("hardware.machine.node_gpus=0")


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        (("model=gpt3_175b",), 2048),
        (("model=gpt2",), 1024),
        (("model=opt_6b7",), 2048),
        (("model=llama3_8b",), 4096),
        (("model=gpt2", "train.sequence_length=512"), 512),
        (("model=gpt2", "model.position.max_positions=8192"), 8192),
    ],
)
def test_sequences_are_as_long_as_learned_positions_reach(arguments: tuple[str, ...], length: int) -> None:
    assert composed(*arguments).train.sequence_length == length


def test_a_saved_run_of_one_process_is_planned_for_eight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its 4 sequences do not go round; the error says how they are chosen anew, and that works."""
    given = ["model=tiny", "train.micro_batch=4", "train.global_batch=4", "--cfg", "job", "--resolve"]
    assert command_line.main(["train", *given]) == 0
    saved = tmp_path / "config.yaml"
    saved.write_text(capsys.readouterr().out)
    line = ["plan", f"config={saved}", "gpus=8", "hardware=h100"]
    assert command_line.main(line) == 2
    said = capsys.readouterr().err
    way_out = "train.micro_batch=null train.global_batch=null"
    assert "must be a multiple of train.micro_batch (4) x data-parallel ranks (8) = 32; use 32" in said
    assert way_out in said
    assert command_line.main([*line, *way_out.split(), "format=json"]) == 0


def test_a_report_plans_what_the_run_had() -> None:
    machine = composed("hardware=h100").hardware.machine
    assert isinstance(machine, Machine)
    settings = {
        "kernels": {"head": "whole"},
        "parallel": {"tp": 1, "pp": 1, "recompute": "block", "recompute_every": 2},
        "train": {"steps": 10, "global_batch": 8, "micro_batch": 8, "sequence_length": 128},
    }
    tree = tree_of(Record(Path(), settings, []), machine, 1, on_cpu=False)
    assert tree.kernels.head == "whole" and tree.parallel.recompute_every == 2
    (only,) = {str(x.layout) for x in made(tree).found}
    assert only.endswith("recompute block, every 2")
