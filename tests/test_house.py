"""The rules of the house, read from the source itself: floors, owners, sizes, no pickle, declared settings.

Each rule is a function from a syntax tree to violations, and is shown a violation before the code is.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("conf", "parallel", "megamodel", "checkpoints", "launcher")  # each imports only those before it
OWNERS = {  # a library and the one package that may touch it
    "omegaconf": "conf",
    "pydantic": "conf",
    "deepspeed": "parallel",
    "torch.distributed": "parallel",
    "triton": "megamodel",
    "liger_kernel": "megamodel",
    "tokenizers": "megamodel",
    "datasets": "megamodel",
    "safetensors": "checkpoints",
    "fsspec": "checkpoints",
    "tensorboard": "launcher",
}
OPTIONAL = {
    "triton",
    "sentencepiece",
    "transformers",
    "lm_eval",
    "torchao",
}  # extras, imported behind a guard
DISTRIBUTIONS = {"hydra": "hydra-core", "PIL": "pillow"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
PICKLING_CALLS = {"torch.load", "torch.save", "torch.jit.load", "pandas.read_pickle", "torch.hub.load"}
OBJECT_COLLECTIVES = {
    f"{name}_object{tail}"
    for name in ("all_gather", "broadcast", "gather", "scatter", "send", "recv")
    for tail in ("", "_list")
}
FILE_LINES, FUNCTION_LINES = 450, 60

PRODUCT = sorted(path for package in FLOORS for path in (ROOT / package).rglob("*.py"))
SOURCES = sorted([*PRODUCT, *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])


def trees(paths: list[Path]) -> Iterator[tuple[str, ast.Module]]:
    for path in paths:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(local name, dotted name) of everything imported anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = name.asname or name.name.split(".")[0]
                yield bound, name.name if name.asname else bound
                if not name.asname and "." in name.name:
                    yield "", name.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def floor_violations(package: str, tree: ast.AST) -> list[str]:
    above = FLOORS[FLOORS.index(package) + 1 :]
    return [name for _, name in imports(tree) if name.split(".")[0] in (*above, "tests", "benchmarks")]


def owner_violations(package: str, tree: ast.AST) -> list[str]:
    return [
        name
        for _, name in imports(tree)
        for library, owner in OWNERS.items()
        if package != owner and within(name, library)
    ]


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The full name of `a.b.c`, with `a` replaced by what it was imported as; empty for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := dotted(node.value, names)) else f"?.{node.attr}"
    return ""


def unsafe_numpy_load(call: ast.Call) -> bool:
    """np.load is safe unless allow_pickle is, or might be, true; a bare ** might carry it."""
    if len(call.args) > 2:
        return True
    keywords = [k for k in call.keywords if k.arg in ("allow_pickle", None)]
    return any(not (isinstance(k.value, ast.Constant) and k.value.value is False) for k in keywords)


def pickle_violations(tree: ast.AST) -> list[str]:
    names = {bound: full for bound, full in imports(tree) if bound}
    found = [full for _, full in imports(tree) if full.split(".")[0] in PICKLES or full in PICKLING_CALLS]
    found += [full for _, full in imports(tree) if full.split(".")[-1] in OBJECT_COLLECTIVES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node, names)
            if name in PICKLING_CALLS or node.attr in OBJECT_COLLECTIVES:
                found.append(name)
        elif isinstance(node, ast.Call) and dotted(node.func, names) in (
            "numpy.load",
            "numpy.lib.npyio.load",
        ):
            found += ["numpy.load(allow_pickle)"] if unsafe_numpy_load(node) else []
    return found


def undeclared_settings(tree: ast.AST) -> list[str]:
    """Fields of a @config class that are not made by setting(..., on_resume=..., help=...)."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        if not any(dotted(d, {}).split(".")[-1] == "config" for d in node.decorator_list):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and not is_setting(field.value):
                found.append(f"{node.name}.{ast.unparse(field.target)}")
    return found


def is_setting(value: ast.AST | None) -> bool:
    if not isinstance(value, ast.Call) or dotted(value.func, {}).split(".")[-1] != "setting":
        return False
    return {"on_resume", "help"} <= {keyword.arg for keyword in value.keywords}


