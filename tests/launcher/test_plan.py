"""The planner's figures against formulas and published numbers, and its command as a user meets it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conf.compose import Composer
from conf.typed import InvalidConfiguration, parse
from launcher import __main__ as command_line
from launcher.config import Config
from launcher.hardware import Hardware, known_peak, peak_flops
from launcher.plan import published
from launcher.plan.advice import (
    active_parameters,
    budget_tokens,
    comments,
    decode_intensity,
    prefill_intensity,
)
from launcher.plan.command import Plan, compared, machines
from launcher.plan.layout import Layout
from launcher.plan.search import Planner, Wanted, modes
from launcher.plan.timing import Timing, group_bandwidth, ring_seconds
from launcher.plan.work import block_work, head_work
from megamodel.accounting import cache_bytes, flops_per_token, parameter_count
from megamodel.config import Model

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def composed(*overrides: str) -> Plan:
    composer = Composer(Plan, "plan")
    request = composer.request(list(overrides))
    return composer.typed(composer.compose(request.overrides), request.problems)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert command_line.main(["plan", *arguments, "format=json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama1_7b", 6_738_415_616),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("mistral_7b", 7_241_732_096),
        ("mixtral_8x7b", 46_702_792_704),
    ],
)
def test_parameters_are_exact(model: str, parameters: int) -> None:
    assert parameter_count(composed(f"model={model}").model) == parameters


def test_mixtral_uses_a_fourth_of_its_experts() -> None:
    """12.9B active (Jiang et al. 2024); 20 tokens for each."""
    model = composed("model=mixtral_8x7b").model
    assert active_parameters(model) == 12_879_925_248
    assert budget_tokens(model) == 20 * 12_879_925_248


@pytest.mark.parametrize(
    ("model", "heads", "length", "number_bytes", "expected"),
    [
        ("llama2_70b", 64, 4096, 4, 20 * GIB),
        ("llama2_70b", 64, 4096, 2, 10 * GIB),
        ("llama2_70b", 8, 4096, 4, 5 * GIB // 2),
        ("llama2_70b", 8, 4096, 2, 5 * GIB // 4),
        ("llama2_7b", 32, 4096, 2, 2 * GIB),
        ("llama2_7b", 8, 4096, 2, GIB // 2),
        ("llama2_7b", 1, 4096, 2, GIB // 16),
    ],
)
def test_cache_to_the_byte(model: str, heads: int, length: int, number_bytes: int, expected: int) -> None:
    """2 K E numbers a token and layer; some teaching material prints 512 MB and 4 GB for two of these."""
    settings = composed(f"model={model}", f"model.attention.n_kv_heads={heads}").model
    assert cache_bytes(settings, rows=1, length=length, number_bytes=number_bytes) == expected


@pytest.mark.parametrize(("heads", "expected"), [(8, 48 << 20), (32, 192 << 20)])
def test_cache_of_twelve_layers(heads: int, expected: int) -> None:
    attention = {"n_heads": 32, "n_kv_heads": heads, "head_width": 64}
    settings = parse(Model, {"n_layers": 12, "attention": attention})
    assert cache_bytes(settings, rows=1, length=2048, number_bytes=2) == expected


def test_a_window_bounds_the_cache() -> None:
    settings = composed("model=mistral_7b").model
    assert cache_bytes(settings, rows=1, length=32768, number_bytes=2) == 32 * 4096 * 2 * 8 * 128 * 2


def test_intensities() -> None:
    """T about D: the first term is 1 / E with scores in memory, 1 / D without; decoding T K / (D H)."""
    width, heads, length, rows = 4096, 32, 4096, 8
    head_width = width // heads
    shared = {"width": width, "heads": heads, "length": length, "rows": rows}
    assert prefill_intensity(**shared, fused=False) == pytest.approx(
        1 / (1 / head_width + 1 / (rows * length))
    )
    assert prefill_intensity(**shared, fused=True) == pytest.approx(1 / (1 / width + 1 / (rows * length)))
    many, few = (composed("model=llama2_7b", f"model.attention.n_kv_heads={n}").model for n in (heads, 8))
    assert decode_intensity(many, length=length, rows=rows) == pytest.approx(1 / (length / width + 1 / rows))
    assert decode_intensity(few, length=length, rows=rows) == pytest.approx(1 / (1 / 4 + 1 / rows))


def test_what_leaves_the_consensus_is_marked() -> None:
    def broken(*overrides: str) -> set[str]:
        tree = composed(*overrides)
        return {comment.rule for comment in comments(tree.model, tree.optim) if not comment.kept}

    assert broken("model=llama3_70b") == set()
    assert broken("model=llama3_70b", "model.feedforward.d_ff=524288") == {"d_ff / width"}
    assert broken("model=llama3_70b", "model.n_layers=20", "optim.weight_decay=0") == {
        "width / layers",
        "weight decay",
    }
    assert "dropout" in broken("model=gpt2", "train.sequence_length=1024")
    assert "active / all experts" not in broken("model=deepseek_v3")


@pytest.mark.parametrize("model", ["llama3_8b", "gpt3_175b", "mixtral_8x7b", "deepseek_v2_lite", "gemma2_9b"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_work_of_all_ranks_is_the_model_s(model: str, tp: int) -> None:
    """Sums over layers and ranks against the accounting, which other tests hold against torch's counter."""
    settings, length = composed(f"model={model}", "train.sequence_length=1024").model, 1024
    expected = flops_per_token(settings, length)
    works = [block_work(settings, own, length=length, tp=tp) for own in settings.layers]
    products = tp * sum(work.product_flops for work in works)
    router = tp - 1  # every rank has the whole router
    extra = sum(
        2 * settings.d_model * own.experts.n_experts * router for own in settings.layers if own.experts
    )
    assert products - extra == pytest.approx(expected.projections + expected.feedforward, rel=2e-3)
    assert tp * sum(work.attention_flops for work in works) == pytest.approx(expected.attention)
    assert tp * head_work(settings, tp=tp).product_flops == pytest.approx(expected.head, rel=2e-3)


