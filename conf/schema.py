"""What a tree of sections looks like: its fields, its variants, its defaults, and what changed between two.

A section is a dataclass made by `conf.typed.config`. A union of sections is told apart by its discriminator,
the field `kind`. Paths are dotted: `model.position.base`; `*` stands for a free name or an index.
"""

import dataclasses
import difflib
import enum
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Union

OnResume = Literal["must_equal", "needs_override", "free"]
MISSING = "???"  # a value that a file leaves for the user to give
NO_DEFAULT = object()


@dataclass(frozen=True)
class Shape:
    """What a field may hold. members: sections it may be, () for a plain value; container: of what."""

    members: tuple[type, ...] = ()
    container: Literal["list", "dict"] | None = None
    optional: bool = False
    discriminator: str = "kind"

    @property
    def is_union(self) -> bool:
        return len(self.members) > 1

    def kinds(self) -> dict[str, type]:
        """Every value of the discriminator and the section it stands for."""
        return {kind: member for member in self.members for kind in kinds(member, self.discriminator)}

    def member(self, raw: Any, default: Any = None) -> type | None:
        """The section that `raw` is meant to be; None when its kind is unknown."""
        if len(self.members) == 1:
            return self.members[0]
        for source in (raw, default):
            if isinstance(source, Mapping) and self.discriminator in source:
                kind = source[self.discriminator]
                return self.kinds().get(kind) if isinstance(kind, str) else None
        return None


@dataclass(frozen=True)
class Field:
    """One row of the table of fields. variant: `kind=wsd` when only that member of a union has it."""

    path: str
    type: str
    default: Any  # plain value, or NO_DEFAULT when the field must be given
    help: str
    on_resume: OnResume
    variant: str | None = None

    def __hash__(self) -> int:  # a default may be a list
        return hash((self.path, self.type, self.help, self.on_resume, self.variant))


@dataclass(frozen=True)
class Difference:
    """One field that changed, as plain values; a field that one side does not have is None there."""

    path: str
    old: Any
    new: Any
    on_resume: OnResume


@functools.cache
def hints(section: type) -> dict[str, Any]:
    """Field name -> annotation, in the order of definition."""
    resolved = typing.get_type_hints(section, include_extras=True)
    return {field.name: resolved[field.name] for field in dataclasses.fields(section)}


@functools.cache
def shape(hint: Any) -> Shape:
    """The shape of an annotation."""
    discriminator = "kind"
    while typing.get_origin(hint) is typing.Annotated:
        for extra in hint.__metadata__:
            discriminator = getattr(extra, "discriminator", None) or discriminator
        hint = hint.__origin__
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return Shape(members=(hint,))
    if origin in (Union, types.UnionType):
        arguments = typing.get_args(hint)
        inner = [shape(argument) for argument in arguments if argument is not type(None)]
        optional = type(None) in arguments
        if len(inner) == 1:
            return dataclasses.replace(inner[0], optional=True)
        if all(one.members and one.container is None for one in inner):
            members = tuple(member for one in inner for member in one.members)
            return Shape(members=members, optional=optional, discriminator=discriminator)
        return Shape(optional=optional)
    if origin in (list, tuple, dict):
        arguments = [argument for argument in typing.get_args(hint) if argument is not Ellipsis]
        element = shape(arguments[-1]) if arguments else Shape()
        if element.members:
            return dataclasses.replace(element, container="dict" if origin is dict else "list")
    return Shape()


def kinds(section: type, discriminator: str = "kind") -> tuple[str, ...]:
    """The values of the discriminator that stand for this section."""
    hint = hints(section).get(discriminator)
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def plain(value: Any) -> Any:
    """Sections, tuples, paths and enumerations as dictionaries, lists and text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, PurePath) else value


def default_of(field: dataclasses.Field) -> Any:
    """The default of a dataclass field as a plain value, or NO_DEFAULT."""
    if field.default is not dataclasses.MISSING:
        return plain(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return plain(field.default_factory())
    return NO_DEFAULT


def complete(section: type, raw: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`raw` with the default of every field it does not give; nothing is checked, unknown keys stay.

    base: what the enclosing section has as default for this one.
    """
    result = dict(raw)
    for field in dataclasses.fields(section):
        default = base[field.name] if base and field.name in base else default_of(field)
        if field.name not in raw:
            if default is not NO_DEFAULT:
                result[field.name] = default
            continue
        value, form = raw[field.name], shape(hints(section)[field.name])
        if form.members:
            result[field.name] = _complete_value(form, value, default)
    return {name: result[name] for name in [*hints(section), *result] if name in result}


