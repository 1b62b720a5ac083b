"""The one typed door: frozen dataclasses beside the code they configure, checked by pydantic.

`config` makes a section, `setting` one field of it, `parse` turns raw values into the typed tree.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, dataclass_transform

import pydantic

T = TypeVar("T")

OnResume = Literal["must_equal", "needs_override", "free"]


def setting(
    default: Any = dataclasses.MISSING,
    *,
    on_resume: OnResume,
    help: str,
    factory: Any = dataclasses.MISSING,
) -> Any:
    """One field of a configuration section.

    on_resume says what a changed value does when a run is resumed: `must_equal` refuses, `needs_override`
    wants the field named in `resume_override`, `free` is allowed.
    """
    metadata = {"on_resume": on_resume, "help": help}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting,))
def config(cls: type[T]) -> type[T]:
    """Class decorator: a frozen, keyword-only dataclass that refuses unknown keys."""
    cls.__pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def parse(cls: type[T], raw: Mapping[str, Any]) -> T:
    """The typed tree of `raw`, or ValueError that lists every error with its path."""
    return pydantic.TypeAdapter(cls).validate_python(dict(raw))


def union(discriminator: str) -> Any:
    """Annotation of a union of sections told apart by one field: `Annotated[A | B, union("kind")]`."""
    return pydantic.Field(discriminator=discriminator)