def test_published_speeds_are_predicted() -> None:
    """Median error at most 15 %, none above 35 %; those held out as well."""
    rows = compared(published.FILE)
    found = published.summary(rows)
    assert len(rows) == 14 and sum(not row.fitted for row in rows) == 9
    assert found.median <= 0.15 and found.worst <= 0.35
    assert found.median_held_out <= 0.15 and found.worst_held_out <= 0.35


def test_published_conventions_by_hand() -> None:
    """The source's own figure for 175B: 451 s in batches of 1536 sequences is 140 TFLOP/s on 1024 GPUs."""
    attention = {"n_heads": 96, "n_kv_heads": 96, "head_width": 128}
    raw = {"vocab_size": 51200, "d_model": 12288, "n_layers": 96, "attention": attention}
    model = parse(Model, raw | {"feedforward": {"d_ff": 49152, "gated": False}})
    cost = published.CONVENTIONS["n21_hardware_full_attention"](model, 2048)
    by_hand = 96 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288)) / 2048
    assert cost == pytest.approx(by_hand)
    causal, whole = (published.CONVENTIONS[n](model, 2048) for n in ("model", "model_full_attention"))
    assert whole - causal == pytest.approx(3 * 2 * 96 * 2048 * 12288)
    # Four passes of products and attention for three: the head is not computed again.
    head = 6 * 51200 * 12288
    assert cost == pytest.approx((whole - head) * 4 / 3 + head, rel=1e-6)


