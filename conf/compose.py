"""From files and a command line to raw values: Hydra finds and orders the layers, we lay them one on another.

Every value may be overridden without `+`, because defaults live in the sections and are filled in last. A
layer that chooses another variant of a union (`kind: alibi`) drops what lower ones said of the old one.
"""

import difflib
import functools
import tempfile
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import GroupDefault
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override

from conf.saved import is_file_error, one_line, to_yaml
from conf.schema import accepts, complete, hints, plain, unions
from conf.typed import InvalidConfiguration, Problem, parse, unknown_key

EXPERIMENT = "experiment"  # the group whose files change the whole tree
BLANK = "_blank"  # the primary configuration when a saved one is given: no presets of its own

# Hydra writes nothing and logs nothing of its own; the directory of a run is ours.
QUIET = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra.sweep.subdir=.",
    "hydra.job.chdir=false",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def quiet(overrides: Sequence[str], *more: str) -> list[str]:
    """QUIET and more such settings, but for what the user wants otherwise."""
    given = {override.partition("=")[0].lstrip("+~") for override in overrides}
    return [setting for setting in (*QUIET, *more) if setting.partition("=")[0] not in given]


@dataclass
class Layers:
    """What was laid over what, kept for messages. origins: dotted path -> file that gave it last."""

    origins: dict[str, str] = field(default_factory=dict)


class VariantLoader(ConfigLoaderImpl):
    """Hydra's loader with our way of laying one layer on another. base: values of a saved configuration."""

    def __init__(self, search_path: ConfigSearchPath, root: type, base: Mapping[str, Any] | None) -> None:
        super().__init__(search_path)
        self.root = root
        self.base = base
        self.layers = Layers()

    def load_configuration(
        self, config_name: str | None, overrides: list[str], *more: Any, **named: Any
    ) -> Any:
        raw = super().load_configuration(config_name, overrides, *more, **named)
        for key in [override.partition("=")[0].lstrip("+~") for override in overrides]:
            if self.repository.group_exists(key):
                continue  # a choice of file
            parts = key.split(".")
            for length in range(1, len(parts) + 1):  # no file's any more, nor the sections around it
                self.layers.origins.pop(".".join(parts[:length]), None)
        return raw

    def _load_single_config(self, default: Any, repo: Any) -> Any:
        """As Hydra's, without its deprecated matching of files and stored nodes of one name."""
        found = repo.load_config(config_path=default.config_path)
        if not isinstance(found.config, DictConfig):
            raise ValueError(
                f"{default.config_path}: a configuration file must be a mapping of keys to values"
            )
        return self._embed_result_config(found, default.package)

    def _compose_config_from_defaults_list(self, defaults: Any, repo: Any) -> DictConfig:
        self.layers = Layers()
        result = OmegaConf.create()
        if self.base is not None:
            result.merge_with(OmegaConf.create(dict(self.base)))
        with flag_override(result, "no_deepcopy_set_nodes", True):
            for default in defaults:
                loaded = self._load_single_config(default, repo)
                layer = loaded.config
                with flag_override(layer, ["readonly", "struct"], False):
                    layer.pop("defaults", None)
                values = unresolved(layer)
                values.pop("hydra", None)
                drop_other_variants(self.root, result, values)
                result.merge_with(layer)
                self._remember(values, loaded.path, default.config_path)
        return result

    def _remember(self, values: Mapping[str, Any], source: str, name: str) -> None:
        if source.startswith("structured://"):
            return
        folder = (
            source.removeprefix("file://") if source.startswith("file://") else source.removeprefix("pkg://")
        )
        file = folder if folder.endswith(".yaml") else f"{folder}/{name}.yaml"
        for path in flattened(values):
            self.layers.origins[path] = file


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every dotted path of nested mappings, inner nodes included."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")


def at(values: Any, path: str) -> Any:
    """The value at a dotted path of nested mappings, or None."""
    for part in path.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def drop_other_variants(root: type, below: DictConfig, layer: Mapping[str, Any]) -> None:
    """Where `layer` chooses another member of a union, remove from `below` what only the old one has."""
    for path, form, default_kind in unions(root):
        chosen, node = at(layer, path), OmegaConf.select(below, path)
        if not isinstance(chosen, Mapping) or not isinstance(node, DictConfig):
            continue
        known = form.kinds()
        new, old = chosen.get(form.discriminator), node.get(form.discriminator, default_kind)
        if new == old or new not in known or old not in known:
            continue
        for key in [key for key in node if key in hints(known[old]) and key not in hints(known[new])]:
            del node[key]


