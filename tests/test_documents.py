"""What the documents say is what the code does."""

import re
from pathlib import Path

import pytest

from conf.compose import Composer
from launcher.commands import COMMANDS
from launcher.config import Config
from launcher.help import markdown_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """The lines of the README's shell blocks, continued lines joined, comments cut off."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines if line.strip()]


def test_the_table_of_settings_is_current() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert text[text.index("| key |") :].rstrip("\n") == markdown_table(Config)


@pytest.mark.parametrize(
    "line", [c for c in commands() if re.search(rf"launcher ({'|'.join(COMMANDS)}) ", c)]
)
def test_the_overrides_of_the_readme_are_accepted(line: str) -> None:
    """Each command composes and passes the typed door, whatever starts it."""
    name, _, rest = line.partition("launcher ")[2].partition(" ")
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", rest)]
    overrides = [w for w in words if "=" in w and not w.startswith(("--", "config="))]
    root = COMMANDS[name].load_root()
    composer = Composer(root, COMMANDS[name].config_name)
    sweep = "-m" in words
    request = composer.request(overrides, sweep=sweep)
    if sweep:
        trees = composer.multirun(request.overrides, composer.typed)
        assert not request.problems and len(trees) > 1
    else:
        trees = [composer.typed(composer.compose(request.overrides), request.problems)]
    assert all(isinstance(tree, root) for tree in trees)


ABLATIONS = sorted(
    path.stem for path in (ROOT / "conf/experiment/ablation").glob("*.yaml") if path.stem != "base"
)


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_variant_of_an_ablation_composes(name: str) -> None:
    composer = Composer(Config, "config")
    request = composer.request([f"experiment=ablation/{name}"], sweep=True)
    trees = composer.multirun(request.overrides, composer.typed)
    assert len(trees) > 1 and {tree.run.name for tree in trees} == {f"ablation-{name}"}
    different = {str((tree.model, tree.optim, tree.schedule)) for tree in trees}
    assert len(different) == len(trees), "two variants are the same"


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert named <= targets and {"train", "test"} <= named


def test_files_that_the_documents_link_to_exist() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert target.startswith("http") or (document.parent / target).exists(), (document, target)
