"""Layers of files and a command line: which wins, and what is refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from conf.compose import Composer, composition_error, is_composition_error
from conf.saved import read, to_yaml
from conf.schema import plain
from conf.typed import InvalidConfiguration, parse
from tests.conf.sections import Alibi, Model, Optim, Root, Rope, Source

FILES = {
    "main.yaml": """
        defaults:
          - model: wide
          - optim: slow
          - _self_
        name: ${model.width}-${hydra:runtime.choices.optim}
        """,
    "model/wide.yaml": """
        width: 256
        position: {kind: rope, base: 5E5}
        """,
    "model/narrow.yaml": """
        width: 16
        """,
    "optim/slow.yaml": """
        lr: 1e-4
        """,
    "optim/fast.yaml": """
        lr: 1E-2
        """,
    "experiment/slopes.yaml": """
        # @package _global_
        defaults:
          - override /optim: fast
        model:
          position: {kind: alibi, slope: 3}
        """,
    "experiment/wrong.yaml": """
        # @package _global_
        model:
          position: {kind: rope, bsae: 3}
        optim: {lrate: 3}
        """,
    "experiment/broken.yaml": """
        # @package _global_
        model: [1
        """,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "presets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in lines) + "\n")
    return tmp_path / "presets"


def typed(folder: Path, *arguments: str, saved: dict[str, Any] | None = None) -> Any:
    composer = Composer(Root, "main", directory=str(folder), saved=saved)
    request = composer.request(arguments)
    return composer.typed(composer.compose(request.overrides), request.problems)


def refused(folder: Path, *arguments: str) -> list[str]:
    with pytest.raises(InvalidConfiguration) as caught:
        typed(folder, *arguments)
    return [str(problem) for problem in caught.value.problems]


def test_presets_values_and_defaults_come_together(folder: Path) -> None:
    assert typed(folder) == Root(
        name="256-slow", model=Model(width=256, position=Rope(base=500000.0)), optim=Optim(lr=0.0001)
    )


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "1.0e-4", "'1e-4'"])
def test_one_float_in_every_spelling(folder: Path, text: str) -> None:
    assert typed(folder, f"optim.lr={text}").optim.lr == 0.0001
    (folder / "optim" / "own.yaml").write_text(f"lr: {text}\nbetas: [{text}, 9E-1]\n")
    assert typed(folder, "optim=own").optim == Optim(lr=0.0001, betas=[0.0001, 0.9])


def test_every_field_is_overridden_without_a_plus(folder: Path) -> None:
    tree = typed(
        folder,
        "model.window=5",
        "model.position.scale=4",
        "optim.betas=[0.1,0.2]",
        "mixture={a: {path: x}}",
        "mixture.b.path=y",
        "stages=[{path: q}]",
        "name=2024",
        "optim.precision=null",
    )
    assert tree.model == Model(width=256, window=5, position=Rope(base=500000.0, scale=4.0))
    assert tree.optim.betas == [0.1, 0.2]
    assert tree.mixture == {"a": Source(path="x"), "b": Source(path="y")}
    assert tree.stages == [Source(path="q")]
    assert tree.name == "2024"


def test_a_plus_is_allowed_all_the_same(folder: Path) -> None:
    assert typed(folder, "+model.window=5", "++optim.lr=2").model.window == 5


def test_a_group_is_chosen_by_its_name(folder: Path) -> None:
    tree = typed(folder, "model=narrow", "optim=fast")
    assert tree == Root(name="16-fast", model=Model(width=16), optim=Optim(lr=0.01))


@pytest.mark.parametrize("argument", ["model/position=alibi", "model.position.kind=alibi"])
def test_another_variant_drops_what_a_preset_said_about_the_old_one(folder: Path, argument: str) -> None:
    assert typed(folder, argument).model.position == Alibi()
    assert typed(folder, "model.position.slope=5", argument).model.position == Alibi(slope=5.0)


def test_the_same_variant_keeps_what_a_preset_said(folder: Path) -> None:
    assert typed(folder, "model/position=rope").model.position == Rope(base=500000.0)


def test_a_file_may_choose_another_variant_too(folder: Path) -> None:
    tree = typed(folder, "experiment=slopes")
    assert tree.model.position == Alibi(slope=3.0)
    assert tree.optim.lr == 0.01


def test_what_the_command_line_says_about_another_variant_is_refused(folder: Path) -> None:
    (message,) = refused(folder, "model.position.slope=5")
    assert message.startswith("model.position.slope belongs to model.position.kind=alibi, but it is rope")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["optm.lr=1"], ["optm.lr: no such key; the nearest is optim.lr"]),
        (["modle=wide"], ["modle: no such key; the nearest is model"]),
        (["+optim.lrr=1"], ["optim.lrr: no such key; the nearest is optim.lr"]),
        (["model.lr=1"], ["model.lr: no such key; the nearest is optim.lr"]),
        (["mixture.a.pth=x"], ["mixture.a.pth: no such key; the nearest is mixture.a.path"]),
        (["optim.lr.peak=1"], ["optim.lr.peak: no such key; the nearest is optim.lr"]),
        (["model=wdie"], ["model=wdie: there is no such choice; the nearest is wide"]),
        (
            ["model/positon=rope"],
            ["model/positon: no such group of presets; the nearest is model/position"],
        ),
        (
            ["model.position.kind=alibbi"],
            ["model/position=alibbi: there is no such choice; the nearest is alibi"],
        ),
        (["model.width=1.5"], ["model.width: 1.5 is not a whole number"]),
        (["model.tied='yes please'"], ["model.tied: 'yes please' is not true or false"]),
        (
            ["optm.lr=1", "model.width=1.5"],
            ["optm.lr: no such key; the nearest is optim.lr", "model.width: 1.5 is not a whole number"],
        ),
    ],
)
def test_wrong_arguments(folder: Path, arguments: list[str], messages: list[str]) -> None:
    assert refused(folder, *arguments) == messages


def test_wrong_keys_of_a_file_are_named_with_the_file(folder: Path) -> None:
    file = folder / "experiment" / "wrong.yaml"
    assert refused(folder, "experiment=wrong") == [
        f"model.position.bsae: no such key; the nearest is model.position.base (in {file})",
        f"optim.lrate: no such key; the nearest is optim.lr (in {file})",
    ]


def test_a_section_is_a_file_s_fault_only_when_all_of_it_is_the_file_s(folder: Path) -> None:
    (folder / "model" / "odd.yaml").write_text("width: 17\n")
    message = "model.width (17) must be even; use 18"
    assert refused(folder, "model=odd", "optim.lr=1") == [f"{message} (in {folder / 'model' / 'odd.yaml'})"]
    assert refused(folder, "model.width=17") == [message]
    assert refused(folder, "model.position.base=1", "model.width=17") == [message]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optim.lr", "cannot read the argument 'optim.lr': write key=value"),
        ("name='open", "quote text with special characters"),
        ("optim.lr=1,2", "a sweep over the values needs -m"),
    ],
)
def test_arguments_that_cannot_be_read(folder: Path, argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        typed(folder, argument)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["experiment=broken"], ["broken.yaml", "line "]),
        (["name=${nowhere.to.find}"], ["nowhere"]),
    ],
)
def test_errors_of_files_and_interpolations_are_one_line(
    folder: Path, arguments: list[str], parts: list[str]
) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        typed(folder, *arguments)
    assert is_composition_error(caught.value)
    message = composition_error(caught.value)
    assert "\n" not in message and all(part in message for part in parts)


@pytest.mark.parametrize("argument", ["~optim.lr", "~optim", "~optim.lr=3", "~nothing"])
def test_nothing_can_be_removed(folder: Path, argument: str) -> None:
    key = argument.removeprefix("~").partition("=")[0]
    with pytest.raises(
        InvalidConfiguration, match=rf"^{key}: ~{key}: nothing can be removed, .*{key}=VALUE$"
    ):
        typed(folder, argument)


def test_a_folder_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="is no directory"):
        Composer(Root, "main", directory=str(folder / "nothing"))


def test_the_saved_configuration_gives_an_equal_tree(folder: Path, tmp_path: Path) -> None:
    tree = typed(
        folder, "experiment=slopes", "optim.lr=1e-5", r"mixture.a.path='\${HOME} : x'", "name='1e-4'"
    )
    assert tree.mixture["a"].path == "${HOME} : x" and tree.name == "1e-4"
    file = tmp_path / "saved.yaml"
    file.write_text(to_yaml(plain(tree)))
    assert typed(folder, saved=read(file)) == tree


def test_arguments_and_presets_go_over_a_saved_configuration(folder: Path) -> None:
    saved = plain(Root(name="x", model=Model(width=8, position=Rope(base=3.0))))
    tree = typed(folder, "optim=fast", "model.position.kind=alibi", saved=saved)
    assert tree == Root(name="x", model=Model(width=8, position=Alibi(scale=1.0)), optim=Optim(lr=0.01))


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "a: [1\n", "a: 1\na: 2\n"])
def test_a_saved_configuration_that_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"^{file} "):
        read(file)


def test_a_sweep_runs_every_combination(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    composer = Composer(Root, "main", directory=str(folder))
    request = composer.request(["optim.lr=1,2", "model/position=rope,alibi"], sweep=True)
    trees: list[Root] = []
    composer.multirun(request.overrides, lambda raw: trees.append(composer.typed(raw)))
    assert [(tree.optim.lr, tree.model.position.kind) for tree in trees] == [
        (1.0, "rope"),
        (1.0, "alibi"),
        (2.0, "rope"),
        (2.0, "alibi"),
    ]
    assert [path for path in tmp_path.iterdir() if path != folder] == []


def test_nothing_is_written_by_composing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    typed(folder, "optim.lr=1")
    assert list(empty.iterdir()) == []


def test_text_that_looks_like_something_else_stays_text() -> None:
    for name in ("1e-4", "true", "null", "${x}", "a: b", "007", "# no", "???x"):
        assert parse(Root, plain(Root(name=name))).name == name
