"""The command line as a user meets it: what is printed, the exit codes, what is imported and written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conf.saved import read
from conf.schema import NO_DEFAULT, fields
from conf.typed import parse
from launcher import __main__ as command_line
from launcher.commands import COMMANDS
from launcher.config import Config, Prepare
from launcher.help import markdown_table, overview

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["train", "model=tiny", "train.steps=7"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What reaches the commands' functions; they are replaced, the working directory is empty."""
    reached: list[Any] = []
    module = ModuleType("launcher.run")
    module.train = lambda tree: reached.append(tree) or 0  # type: ignore[attr-defined]
    module.prepare = lambda tree: reached.append(tree) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "launcher.run", module)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    return reached


def test_a_command_gets_its_typed_root(calls: list[Any]) -> None:
    assert command_line.main([*SMALL, "optim.lr=1E-4", "schedule=wsd", "run.name=x"]) == 0
    assert command_line.main(["prepare", "data=shakespeare"]) == 0
    train, prepare = calls
    assert isinstance(train, Config) and isinstance(prepare, Prepare)
    assert (train.model.d_model, train.train.steps, train.optim.lr) == (128, 7, 0.0001)
    assert (train.schedule.kind, train.run.name, prepare.data.kind) == ("wsd", "x", "shakespeare")


def test_the_default_name_says_which_presets(calls: list[Any]) -> None:
    assert command_line.main(SMALL) == 0
    assert calls[0].run.name == "tiny-stdlib"


@pytest.mark.parametrize("argument", ["--local_rank=3", "--local-rank=3", "--local_rank=-1"])
def test_what_launchers_add_is_left_out(calls: list[Any], argument: str) -> None:
    assert command_line.main([argument, *SMALL]) == 0
    assert command_line.main([*SMALL, argument]) == 0
    assert len(calls) == 2