def test_rings() -> None:
    """(n - 1) / n of the bytes at the link's rate; eight neighbours in a node have eight adapters."""
    machine = composed("hardware=h100").hardware.machine
    assert machine is not None
    assert group_bandwidth(machine, 8, in_node=8) == 450e9 * 0.75
    assert group_bandwidth(machine, 64, in_node=1) == 50e9 * 0.75
    assert group_bandwidth(machine, 64, in_node=8) == 400e9 * 0.75
    gathered = ring_seconds(machine, 8e9, 8, in_node=8)
    assert gathered == pytest.approx(7 / 8 * 8e9 / (450e9 * 0.75), rel=1e-3)
    assert ring_seconds(machine, 8e9, 8, in_node=8, passes=2) == pytest.approx(2 * gathered, rel=1e-3)
    assert ring_seconds(machine, 8e9, 1, in_node=1) == 0


def test_the_bubble_of_a_step_is_the_formula() -> None:
    """Equal stages: (pp - 1) / (m + pp - 1) of the pipeline's time; interleaved, over chunks."""
    tree = composed("model=llama3_70b", "model.vocab_size=512")
    assert tree.hardware.machine is not None
    timing = Timing(tree.model, tree.hardware.machine, 4096)
    for chunks in (1, 5):
        layout = Layout(tp=8, pp=4, dp=1, accumulation=16, chunks=chunks, stage_layers=(20,) * 4)
        time_ = timing.step(layout, [1.0] * 4)
        pipeline = time_.compute + time_.tensor + time_.bubble
        assert time_.bubble / pipeline == pytest.approx(3 / (16 * chunks + 3), rel=0.02)


def test_sums_over_dp_hide_behind_backward_unless_they_wait_for_it() -> None:
    """Half of the data-parallel traffic, at most half of a micro-batch's time."""
    tree = composed("model=llama3_8b", "hardware=h100")
    assert tree.hardware.machine is not None
    timing = Timing(tree.model, tree.hardware.machine, 4096)
    early, late = (
        timing.step(Layout(tp=8, dp=8, accumulation=4, overlaps=overlaps), [1e9])
        for overlaps in (True, False)
    )
    assert late.hidden == 0 and late.data > 0
    assert early.data + early.hidden == pytest.approx(late.data)
    assert early.hidden == pytest.approx(min(late.data, early.compute / 4) / 2)


def test_every_layout_that_is_proposed_passes_the_door_of_training() -> None:
    """And every one that training accepts of those tried is proposed."""
    tree = composed("model=tiny", "train.sequence_length=96", "train.global_batch=24")
    assert tree.hardware.machine is not None
    planner = Planner(
        tree.model,
        tree.hardware.machine,
        tree.train,
        tree.checkpoint,
        gpus=12,
        precision="bf16",
        documents=False,
        on_cpu=False,
    )
    proposed = {(x.tp, x.pp, x.sequence_parallel) for x in planner.layouts(Wanted())}
    accepted = set()
    for tp in (1, 2, 3, 4, 6, 12):
        for pp in (1, 2, 3, 4, 6, 12):
            for sequence in (False, True):
                split = {"tp": tp, "pp": pp, "sequence_parallel": sequence}
                raw = {"vocab_size": 2048, "d_model": 128, "n_layers": 4, "feedforward": {"d_ff": 352}}
                attention = {"n_heads": 4, "n_kv_heads": 2, "head_width": 32}
                train = {"sequence_length": 96, "global_batch": 24, "micro_batch": 1}
                try:
                    parse(
                        Config, {"model": {**raw, "attention": attention}, "parallel": split, "train": train}
                    )
                except InvalidConfiguration:
                    continue
                if 12 % (tp * pp) == 0:
                    accepted.add((tp, pp, sequence))
    assert proposed == accepted and len(proposed) > 8