def _complete_value(form: Shape, value: Any, default: Any) -> Any:
    if form.container == "list" and isinstance(value, list):
        return [_complete_value(dataclasses.replace(form, container=None), item, None) for item in value]
    if form.container == "dict" and isinstance(value, Mapping):
        element = dataclasses.replace(form, container=None)
        return {key: _complete_value(element, item, None) for key, item in value.items()}
    if form.container is not None or not isinstance(value, Mapping):
        return value
    member = form.member(value, default)
    if member is None:
        return value
    same = isinstance(default, Mapping) and form.member(default) is member
    result = complete(member, value, default if same else None)
    if form.is_union and same and form.discriminator not in value:
        result[form.discriminator] = default[form.discriminator]
    return result


def fields(section: type, prefix: str = "", variant: str | None = None) -> list[Field]:
    """Every field of a tree of sections, in order, those of all variants included."""
    found: list[Field] = []
    for field in dataclasses.fields(section):
        path, hint = f"{prefix}{field.name}", hints(section)[field.name]
        form = shape(hint)
        if not form.members or form.container or form.optional:
            found.append(
                Field(
                    path=path,
                    type=described(hint),
                    default=default_of(field),
                    help=field.metadata["help"],
                    on_resume=field.metadata["on_resume"],
                    variant=variant,
                )
            )
        inside = f"{path}.*." if form.container else f"{path}."
        if form.is_union:
            found += _variant_fields(form, inside, default_of(field))
        elif form.members:
            found += fields(form.members[0], inside, variant)
    return found


def _variant_fields(form: Shape, prefix: str, default: Any) -> list[Field]:
    """The rows of a union: the discriminator, what all members share, what only some have."""
    key = f"{prefix}{form.discriminator}"
    rows: dict[Field, list[str]] = {}
    for member in form.members:
        for row in fields(member, prefix):
            if row.path != key:
                rows.setdefault(row, []).append("|".join(kinds(member, form.discriminator)))
    own = {f.name: f for f in dataclasses.fields(form.members[0])}[form.discriminator].metadata
    kind = default[form.discriminator] if isinstance(default, Mapping) else NO_DEFAULT
    first = Field(key, " | ".join(form.kinds()), kind, own["help"], own["on_resume"])
    shared = [row for row, members in rows.items() if len(members) == len(form.members)]
    some = [
        dataclasses.replace(row, variant=_variant(row, prefix, f"{form.discriminator}={'|'.join(members)}"))
        for row, members in rows.items()
        if len(members) < len(form.members)
    ]
    return [first, *shared, *some]


def _variant(row: Field, prefix: str, outer: str) -> str:
    """The members that have a row; in a union within a union of both: `kind=rope, scaling.kind=yarn`."""
    if row.variant is None:
        return outer
    section = row.path.removeprefix(prefix).rpartition(".")[0]
    return f"{outer}, {section}.{row.variant}"


def described(hint: Any) -> str:
    """An annotation in words: `int | null`, `none | block`, `list[int]`."""
    while typing.get_origin(hint) is typing.Annotated:
        hint = hint.__origin__
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "null"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(described(argument) for argument in arguments)
    if origin is not None:
        inner = [described(argument) for argument in arguments if argument is not Ellipsis]
        return f"{'list' if origin is tuple else origin.__name__}[{', '.join(inner)}]"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def unions(section: type, prefix: str = "") -> Iterator[tuple[str, Shape, str | None]]:
    """(path, shape, kind of the default) of every union of the tree that is no list or dictionary."""
    for field in dataclasses.fields(section):
        form = shape(hints(section)[field.name])
        if form.container or not form.members:
            continue
        if form.is_union:
            default = default_of(field)
            kind = default[form.discriminator] if isinstance(default, Mapping) else None
            yield f"{prefix}{field.name}", form, kind
        for member in form.members:
            yield from unions(member, f"{prefix}{field.name}.")