def test_the_exit_code_is_that_of_the_command(calls: list[Any]) -> None:
    sys.modules["launcher.run"].train = lambda tree: 1  # type: ignore[attr-defined]
    assert command_line.main(SMALL) == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "train.stpes=4"], "error on rank 0: train.stpes: no such key; the nearest is train.steps"),
        (["train", "lr=1"], "error on rank 0: lr: no such key; the nearest is optim.lr"),
        (["train", "train.steps=1.5"], "error on rank 0: train.steps: 1.5 is not a whole number or null"),
        (
            ["train", "model=tinny"],
            "error on rank 0: model=tinny: there is no such choice; the nearest is tiny",
        ),
        (
            ["prepare", "model.d_model=4"],
            "error on rank 0: model.d_model: no such key; at the top there are data, tokenizer, train, run",
        ),
        (
            ["trian"],
            "error on rank 0: there is no command 'trian'; the nearest is train (commands: train, prepare, ",
        ),
        (
            ["train", "--cgf", "job"],
            "error on rank 0: unrecognized arguments: --cgf; the nearest is --cfg; see python -m launcher",
        ),
        (
            ["train", "config=nothing.yaml"],
            "error on rank 0: nothing.yaml cannot be read: No such file or directory",
        ),
        (["train", "data=files"], "error on rank 0: data.paths must be given"),
        (["train", "--config-dir", "nowhere"], "error on rank 0: --config-dir nowhere is no directory"),
        (["train", "--config-name", "nothing"], "error on rank 0: Cannot find primary config 'nothing'"),
        (["train", "run.name=${oc.env:NOT_SET}"], "error on rank 0: "),
        (["train", "optim=[1]"], "error on rank 0: "),
    ],
)
def test_wrong_input_is_code_2_and_one_line(
    calls: list[Any], arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(line) and said.err.count("\n") == 1
    assert calls == [] and list(Path.cwd().iterdir()) == []


def test_several_errors_are_listed(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["train", "train.stpes=4", "optim.lr=fast"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "2 errors in the configuration: train.stpes, optim.lr",
        "  train.stpes: no such key; the nearest is train.steps",
        "  optim.lr: 'fast' is not a number such as 0.1 or 1e-4",
        "error on rank 0: 2 errors in the configuration: train.stpes, optim.lr",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {stpes: 3}", "train.stpes: no such key; the nearest is train.steps"),
        ("optim: {model: {d_model: 3}}", "optim.model: no such key; the nearest is model"),
        ("model: {attention: {n_head: 3}}", "model.attention.n_head: no such key; the nearest is"),
        (
            "data: {mixture: {a: {wieght: 1}}}",
            "data.mixture.a.wieght: no such key; the nearest is data.mixture.a",
        ),
        ("optim: {lr: fast}", "optim.lr: 'fast' is not a number"),
        ("optim: [1", "expected ',' or ']'"),
    ],
)
def test_wrong_files_are_code_2_and_name_the_file(
    calls: list[Any], text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("mine/experiment")
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text(f"# @package _global_\n{text}\n")
    assert command_line.main(["train", "experiment=own", "--config-dir", "mine"]) == 2
    error = capsys.readouterr().err
    assert message in error and "own.yaml" in error and "Traceback" not in error
    assert calls == []


def test_ones_own_presets_come_first(calls: list[Any]) -> None:
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/tiny.yaml").write_text("n_layers: 1\n")
    assert command_line.main([*SMALL, "--config-dir", "mine"]) == 0
    assert calls[0].model.n_layers == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_the_commands_are_listed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(arguments) == 0
    assert capsys.readouterr().out == overview() + "\n"
    assert re.search(r"\n  train +train a model", overview()) and re.search(r"\n  prepare +build", overview())


def test_the_help_of_a_command_lists_presets_and_keys(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert "\n  schedule = constant | cosine | linear | wsd\n" in said
    assert "\n  model/position = " in said
    assert "\n  optim.lr=0.0003  (float)\n      peak learning rate\n" in said
    assert "\n  schedule.decay_steps=null  (int | null) [kind=wsd]\n" in said
    assert calls == []


def test_the_table_of_keys_for_the_documentation() -> None:
    table = markdown_table(Config).splitlines()
    assert "| `optim.lr` | float | `0.0003` | needs_override | peak learning rate |" in table
    assert all(line.count("|") - line.count("\\|") == 6 for line in table)


def test_the_resolved_configuration_is_printed_and_comes_back(
    calls: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [
        *SMALL,
        "optim.lr=1e-5",
        "model.position.kind=none",
        "train.ramp=[{from_step: 0, global_batch: 4}]",
    ]
    assert command_line.main([*arguments, "--cfg", "job", "--resolve"]) == 0
    assert calls == []
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    assert "\n  lr: 1.0e-05\n" in file.read_text()
    assert command_line.main(arguments) == 0
    assert parse(Config, read(file)) == calls[0]
    assert command_line.main(["train", f"config={file}"]) == 0
    assert command_line.main(["train", f"config={tmp_path}"]) == 0
    assert calls[1] == calls[0] == calls[2]


def test_a_saved_configuration_serves_other_commands_and_takes_changes(
    calls: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    assert command_line.main([*SMALL, "data=shakespeare", "--cfg", "job", "--resolve"]) == 0
    file.write_text(capsys.readouterr().out)
    assert command_line.main(["prepare", f"config={file}"]) == 0
    assert command_line.main(["train", f"config={file}", "train.steps=9", "schedule=wsd", "run.name=b"]) == 0
    prepare, train = calls
    assert prepare.data.kind == "shakespeare"
    assert (train.model.d_model, train.train.steps, train.schedule.kind, train.run.name) == (
        128,
        9,
        "wsd",
        "b",
    )


def test_unresolved_configurations_show_their_interpolations(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main([*SMALL, "--cfg", "job"]) == 0
    assert "name: ${hydra:runtime.choices.model}-${hydra:runtime.choices.data}\n" in capsys.readouterr().out
    assert command_line.main([*SMALL, "--cfg", "hydra"]) == 0
    assert "chdir: false" in capsys.readouterr().out


def test_a_sweep_gives_every_run_its_directory(calls: list[Any]) -> None:
    assert command_line.main([*SMALL, "-m", "optim.lr=1e-3,1e-4", "schedule=cosine,wsd"]) == 0
    assert [(t.optim.lr, t.schedule.kind, t.run.name) for t in calls] == [
        (0.001, "cosine", "tiny-stdlib-0"),
        (0.001, "wsd", "tiny-stdlib-1"),
        (0.0001, "cosine", "tiny-stdlib-2"),
        (0.0001, "wsd", "tiny-stdlib-3"),
    ]
    assert [path.name for path in Path.cwd().iterdir()] == ["runs"]


def test_hydras_own_settings_may_be_changed(calls: list[Any]) -> None:
    arguments = [*SMALL, "-m", "optim.lr=1,2", "hydra.sweep.dir=sweeps", "hydra/hydra_logging=none"]
    assert command_line.main(arguments) == 0
    assert len(calls) == 2
    assert [path.name for path in Path.cwd().iterdir()] == ["sweeps"]


def test_a_sweep_with_one_wrong_member_runs_nothing(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main([*SMALL, "-m", "train.micro_batch=1,1.5"]) == 2
    assert "train.micro_batch: 1.5 is not a whole number or null" in capsys.readouterr().err
    assert calls == []


def test_a_sweep_is_for_one_process(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert command_line.main([*SMALL, "-m", "optim.lr=1,2"]) == 2
    assert capsys.readouterr().err.startswith("error on rank 1: -m runs one process at a time")


def test_torchelastic_gets_the_error(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "elastic.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert command_line.main(["train", "optim.lrr=1"]) == 2
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "error on rank 0: optim.lrr: no such key; the nearest is optim.lr"


def test_every_command_names_what_there_is() -> None:
    for name, command in COMMANDS.items():
        assert command.name == name
        root = command.load_root()
        needed = {
            row.path: ["x"] if row.type.startswith("list") else "x"
            for row in fields(root)
            if row.default is NO_DEFAULT and row.path in root.__annotations__
        }
        assert parse(root, needed) is not None
        module, _, function = command.function.partition(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}(" in source


def run(*arguments: str, cwd: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    command = [sys.executable, *(["-c", code] if code else ["-m", "launcher"]), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_the_module_is_the_command(tmp_path: Path) -> None:
    ended = run("train", "train.stpes=4", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error on rank 0: train.stpes: no such key; the nearest is train.steps\n"
    assert list(tmp_path.iterdir()) == []


def test_asking_costs_no_heavy_import(tmp_path: Path) -> None:
    code = (
        "import sys; from launcher.__main__ import main; "
        "codes = [main([]), main(['trian']), main(['train', '--cgf'])]; "
        "print(codes, [name for name in ('torch', 'deepspeed', 'hydra') if name in sys.modules])"
    )
    assert run(cwd=tmp_path, code=code).stdout.splitlines()[-1] == "[0, 2, 2] []"


def test_a_wrong_key_costs_no_deepspeed(tmp_path: Path) -> None:
    code = (
        "import sys; from launcher.__main__ import main; "
        "print(main(['train', 'train.stpes=4']), 'deepspeed' in sys.modules, 'datasets' in sys.modules)"
    )
    assert run(cwd=tmp_path, code=code).stdout == "2 False False\n"


def test_the_ranks_of_a_launcher_reach_the_command(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2"}.items():
        monkeypatch.setenv(name, value)
    assert command_line.main(["train", "optim.lrr=1"]) == 2
    assert capsys.readouterr().err.startswith("error on rank 2: optim.lrr")
    assert calls == []