def long_functions(tree: ast.AST) -> list[str]:
    """Functions over the limit; the docstring is not counted."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines > FUNCTION_LINES:
                found.append(f"{node.name} ({lines} lines)")
    return found


def test_each_floor_imports_only_the_floors_below_it() -> None:
    assert floor_violations("parallel", ast.parse("from megamodel.model import Head")) == [
        "megamodel.model.Head"
    ]
    assert floor_violations("conf", ast.parse("def f():\n import launcher.run")) == [
        "launcher",
        "launcher.run",
    ]
    assert floor_violations("launcher", ast.parse("import checkpoints, conf.typed")) == []
    found = {f: v for f, t in trees(PRODUCT) if (v := floor_violations(f.split("/")[0], t))}
    assert found == {}


def test_each_library_is_touched_by_its_owner_only() -> None:
    assert owner_violations("launcher", ast.parse("from torch import distributed")) == ["torch.distributed"]
    assert owner_violations("megamodel", ast.parse("import torch.distributed as d")) == ["torch.distributed"]
    assert owner_violations("launcher", ast.parse("from torch.utils.tensorboard import SummaryWriter")) == []
    found = {f: v for f, t in trees(PRODUCT) if (v := owner_violations(f.split("/")[0], t))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "from torch import load",
        "import torch as t\nt.save(x, 'f')",
        "import torch\nf = torch.load",
        "import numpy as np\nnp.load('f', allow_pickle=True)",
        "import numpy\nnumpy.load('f', None, True)",
        "from numpy import load\nload('f', **options)",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "from torch.distributed import all_gather_object",
    ],
)
def test_the_pickle_rule_sees(source: str) -> None:
    assert pickle_violations(ast.parse(source))


def test_nothing_is_read_or_written_through_pickle() -> None:
    assert pickle_violations(ast.parse("import json, numpy as np\nnp.load('f', allow_pickle=False)")) == []
    sources = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]
    assert {f: v for f, t in trees(sources) if (v := pickle_violations(t))} == {}


def test_every_setting_says_what_a_resume_does() -> None:
    bad = "@config\nclass A:\n  x: int = 1\n  y: int = setting(1, help='')\n  z: int"
    assert undeclared_settings(ast.parse(bad)) == ["A.x", "A.y", "A.z"]
    good = "@config\nclass A:\n  x: int = setting(1, on_resume='free', help='h')"
    assert undeclared_settings(ast.parse(good)) == []
    assert {f: v for f, t in trees(PRODUCT) if (v := undeclared_settings(t))} == {}


def test_files_and_functions_stay_small() -> None:
    body = "\n".join(" x = 1" for _ in range(FUNCTION_LINES))
    assert long_functions(ast.parse(f"def f():\n ''' what\n it does'''\n{body}")) == ["f (61 lines)"]
    assert long_functions(ast.parse(f"def f():\n{body[7:]}")) == []
    assert {f: v for f, t in trees(PRODUCT) if (v := long_functions(t))} == {}
    lines = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCES}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_no_module_is_called_after_nothing() -> None:
    vague = re.compile(r"^_?(utils?|helpers?|commons?|misc|stuff|tools)$")
    assert vague.match("utils") and vague.match("_helper") and not vague.match("typed")
    assert [
        str(p)
        for p in SOURCES
        if any(vague.match(part) for part in p.relative_to(ROOT).with_suffix("").parts)
    ] == []


def test_no_function_writes_a_global() -> None:
    found = [f for f, t in trees(PRODUCT) if any(isinstance(node, ast.Global) for node in ast.walk(t))]
    assert found == []


def test_every_imported_library_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\s<>=!~\[;]", line)[0].lower() for line in project["dependencies"]}
    roots = {full.split(".")[0] for _, t in trees(PRODUCT) for _, full in imports(t)}
    libraries = roots - set(sys.stdlib_module_names) - set(FLOORS) - OPTIONAL
    assert "torch" in libraries
    assert {name for name in libraries if DISTRIBUTIONS.get(name, name).lower() not in declared} == set()


def test_the_text_speaks_only_of_the_project() -> None:
    """No path of somebody's machine, no ticket number, no word of how the work was organised."""
    private = re.compile(r"(?<![\w.])/(work|root)/|\bissue #?\d|\bCE[O]\b|work[p]lace", re.IGNORECASE)
    for words in (("see ", "work", "main"), ("", "root", "x")):
        assert private.search("/".join(words))
    assert private.search(" ".join(("Issue", "#3")))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    found = []
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".txt", ""} and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{name}:{n}: {line}" for n, line in enumerate(lines, 1) if private.search(line)]
    assert found == []
