"""What launch prints: read back by the shell, by YAML, by torchrun's own parser; and what it refuses."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from launcher.__main__ import main
from launcher.clusters import SIGNALS, Kubernetes, Slurm, Torchrun, Volume, time_limit
from launcher.launch import own
from launcher.manifests import literal, manifest, object_name, yaml_lines
from launcher.scripts import Work, deepspeed_env, for_pdsh, sbatch, torchrun, unset_only

STRANGE = (
    "sample.prompt='it is'",
    'data.paths=[/a b/*.zst,"c"]',
    "run.name=x$HOME`ls`${y}$(z)",
    "a=\\back\\\\slash!#~&;|<>()*?",
    "run.dir=é/ü 100%",
)


def work(**values: Any) -> Work:
    given = {"name": "my run", "directory": Path("/runs/my run"), "here": Path("/a 'b"), "arguments": STRANGE}
    return Work(**{**given, "nodes": 2, "per_node": 8, **values})


def said_by_shell(script: str, word: str) -> list[list[str]]:
    """The arguments of each call of the program `word` in a script, as bash hands them over."""
    spy = f'{word}() {{ printf "%s\\0" "$@"; printf "\\n"; }}\nscontrol() {{ echo head; }}\n'
    done = subprocess.run(
        ["bash", "-c", spy + script], capture_output=True, env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    )
    return [
        line.decode().split("\0")[:-1] for line in done.stdout.split(b"\0\n")[:-1] for line in [line + b"\0"]
    ]


def parsed(command: list[str]) -> Any:
    """A torchrun command as torchrun reads it."""
    at = command.index("torch.distributed.run")
    return get_args_parser().parse_args(command[at + 1 :])


def test_the_script_is_bash_and_every_argument_arrives_as_it_was_written(tmp_path: Path) -> None:
    environment = {"NAME": "a b'c$d", "SET": "x"}
    cluster = Slurm(environment=environment, prologue=["set -e", "true"], time="1:00:00")
    text = sbatch(work(here=tmp_path), cluster, "/py thon", "made by\nme", preflight=True)
    file = tmp_path / "script"
    file.write_text(text)
    assert subprocess.run(["bash", "-n", str(file)], capture_output=True).stderr == b""
    calls = said_by_shell(text.replace("$SLURM_JOB_NODELIST", "n[1-2]"), "srun")
    doctor, train = (call[call.index("/py thon") :] for call in calls)
    for call, name in ((doctor, "doctor"), (train, "train")):
        read = parsed(call)
        assert (read.training_script, read.training_script_args) == ("launcher", [name, *STRANGE])
        assert (read.nnodes, read.nproc_per_node, read.rdzv_endpoint) == ("2", "8", "head:29500")
        assert (read.rdzv_id, read.signals_to_handle, read.shutdown_timeout) == ("7-0", SIGNALS, 300)


def test_the_directives_are_what_the_settings_say() -> None:
    cluster = Slurm(partition="a b", account="x", time="2:00:00", signal_seconds=900, cpus_per_task=12)
    text = sbatch(work(directory=Path("/r/100%")), cluster, "python", "", preflight=False)
    directives = [line.partition(" ")[2] for line in text.splitlines() if line.startswith("#SBATCH")]
    expected = ["--job-name=my-run", "--nodes=2", "--ntasks-per-node=1", "--partition='a b'", "--account=x"]
    expected += ["--time=2:00:00", "--cpus-per-task=12", "--output='/r/100%%/slurm-%j.log'"]
    expected += ["--open-mode=append", "--signal=USR1@900", "--gpus-per-node=8", "--requeue"]
    assert [line.replace("--output=/r/100%%/slurm-%j.log", expected[7]) for line in directives] == expected
    assert "#SBATCH" not in text.partition("\n\n")[2]  # Slurm reads them only before the first command
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=12 " in text
    for gpus, line in (("gres", "#SBATCH --gres=gpu:8"), ("none", None)):
        text = sbatch(work(), Slurm(gpus=gpus), "python", "", preflight=False)  # type: ignore[arg-type]
        assert "--gpus-per-node" not in text and (line is None or line in text)


def test_a_variable_that_is_set_stays() -> None:
    script = "\n".join([*unset_only({"A": "new a", "B": "new b", "C": ""}), 'echo "$A|$B|${C-none}"'])
    done = subprocess.run(["bash", "-c", script], env={"A": "old"}, capture_output=True, text=True)
    assert done.stdout == "old|new b|\n"
    done = subprocess.run(["bash", "-c", script], env={"A": "", "C": "c"}, capture_output=True, text=True)
    assert done.stdout == "|new b|c\n"


@pytest.mark.parametrize("argument", [*STRANGE, 'a="b c" $d `e` \\f', "plain=1"])
def test_pdsh_hands_an_argument_on_as_it_is(argument: str) -> None:
    from deepspeed.launcher.multinode_runner import PDSHRunner

    runner = PDSHRunner.__new__(PDSHRunner)
    runner.args = type("Args", (), {"user_args": [for_pdsh(argument)]})()
    (there,) = runner.parse_user_args()
    done = subprocess.run(["bash", "-c", f"printf %s {there}"], capture_output=True, text=True)
    assert done.stdout == argument


@pytest.mark.parametrize("value", ["plain", "", "x y", 'it\'s "q" $HOME `ls` \\n a\\', " edges ", "a;b&c|d"])
def test_deepspeed_hands_a_variable_on_as_it_is(value: str) -> None:
    from deepspeed.launcher.multinode_runner import PDSHRunner

    runner = PDSHRunner.__new__(PDSHRunner)
    runner.exports = {}
    for row in deepspeed_env({"A": value}, ["B=kept"]).splitlines(keepends=True):
        runner.add_export(*row.split("=", maxsplit=1))  # as its launcher reads the file
    lines = [f"export {name}={text}; " for name, text in runner.exports.items()]
    done = subprocess.run(["bash", "-c", "".join(lines) + 'printf "%s|%s" "$A" "$B"'], capture_output=True)
    assert done.stdout.decode() == f"{value}|kept"


def test_the_users_own_variables_for_deepspeed_are_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, own_file = tmp_path / "home", tmp_path / "own_env"
    home.mkdir()
    (home / ".deepspeed_env").write_text("H=1\nC=theirs\n")
    own_file.write_text("O=2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    more = ["cluster=deepspeed", "hosts=[a,b]", "gpus_per_node=1", "format=json"]
    more += ["cluster.environment={C: ours, D: x y}"]
    for given, expected in ((None, "H=1\nC=theirs\nD=x y\n"), (str(own_file), "O=2\nC=ours\nD=x y\n")):
        monkeypatch.delenv("DS_ENV_FILE", raising=False)
        if given:
            monkeypatch.setenv("DS_ENV_FILE", given)
        _, out, _ = launched(capsys, *more)
        facts = json.loads(out)
        path = str(tmp_path / "runs" / facts["directory"].rpartition("/")[2] / "deepspeed_env")
        assert facts["files"][path] == expected
        assert f"env DS_ENV_FILE={path} " in facts["commands"][0]["command"]


def test_a_cpu_asks_for_no_gpus() -> None:
    for gpus in ("gpus-per-node", "gres"):
        text = sbatch(work(gpus=False), Slurm(gpus=gpus), "python", "", preflight=False)  # type: ignore[arg-type]
        assert "--gpus-per-node" not in text and "--gres" not in text
    read = manifest(work(gpus=False), Kubernetes(image="i", resources={"cpu": "9"}), preflight=False)
    assert "nvidia.com" not in read and "cpu: " in read


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("2:30", 150), ("1:00:00", 3600), ("1-12", 129600), ("1-0:30", 88200), ("1-0:0:5", 86405)],
)
def test_a_time_limit_is_read_as_sbatch_does(text: str, seconds: int) -> None:
    assert time_limit(text) == seconds
    assert time_limit("UNLIMITED") is None and time_limit("0") is None


@pytest.mark.parametrize("api", ["jobset", "pytorchjob"])
def test_the_manifest_is_yaml_and_the_command_is_literal(api: Any) -> None:
    volumes = [Volume(claim="c", path="/shared")]
    cluster = Kubernetes(image="r/i:1", api=api, volumes=volumes, resources={"memory": "1Ti", "cpu": "9"})
    read = yaml.safe_load(manifest(work(), cluster, preflight=False))
    assert read["metadata"] == {"name": "my-run"}
    if api == "jobset":
        job = read["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
        specs, host = [job["template"]["spec"]], "my-run-node-0-0.my-run"
    else:
        replicas = read["spec"]["pytorchReplicaSpecs"]
        assert [replicas[name]["replicas"] for name in ("Master", "Worker")] == [1, 1]
        specs, host = [replicas[name]["template"]["spec"] for name in ("Master", "Worker")], "my-run-master-0"
    for spec in specs:
        (container,) = spec["containers"]
        # Kubernetes puts $(NAME)s in, and reads $$ as $.
        command = [word.replace("$$", "$") for word in container["command"]]
        read_back = parsed(command)
        assert read_back.training_script_args == ["train", *STRANGE]
        assert (read_back.nnodes, read_back.rdzv_endpoint) == ("2", f"{host}:29500")
        limits = {"nvidia.com/gpu": "8", "memory": "1Ti", "cpu": "9"}
        assert container["resources"] == {"requests": limits, "limits": limits}
        assert spec["terminationGracePeriodSeconds"] > cluster.shutdown_timeout_seconds
        assert {"mountPath": "/shared", "name": "volume-0"} in container["volumeMounts"]


def test_the_manifest_with_a_preflight_runs_doctor_first_at_another_port() -> None:
    cluster = Kubernetes(image="i", python="srun", environment={"A": "b c"})
    read = yaml.safe_load(manifest(work(), cluster, preflight=True))
    pod = read["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    shell, flag, script = (word.replace("$$", "$") for word in pod["containers"][0]["command"])
    assert (shell, flag) == ("bash", "-c")
    doctor, train = said_by_shell(script.replace("exec ", ""), "srun")
    assert parsed(doctor).training_script_args == ["doctor", *STRANGE]
    assert parsed(train).training_script_args == ["train", *STRANGE]
    assert parsed(doctor).rdzv_endpoint != parsed(train).rdzv_endpoint


def test_yaml_that_could_be_read_otherwise_is_quoted() -> None:
    values = {
        "text": [
            "yes",
            "No",
            "null",
            "1",
            "1e3",
            "0x1",
            "a: b",
            "#",
            "",
            " x",
            "é",
            "-",
            "a\nb",
            "\n",
            "a\n\nb",
        ],
        "number": 3,
        "flag": False,
        "empty": [],
        "inside": {"a": [{"b": [{"c": "d"}], "e": {}}]},
        "1": "x",
        "a/b.c": "~",
    }
    assert yaml.safe_load("\n".join(yaml_lines(values))) == values


def test_names_of_kubernetes() -> None:
    assert (
        object_name("My Run_7") == "my-run-7" and object_name("7") == "run-7" and object_name("__") == "run"
    )
    assert len(object_name("a" * 80)) == 40 and literal("$(A) $$(B) $C") == "$$(A) $$$$(B) $$C"


@pytest.mark.parametrize(
    ("argument", "ours"),
    [
        ("cluster=slurm", True),
        ("cluster.time=1", True),
        ("+cluster.x=1", True),
        ("nodes=2", True),
        ("format=json", True),
        ("model=tiny", False),
        ("hostsfile=x", False),
        ("config=runs/first", False),
        ("--config-dir", False),
    ],
)
def test_what_is_for_launch_alone(argument: str, ours: bool) -> None:
    assert own(argument) is ours


def launched(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["launch", "model=tiny", "hardware=cpu", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_and_text_say_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["cluster=torchrun", "hosts=[a,b]", "gpus_per_node=2", "parallel.tp=2", "run.name=x y"]
    code, out, _ = launched(capsys, *more, "format=json")
    facts = json.loads(out)
    assert code == 0 and facts["processes"] == 4 and facts["directory"] == str(tmp_path / "runs" / "x y")
    assert [one["where"] for one in facts["commands"]] == ["on a", "on b"]
    read = parsed(shlex.split(facts["commands"][1]["command"]))
    assert (read.nnodes, read.nproc_per_node, read.rdzv_endpoint) == ("2", "2", "a:29500")
    assert read.training_script_args == [
        "train",
        "model=tiny",
        "hardware=cpu",
        "parallel.tp=2",
        "run.name=x y",
    ]
    code, out, _ = launched(capsys, *more)
    assert all(one["command"] in out for one in facts["commands"]) and "tp 2 x pp 1 x dp 2" in out
    assert list(tmp_path.iterdir()) == []  # nothing was written


def test_deepspeed_gets_a_hostfile_that_it_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.launcher.runner import _parse_hostfile, parse_args

    monkeypatch.chdir(tmp_path)
    _, out, _ = launched(
        capsys, "cluster=deepspeed", "hosts=[a,b]", "gpus_per_node=4", "cluster.port=5", "format=json"
    )
    facts = json.loads(out)
    ((path, text),) = facts["files"].items()
    assert dict(_parse_hostfile(text.splitlines())) == {"a": 4, "b": 4}
    command = shlex.split(facts["commands"][0]["command"])
    read = parse_args(command[command.index("deepspeed.launcher.runner") + 1 :])
    assert (read.hostfile, read.master_addr, read.master_port, read.module) == (path, "a", 5, True)
    assert (read.user_script, read.user_args) == ("launcher", ["train", "model=tiny", "hardware=cpu"])


def test_the_endpoint_may_name_its_port(capsys: pytest.CaptureFixture[str]) -> None:
    for given, expected in (("h:123", "h:123"), ("h", "h:29500")):
        _, out, _ = launched(
            capsys,
            "cluster=torchrun",
            "nodes=2",
            "gpus_per_node=1",
            f"cluster.endpoint='{given}'",
            "format=json",
        )
        command = json.loads(out)["commands"][0]["command"]
        assert parsed(shlex.split(command)).rdzv_endpoint == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["gpus_per_node=7", "parallel.tp=2"],
            "1 nodes x 7 processes = 7 cannot be split into parallel.tp (2)",
        ),
        (["gpus_per_node=4", "train.global_batch=6", "train.micro_batch=1"], "a global batch of 6"),
        (["gpus_per_node=3", "model.attention.n_heads=4", "parallel.tp=3"], "n_heads (4)"),
        ([], "gpus_per_node is not given"),
        (["gpus_per_node=0"], "gpus_per_node (0)"),
        (["nodes=2", "gpus_per_node=1"], "cluster=local is one machine"),
        (["nodes=2", "gpus_per_node=1", "cluster=torchrun"], "give cluster.endpoint=HOST"),
        (["nodes=2", "gpus_per_node=1", "cluster=deepspeed"], "give hosts=[a,b]"),
        (["nodes=3", "hosts=[a,b]", "gpus_per_node=1", "cluster=torchrun"], "nodes (3) and hosts (2) differ"),
        (["hosts=['a;b']", "gpus_per_node=1", "cluster=torchrun"], "'a;b' is no name of a machine"),
        (["gpus_per_node=1", "cluster=kubernetes"], "a pod needs an image"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.signal_seconds=100"], "signal_seconds (100)"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.image=x"], "cluster.image belongs to"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.time=00:05:00"], "signal_seconds (600) + 120"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.time=banana"], "time ('banana')"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.max_requeues=-1"], "max_requeues (-1)"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.cpus_per_task=-3"], "cpus_per_task (-3)"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.signal_seconds=1000000"], "at most 65535"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.prologue=['if true']"], "is no bash"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.prologue=['cat <<X']"], "is no bash"),
        (
            ["gpus_per_node=1", "cluster=kubernetes", "cluster.image=i", "cluster.job_restarts=-4"],
            "job_restarts (-4)",
        ),
        (
            ["gpus_per_node=1", "cluster=kubernetes", "cluster.image=i", "cluster.shared_memory=banana"],
            "shared_memory ('banana')",
        ),
        (
            [
                "gpus_per_node=1",
                "cluster=kubernetes",
                "cluster.image=i",
                "cluster.volumes=[{claim: A B, path: /a}]",
            ],
            "claim ('A B')",
        ),
        (
            [
                "gpus_per_node=1",
                "cluster=kubernetes",
                "cluster.image=i",
                "cluster.volumes=[{claim: a, path: b}]",
            ],
            "path ('b')",
        ),
        (["gpus_per_node=1", "cluster=torchrun", "hosts=[a,a]"], "hosts names a more than once"),
        (["gpus_per_node=1", "cluster=torchrun", "hosts=[-a]"], "'-a' is no name"),
        (["gpus_per_node=1", "cluster=torchrun", "cluster.endpoint=a:70000"], "must be HOST or HOST:PORT"),
        (
            [
                "gpus_per_node=1",
                "cluster=torchrun",
                "cluster.port=65535",
                "cluster.endpoint=h",
                "preflight=true",
            ],
            "port 65535 leaves none",
        ),
        (["gpus_per_node=1", "cluster=slrum"], "the nearest is slurm"),
        (["gpus_per_node=1", "cluster=slurm", "cluster.options=[x]"], "'x' is no option of sbatch"),
        (["gpus_per_node=1", "cluster.environment={a-b: c}"], "'a-b' is no name of a variable"),
        (["gpus_per_node=1", "optim.lr=1e-3,3e-3", "-m"], "-m: launch is for one run"),
    ],
)
def test_wrong_input_is_one_clear_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = launched(capsys, *arguments)
    assert (code, out) == (2, "") and message in err, err


def test_a_program_that_is_not_there_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    code, _, err = launched(capsys, "gpus_per_node=1", "cluster=slurm", "execute=true")
    assert code == 2 and "there is no sbatch on this machine" in err


def test_signals_and_times_are_options_that_the_installed_torchrun_has() -> None:
    command = torchrun(Torchrun(max_restarts=3), "python", nodes=1, per_node=2, endpoint=None, name="x")
    read = parsed([*command, "launcher", "train"])
    assert (read.standalone, read.max_restarts, read.signals_to_handle) == (True, 3, SIGNALS)