def test_what_is_given_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("parallel.tp=4", "parallel.pp=2", "train.micro_batch=2", "parallel.recompute=block")
    found = planned(capsys, "model=llama3_8b", "gpus=16", *given, "parallel.sequence_parallel=true")
    (only,) = found["best"]
    layout = only["layout"]
    assert (layout["tp"], layout["pp"], layout["dp"], layout["micro_batch"]) == (4, 2, 2, 2)
    assert layout["sequence_parallel"] and layout["recompute"] == "block" and found["layouts_tried"] == 1
    assert len(only["stages"]) == 2 and only["fits"]
    assert only["step_seconds"] == pytest.approx(
        sum(v for k, v in only["seconds"].items() if k != "data_parallel_hidden")
    )


def test_tokens_time_and_money_follow_from_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(
        capsys, "model=llama3_8b", "gpus=64", "tokens=15e12", "hardware.machine.price_per_gpu_hour=2"
    )
    speed, cost = found["best"][0]["tokens_per_second"], found["cost"]
    assert cost["tokens"] == 15e12
    assert cost["days"] == pytest.approx(15e12 / speed / 86400)
    assert cost["gpu_hours"] == pytest.approx(15e12 / speed / 3600 * 64)
    assert cost["money"] == pytest.approx(2 * cost["gpu_hours"])
    mfu = speed * found["flops_per_token"]["training"] / (64 * 989.4e12)
    assert found["best"][0]["mfu"] == pytest.approx(mfu) and 0.2 < mfu < 0.6


def test_what_does_not_fit_says_by_how_much_and_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "model=llama3_405b", "gpus=64", "parallel.tp=8", "parallel.pp=8")
    (best, *_) = found["best"]
    assert not best["fits"]
    largest = max(stage["total"] for stage in best["stages"])
    assert best["short_bytes"] == pytest.approx(largest - 80e9)
    assert best["verdict"].startswith("does not fit: short by") and "raise parallel." in best["verdict"]
    assert best["layout"]["recompute"] == "block", "the one that misses least comes first"


@pytest.mark.parametrize("gpus", [1, 8, 1000, 100_000])
def test_any_number_of_gpus(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "model=llama3_8b", f"gpus={gpus}")
    assert found["best"] and all(best["layout"]["gpus"] == gpus for best in found["best"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpus=7", "parallel.tp=2"], "7 processes cannot be split into parallel.tp (2) x parallel.pp (1)"),
        (["gpus=8", "parallel.tp=3"], "8 processes cannot be split into parallel.tp (3)"),
        (["gpus=24", "parallel.tp=3"], "n_heads (32) must be divisible by parallel.tp (3)"),
        (["gpus=64", "parallel.pp=64"], "parallel.pp (64) is more than model.n_layers (32)"),
        (["parallel.sequence_parallel=true", "parallel.tp=1"], "needs parallel.tp of 2 or more"),
        (["gpus=12"], "gpus (12) must be whole nodes of 8"),
        (["gpus=0"], "must be positive"),
        (["hardware=h1000"], "hardware=h1000: there is no such choice; the nearest is h100"),
        (["hardware=auto"], "says nothing of the machine to plan for; use hardware=a100, b200, h100"),
        (["train.global_batch=9", "train.micro_batch=2"], "must be a multiple of train.micro_batch (2)"),
        (["parallel.recompute=selective"], "is not one that training has; use none or attention or block"),
        (["parallel.tp=0"], "must be at least 1, or null"),
        (["picture=x.gif"], "must end in .png, .svg or .html"),
        (["picture=nowhere/x.png", "parallel.pp=2"], "nowhere/x.png cannot be written"),
        (["tokens=-1"], "tokens (-1.0) must be above 0"),
        (["model=gpt2", "train.sequence_length=4096"], "learned positions end there"),
        (["published_file=nowhere.csv"], "published_file=nowhere.csv cannot be read"),
    ],
)
def test_wrong_input_is_one_clear_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if message.endswith("use none or block") and modes() != ["none", "block"]:
        message = "is not one that training has"
    base = [] if arguments[0].startswith("model=") else ["model=llama3_8b"]
    assert command_line.main(["plan", *base, *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.out == "" and "Traceback" not in said.err
    assert said.err.count("error:") == 1


def test_text_for_people_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "t.png"
    line = ["plan", "model=llama3_8b", "gpus=16", "parallel.tp=2", "parallel.pp=4", f"picture={picture}"]
    assert command_line.main(line) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in ("8.03B parameters", "fits, with", "MFU", "GPU-hours", "Hoffmann", "GiB in 16 bit"):
        assert part in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_of_the_documentation_is_what_the_command_prints() -> None:
    from launcher.plan.show import published_text

    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert published_text(compared(published.FILE)) in page


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "l40s", "mi300x"])
def test_one_peak_for_training_and_planning(name: str) -> None:
    names = {
        "a100": "NVIDIA A100-SXM4-80GB",
        "h100": "NVIDIA H100 80GB HBM3",
        "h200": "NVIDIA H200",
        "b200": "NVIDIA B200",
        "l40s": "NVIDIA L40S",
        "mi300x": "AMD Instinct MI300X",
    }
    hardware = composed(f"hardware={name}").hardware
    assert peak_flops(hardware, "unknown", "bf16") == known_peak(names[name], "bf16")
    assert peak_flops(parse(Hardware, {}), "unknown", "bf16") is None
    assert name in machines()


