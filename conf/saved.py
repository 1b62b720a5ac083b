"""Configurations as YAML files, written and read back to the same values. Needs no Hydra."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


def read(file: Path) -> dict[str, Any]:
    """The values of a YAML file, ${...} as written; ValueError when it cannot be read."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except Exception as error:
        if isinstance(error, OSError):
            raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
        if not isinstance(error, UnicodeDecodeError) and not is_file_error(error):
            raise
        raise ValueError(f"{file} cannot be read: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} must be a mapping of keys to values")
    return {str(key): value for key, value in values.items()}


def to_yaml(values: Mapping[str, Any]) -> str:
    """Plain values as YAML that `read` and our door turn back into the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(escaped(values))))


def escaped(value: Any) -> Any:
    """Text that only looks like an interpolation is kept as text."""
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def is_file_error(error: BaseException | None) -> bool:
    """Whether OmegaConf or YAML found something wrong in a file."""
    yaml_error = any(base.__name__ == "YAMLError" for base in type(error).__mro__)
    return yaml_error or isinstance(error, OmegaConfBaseException)


def one_line(error: BaseException) -> str:
    """The message of an error without its line breaks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines) or type(error).__name__
