"""The one typed door: frozen dataclasses beside the code they configure, checked by pydantic.

`config` makes a section, `setting` one field of it, `parse` turns raw values into the typed tree.
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, dataclass_transform

import pydantic

from conf.schema import MISSING, OnResume, Shape, complete, described, hints, nearest, paths, shape

T = TypeVar("T")

# Whole numbers may stand for text (run.name=7); neither nan nor infinity is ever a meaningful setting.
RULES = pydantic.ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)


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
    cls.__pydantic_config__ = RULES  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def union(discriminator: str) -> Any:
    """Annotation of a union of sections told apart by one field: `Annotated[A | B, union("kind")]`."""
    return pydantic.Field(discriminator=discriminator)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration. path: dotted, empty for the whole."""

    path: str
    message: str

    def __str__(self) -> str:
        said = not self.path or self.message.startswith(self.path)
        return self.message if said else f"{self.path}: {self.message}"


class InvalidConfiguration(ValueError):
    """Everything that is wrong with a configuration, each with its path, the value and the way out."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        lines = [str(problem) for problem in problems]
        if len(lines) > 1:
            keys = ", ".join(problem.path for problem in problems if problem.path)
            lines = [f"{len(lines)} errors in the configuration: {keys}", *(f"  {line}" for line in lines)]
        super().__init__("\n".join(lines))


def parse(cls: type[T], raw: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> T:
    """The typed tree of `raw`, defaults filled in; InvalidConfiguration (a ValueError) lists every error.

    origins: dotted path -> the file that gave it, for the messages.
    """
    door = _Door(cls, origins or {})
    tree = door.section(cls, complete(cls, raw), "")
    if door.problems:
        raise InvalidConfiguration(door.problems)
    return typing.cast(T, tree)


FAILED = object()  # stands for a value that is wrong and has been reported


class _Door:
    """One walk over the raw values; collects what is wrong."""

    def __init__(self, root: type, origins: Mapping[str, str]) -> None:
        self.root = root
        self.origins = origins
        self.problems: list[Problem] = []

    def refuse(self, path: str, message: str) -> Any:
        origin = self.origins.get(path)
        self.problems.append(Problem(path, f"{message} (in {origin})" if origin else message))
        return FAILED

    def section(self, section: type, raw: Mapping[str, Any], prefix: str) -> Any:
        """The section, or FAILED."""
        known = hints(section)
        for key in raw:
            if key not in known:
                self.refuse(f"{prefix}{key}", unknown_key(f"{prefix}{key}", self.root))
        values = {}
        for field in dataclasses.fields(section):
            path = f"{prefix}{field.name}"
            value = raw.get(field.name, MISSING)
            if isinstance(value, str) and value == MISSING:
                values[field.name] = self.refuse(
                    path, f"{path} must be given: {path}=VALUE ({field.metadata['help']})"
                )
            else:
                values[field.name] = self.value(known[field.name], value, path)
        if any(value is FAILED for value in values.values()) or any(key not in known for key in raw):
            return FAILED
        try:
            return section(**values)
        except InvalidConfiguration as error:
            self.problems += error.problems
            return FAILED
        except ValueError as error:
            return self.refuse(prefix.rstrip("."), str(error))

    def value(self, hint: Any, value: Any, path: str) -> Any:
        form = shape(hint)
        if not form.members:
            return self.leaf(hint, value, path)
        if value is None and form.optional:
            return None
        if form.container == "list" and isinstance(value, list | tuple):
            element = dataclasses.replace(form, container=None)
            items = [self.member(element, item, f"{path}.{index}") for index, item in enumerate(value)]
            if any(item is FAILED for item in items):
                return FAILED
            return tuple(items) if "tuple" in str(hint) else items
        if form.container == "dict" and isinstance(value, Mapping):
            element = dataclasses.replace(form, container=None)
            named = {str(key): self.member(element, item, f"{path}.{key}") for key, item in value.items()}
            return FAILED if any(item is FAILED for item in named.values()) else named
        if form.container:
            example = "[{...}, ...]" if form.container == "list" else "{NAME: {...}, ...}"
            return self.refuse(path, f"{value!r} is not a {form.container}; give {path}={example}")
        return self.member(form, value, path)

    def member(self, form: Shape, value: Any, path: str) -> Any:
        """One section out of the members of `form`."""
        if not isinstance(value, Mapping):
            if form.is_union:
                return self.refuse(path, wrong_variant(value, form, path))
            keys = ", ".join(f"{path}.{name}" for name in hints(form.members[0]))
            return self.refuse(path, f"{value!r} is not a section; give its keys: {keys}")
        member = form.member(value)
        if member is None:
            key = f"{path}.{form.discriminator}"
            names = list(form.kinds())
            if form.discriminator not in value:
                return self.refuse(key, f"{key} must be given: one of {', '.join(names)}")
            return self.refuse(key, wrong_choice(value[form.discriminator], names))
        return self.variant(form, member, value, path)

    def variant(self, form: Shape, member: type, value: Mapping[str, Any], path: str) -> Any:
        """A section whose keys may belong to another member of its union."""
        if not form.is_union:
            return self.section(member, value, f"{path}.")
        kind, foreign = value.get(form.discriminator), False
        for key in value:
            others = [k for k, other in form.kinds().items() if key in hints(other)]
            if key not in hints(member) and others:
                foreign = True
                self.refuse(
                    f"{path}.{key}",
                    f"{path}.{key} belongs to {path}.{form.discriminator}={' or '.join(others)}, "
                    f"but it is {kind}; leave it out or choose that",
                )
        ours = {
            key: item for key, item in value.items() if key in hints(member) or not self.foreign(form, key)
        }
        result = self.section(member, ours, f"{path}.")
        return FAILED if foreign else result

    @staticmethod
    def foreign(form: Shape, key: str) -> bool:
        return any(key in hints(member) for member in form.members)

    def leaf(self, hint: Any, value: Any, path: str) -> Any:
        """A plain value, converted by pydantic."""
        if isinstance(value, Mapping) and value and "dict" not in str(hint):
            key = f"{path}.{next(iter(value))}"
            return self.refuse(key, f"no such key; {path} is one value ({described(hint)})")
        if holds_bool(value) and not takes_bool(hint):
            return self.refuse(path, f"{value!r} is not {expected(hint)}")
        try:
            return adapter(hint).validate_python(value)
        except pydantic.ValidationError as error:
            return self.refuse(path, wrong_value(hint, value, error))


@functools.cache
def adapter(hint: Any) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(hint, config=RULES)


def holds_bool(value: Any) -> bool:
    """pydantic would read true as the number 1."""
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(holds_bool, value)))


def takes_bool(hint: Any) -> bool:
    if hint in (bool, Any, object):
        return True
    if typing.get_origin(hint) is Literal:
        return any(isinstance(choice, bool) for choice in typing.get_args(hint))
    return any(takes_bool(argument) for argument in typing.get_args(hint))


def unknown_key(path: str, root: type) -> str:
    """There is no such key, and which one was probably meant."""
    valid = paths(root)
    meant = nearest(path, valid)
    if meant is not None:
        ours = [*path.split("."), *"*" * len(meant)]
        named = [own if part == "*" else part for part, own in zip(meant.split("."), ours, strict=False)]
        return f"no such key; the nearest is {'.'.join(named)}"
    parent = path.rpartition(".")[0]
    while parent and parent not in valid:
        parent = parent.rpartition(".")[0]
    names = [p.rpartition(".")[2] for p in valid if p.rpartition(".")[0] == parent]
    where = f"in {parent}" if parent else "at the top"
    return f"no such key; {where} there are {', '.join(names)}"


def wrong_choice(value: Any, names: list[str]) -> str:
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"; the nearest is {close[0]}" if close else ""
    return f"{value!r} is not one of {', '.join(map(str, names))}{hint}"


def wrong_variant(value: Any, form: Shape, path: str) -> str:
    """Where a member of a union is asked for by its bare name: how one is chosen."""
    names, group = list(form.kinds()), path.replace(".", "/")
    known = value if value in names else next(iter(difflib.get_close_matches(str(value), names, n=1)), None)
    example = known or "NAME"
    there = "" if known else f" (NAME is one of {', '.join(names)})"
    return (
        f"{value!r} is not a section; give {group}={example} or {path}.{form.discriminator}={example}{there}"
    )


EXPECTED = {
    int: "a whole number",
    float: "a number such as 0.1 or 1e-4",
    bool: "true or false",
    str: "text",
}


def expected(hint: Any) -> str:
    while typing.get_origin(hint) is typing.Annotated:
        hint = hint.__origin__
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(expected(argument) for argument in typing.get_args(hint))
    if hint is type(None):
        return "null"
    return EXPECTED.get(hint, described(hint))


def wrong_value(hint: Any, value: Any, error: pydantic.ValidationError) -> str:
    """What a value should have been, in our words where the type alone says it."""
    choices = [c for part in (hint, *typing.get_args(hint)) for c in literal(part)]
    if choices:
        return wrong_choice(value, choices)
    details = error.errors(include_url=False, include_context=False)
    inside = [detail for detail in details if detail["loc"] and isinstance(detail["loc"][0], int)]
    if inside:
        detail = inside[0]
        return f"{value!r}, item {detail['loc'][0]}: {detail['msg']}; give {described(hint)}"
    if all(
        "_type" in detail["type"] or "_parsing" in detail["type"] or "int" in detail["type"]
        for detail in details
    ):
        return f"{value!r} is not {expected(hint)}"
    return f"{value!r}: {details[0]['msg']}; give {expected(hint)}"


def literal(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