def accepts(section: type, path: str) -> bool:
    """Whether some variant of the tree has this dotted path, be it a section, a value or inside one."""
    first, _, rest = path.partition(".")
    if first not in hints(section):
        return False
    hint = hints(section)[first]
    form = shape(hint)
    if not rest:
        return True
    if form.container:
        _, _, rest = rest.partition(".")
        if not rest:
            return True
    if form.members:
        return any(accepts(member, rest) for member in form.members)
    while typing.get_origin(hint) is typing.Annotated:
        hint = hint.__origin__
    candidates = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any((typing.get_origin(one) or one) in (dict, list) for one in candidates)


def paths(section: type) -> list[str]:
    """Every dotted path a user may write, sections included, each once."""
    found: dict[str, None] = {}
    for field in fields(section):
        parts = field.path.split(".")
        for stop in range(1, len(parts) + 1):
            if parts[stop - 1] != "*":
                found[".".join(parts[:stop])] = None
    return list(found)


def nearest(path: str, valid: list[str]) -> str | None:
    """The valid path most likely meant: a neighbour spelt alike, the same name elsewhere, or one alike."""
    parent, _, leaf = path.rpartition(".")
    if parent in valid and not any(p.startswith(f"{parent}.") for p in valid):
        return parent  # a key below a value
    neighbours = {p.rpartition(".")[2]: p for p in valid if p.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(leaf, neighbours, n=1, cutoff=0.75)
    if close:
        return neighbours[close[0]]
    same_name = [p for p in valid if p.rpartition(".")[2] == leaf]
    if same_name:
        return max(same_name, key=lambda p: (similarity(p, path), -len(p)))
    alike = {
        p: max(similarity(p, path), similarity(p.rpartition(".")[2], leaf) - 0.1)
        for p in valid
        if p != parent
    }
    best = max(alike, key=lambda p: (alike[p], -len(p)), default=None)
    return best if best is not None and alike[best] >= 0.6 else None


def similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def differences(old: Any, new: Any) -> list[Difference]:
    """What a resumed run changes: each field in which `old` and `new` differ, in the order of definition.

    new: a typed tree. old: a typed tree of the same class or its plain form, as a saved configuration has it;
    a field that is newer than the saved configuration counts as having had its default.
    """
    section = type(new)
    return list(_section_differences(section, complete(section, plain(old)), plain(new), ""))


def _section_differences(section: type, old: Mapping, new: Mapping, prefix: str) -> Iterator[Difference]:
    for field in dataclasses.fields(section):
        path, name, form = f"{prefix}{field.name}", field.name, shape(hints(section)[field.name])
        yield from _value_differences(form, old.get(name), new.get(name), path, field.metadata["on_resume"])
    for name in old:
        if name not in hints(section):  # a setting that no longer exists, or of another variant
            yield Difference(f"{prefix}{name}", old[name], None, "needs_override")


def _value_differences(form: Shape, old: Any, new: Any, path: str, rule: OnResume) -> Iterator[Difference]:
    if old == new:
        return
    element = dataclasses.replace(form, container=None)
    if form.container == "dict" and isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*new, *(name for name in old if name not in new)]:
            yield from _value_differences(element, old.get(name), new.get(name), f"{path}.{name}", rule)
        return
    if form.container == "list" and isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _value_differences(element, before, after, f"{path}.{index}", rule)
        return
    member = form.member(new) if form.members and form.container is None else None
    if member is None or not isinstance(old, Mapping) or not isinstance(new, Mapping):
        yield Difference(path, old, new, rule)
        return
    if form.member(old) is not member:  # another variant: its own fields have no counterpart
        old = {name: value for name, value in old.items() if name in hints(member)}
        old = {**{name: new[name] for name in new if name not in old}, **old}
    yield from _section_differences(member, old, new, f"{path}.")