@dataclass(frozen=True)
class Request:
    """One command line, taken apart."""

    overrides: list[str]  # for Hydra
    problems: list[Problem]  # keys and choices that do not exist


class Composer:
    """Composes the raw values of one root class.

    root: the class of the tree; config_name: the primary file in the package conf; directory: the user's own
    folder of presets, which comes before ours; saved: values to stand below everything instead of the primary
    file and its presets, as `read` gives them.
    """

    def __init__(
        self,
        root: type,
        config_name: str,
        *,
        directory: str | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        version.setbase("1.3")
        self.root = root
        self.config_name = config_name if saved is None else BLANK
        search_path = create_automatic_config_search_path(None, None, "pkg://conf")
        if directory is not None:
            folder = Path(directory).expanduser().absolute()
            if not folder.is_dir():
                raise ValueError(f"--config-dir {directory} is no directory; give one that holds YAML files")
            search_path.prepend("command-line", f"file://{folder}", SearchPathQuery("main", None))
        store_variants(root)
        self.loader = VariantLoader(search_path, root, saved)
        self.hydra = Hydra(task_name="megamodel", config_loader=self.loader)

    def options(self, group: str) -> list[str]:
        """The presets of a group; of experiments, those in folders too."""
        found = self.loader.get_group_options(group)
        if group.split("/")[0] == EXPERIMENT:
            for folder in sorted(set(self.loader.list_groups(group))):
                found += [f"{folder}/{name}" for name in self.options(f"{group}/{folder}")]
        return found

    @functools.cached_property
    def groups(self) -> list[str]:
        """Every group of presets that belongs to a key of this root, and `experiment`."""
        return self._groups("")

    def _groups(self, parent: str) -> list[str]:
        found: list[str] = []
        for name in sorted(set(self.loader.list_groups(parent))):
            group = f"{parent}/{name}" if parent else name
            if group == EXPERIMENT or accepts(self.root, group.replace("/", ".")):
                found += [group] if self.options(group) else []
                found += self._groups(group)
        return found

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Raw layered values with Hydra's own node; interpolations are not resolved."""
        raw = self.loader.load_configuration(self.config_name, [*quiet(overrides), *overrides], RunMode.RUN)
        HydraConfig.instance().set_config(raw)
        return raw

    def typed(self, raw: DictConfig, problems: Sequence[Problem] = ()) -> Any:
        """The typed tree of composed values. Raises InvalidConfiguration with `problems` before its own."""
        found = list(problems)
        try:
            tree = parse(self.root, resolved(self.root, raw), self.loader.layers.origins)
        except InvalidConfiguration as error:
            raise InvalidConfiguration([*found, *error.problems]) from None
        if found:
            raise InvalidConfiguration(found)
        return tree

    def shown(self, raw: DictConfig, part: str) -> str:
        """Composed values as YAML before anything is resolved: `job` ours, `hydra` Hydra's, `all` both."""
        values = unresolved(raw)
        hydra = values.pop("hydra")
        ours = (
            {} if part == "hydra" else complete(self.root, {str(key): item for key, item in values.items()})
        )
        return OmegaConf.to_yaml(OmegaConf.create(ours if part == "job" else {**ours, "hydra": hydra}))

    @staticmethod
    def resolved_yaml(tree: Any) -> str:
        """A typed tree as its config.yaml holds it."""
        return to_yaml(plain(tree))

    def multirun(self, overrides: Sequence[str], task: Any) -> list[Any]:
        """`task(raw)` for every combination of a sweep, in order, through Hydra's sweeper; the results."""
        with tempfile.TemporaryDirectory() as nowhere:  # Hydra makes a directory and a file of its own
            settings = quiet(overrides, f"hydra.sweep.dir='{nowhere}'")
            batches = self.hydra.multirun(
                self.config_name, task, [*settings, *overrides], with_log_configuration=False
            )
        return [job.return_value for batch in batches for job in batch]

    def request(self, arguments: Sequence[str], *, sweep: bool = False) -> Request:
        """Arguments as Hydra needs them, and the keys that this root does not have."""
        listed = self._listed_groups()
        result, problems = [], []
        for argument in arguments:
            try:
                override = OverridesParser.create().parse_override(argument)
            except HydraException as error:
                raise ValueError(unreadable(argument, error)) from None
            ours, problem = self._override(argument, override, listed)
            problems += [problem] if problem else []
            result += [ours] if ours else []
            if override.is_sweep_override() and not sweep and not override.is_hydra_override():
                raise ValueError(
                    f"{argument} gives several values: a list is written key=[a,b], text with a comma is "
                    "quoted, and a sweep over the values needs -m"
                )
        return Request(overrides=result, problems=problems)

    def _override(
        self, argument: str, override: Override, listed: set[str]
    ) -> tuple[str | None, Problem | None]:
        """One argument for Hydra, or what is wrong with it."""
        key, value = override.key_or_group, argument.partition("=")[2]
        if override.is_hydra_override() or key.startswith("hydra/"):
            return argument, None
        if override.is_delete():
            return None, Problem(
                key, f"~{key}: nothing can be removed, only given another value: {key}=VALUE"
            )
        if override.package is None and self._is_choice(key, override):
            return self._choice(key.replace(".", "/").removesuffix("/kind"), value, override, listed)
        if "/" in key or "@" in key or override.package is not None:
            close = difflib.get_close_matches(key, self.groups, n=1, cutoff=0.4)
            hint = f"; the nearest is {close[0]}" if close else f"; there are {', '.join(self.groups)}"
            return None, Problem(key, f"no such group of presets{hint}")
        if not accepts(self.root, key):
            return None, Problem(key, unknown_key(key, self.root))
        if "." not in key and key in self.groups:
            names = " | ".join(self.options(key))
            return None, Problem(key, f"{value} is no choice; give {key}={names}, or {key}.NAME=VALUE")
        return f"++{key}={value}", None

    def _is_choice(self, key: str, override: Override) -> bool:
        """Whether an override chooses a preset: of a group, or a variant of a union by its kind."""
        if isinstance(override.value(), dict | list):
            return False
        variants = {f"{path}.{form.discriminator}" for path, form, _ in unions(self.root)}
        return key in variants or ("." not in key and key in self.groups)

    def _choice(
        self, group: str, value: str, override: Override, listed: set[str]
    ) -> tuple[str | None, Problem | None]:
        options = self.options(group)
        names = [str(override.value())] if not override.is_sweep_override() else []
        for name in names:
            if name not in options and override.value() is not None:
                close = difflib.get_close_matches(name, options, n=1, cutoff=0.4)
                hint = f"the nearest is {close[0]}" if close else f"there are {', '.join(options)}"
                return None, Problem(group, f"{group}={name}: there is no such choice; {hint}")
        return (f"{group}={value}" if group in listed else f"+{group}={value}"), None

    def _listed_groups(self) -> set[str]:
        """The groups that the primary configuration chooses from; others are appended."""
        found = self.loader.repository.load_config(self.config_name)
        entries = found.defaults_list or [] if found else []
        return {
            entry.group.lstrip("/") for entry in entries if isinstance(entry, GroupDefault) and entry.group
        }


def store_variants(root: type) -> None:
    """Give every member of every union of the tree its preset: `position=rope` under the group `model`."""
    store = ConfigStore.instance()
    store.store(name=BLANK, node={})
    for path, form, _ in unions(root):
        for kind in form.kinds():
            store.store(
                group=path.replace(".", "/"), name=kind, node={form.discriminator: kind}, package=path
            )


def unresolved(node: DictConfig) -> dict[str, Any]:
    """Plain values with ${...} as they are written."""
    values = OmegaConf.to_container(node, resolve=False)
    assert isinstance(values, dict)
    return typing.cast(dict[str, Any], values)


def resolved(root: type, raw: DictConfig) -> dict[str, Any]:
    """Plain values with every default filled in and every ${...} replaced."""
    values = unresolved(raw)
    values.pop("hydra", None)
    full = OmegaConf.create(complete(root, values))
    result = OmegaConf.to_container(full, resolve=True, throw_on_missing=False)
    assert isinstance(result, dict)
    return {str(key): value for key, value in result.items()}


def unreadable(argument: str, error: Exception) -> str:
    if "=" not in argument:
        return f"cannot read the argument {argument!r}: write key=value"
    first = str(error).strip().splitlines()[0]
    return f"cannot read the argument {argument!r}: {first}; quote text with special characters: key='...'"


def is_composition_error(error: BaseException | None) -> bool:
    """Whether Hydra, OmegaConf or YAML found something wrong in what the user wrote."""
    return isinstance(error, HydraException) or is_file_error(error)


def composition_error(error: BaseException) -> str:
    """Such an error as one line."""
    if error.__cause__ is not None and is_composition_error(error.__cause__):
        error = error.__cause__
    return one_line(error)