def test_a_machine_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hardware").mkdir()
    text = (ROOT / "conf" / "hardware" / "h100.yaml").read_text().replace("80e9", "160e9")
    (tmp_path / "hardware" / "mine.yaml").write_text(text)
    found = planned(capsys, "model=llama3_8b", "gpus=8", "hardware=mine", "--config-dir", str(tmp_path))
    assert found["hardware"]["memory_bytes"] == 160e9


def test_a_cpu_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "model=tiny", "hardware=cpu", "gpus=1", "train.sequence_length=128")
    assert found["hardware"]["name"].startswith("this CPU") and found["precision"] == "fp32"
    assert found["hardware"]["fp32_flops"] > 1e8 and found["best"][0]["tokens_per_second"] > 0


def test_the_largest_model_without_weights_or_process_groups() -> None:
    """A fresh process: no distributed backend is begun, no gigabyte is touched."""
    code = (
        "import resource, sys\n"
        "from launcher.__main__ import main\n"
        "code = main(['plan', 'model=llama3_405b', 'gpus=16384', 'format=json'])\n"
        "import torch.distributed as dist\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(code, dist.is_initialized(), peak < 1_500_000, 'deepspeed' in sys.modules, file=sys.stderr)\n"
    )
    start = time.process_time()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stderr.split() == ["0", "False", "True", "False"], (done.stderr, time.process_time() - start)


def test_the_configuration_of_a_run_is_planned_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `train` has settled is given: nothing is searched; the keys of both commands agree."""
    given = ["parallel.tp=4", "parallel.pp=2", "train.micro_batch=2", "train.global_batch=64"]
    line = ["train", "model=llama3_8b", *given, "--cfg", "job", "--resolve"]
    assert command_line.main(line) == 0
    saved = tmp_path / "config.yaml"
    saved.write_text(capsys.readouterr().out)
    found = planned(capsys, f"config={saved}", "gpus=16", "hardware=h100")
    layout = found["best"][0]["layout"]
    assert found["layouts_tried"] == 1 and found["sequence_length"] == 256
    assert (layout["tp"], layout["pp"], layout["dp"], layout["accumulation"]) == (4, 2, 2, 16)


@pytest.mark.parametrize("kind", ["interleaved", "zero_bubble", "dualpipev"])
def test_other_schedules_are_drawn(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "t.svg"
    planned(capsys, "gpus=8", "model=llama3_8b", "parallel.pp=4", f"timeline={kind}", f"picture={picture}")
    assert f">{kind}: 4 stages, 16 micro-batches" in picture.read_text()
