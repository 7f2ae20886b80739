"""What a typed Python function says of itself as a tool: name, description, JSON schema, and a checker of arguments."""

import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec

from turngate.envs.base import ToolSpec

__all__ = ["Signature", "read_docstring", "read_signature"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What the OpenAI API allows."""
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Source|Sources):.*")
_ENTRY = re.compile(r"(\w+)(?: \([^)]*\))?:\s*(.*)")
_REF = "#/$defs/"


class Signature(msgspec.Struct, frozen=True):
    """A function read as a tool."""

    spec: ToolSpec
    arguments: type[msgspec.Struct]
    """Its fields are the parameters; those with defaults are UNSET when not given, so that the function's own hold."""
    takes_self: bool
    """True for a function of a class body: the instance is its first argument, and no argument of the tool."""


def read_signature(function: Callable[..., Any], *, name: str = "", description: str = "") -> Signature:
    """Read a function's name, docstring and annotations.

    Raises: TypeError: a parameter has no type, a type that JSON cannot carry, or cannot be passed by name.
        ValueError: the name is none that servers accept.
    """
    plain = _unwrapped(function)
    name = name or getattr(plain, "__name__", "")
    if not _NAME.fullmatch(name):
        raise ValueError(f"a tool's name must be 1 to 64 of A-Z a-z 0-9 _ -: got {name!r}; pass name=")
    parameters = list(inspect.signature(function).parameters.values())
    takes_self = bool(parameters) and parameters[0].name == "self"
    parameters = parameters[1:] if takes_self else parameters
    try:
        hints = typing.get_type_hints(plain, include_extras=True)
    except NameError as error:
        raise TypeError(f"annotations of a tool must be names of its module: {error} (tool {name})") from error
    types = {p.name: _type_of(p, hints, name) for p in parameters}
    summary, documented = read_docstring(inspect.getdoc(plain) or "")
    schema = _schema(parameters, types, documented, name)
    fields = [(p.name, types[p.name]) if _is_required(p) else _optional(p.name, types[p.name]) for p in parameters]
    arguments = msgspec.defstruct(name.replace("-", "_"), fields, kw_only=True, forbid_unknown_fields=True)
    return Signature(ToolSpec(name, description or summary, schema), arguments, takes_self)


def read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before its sections, and of each argument in the section `Args:`."""
    lines = doc.splitlines()
    heads = [index for index, line in enumerate(lines) if _SECTION.fullmatch(line)]
    summary = "\n".join(lines[: heads[0]] if heads else lines).strip()
    documented: dict[str, str] = {}
    for start, stop in pairwise([*heads, len(lines)]):
        if lines[start].startswith(("Args:", "Arguments:", "Parameters:")):
            documented |= _entries(lines[start].partition(":")[2], lines[start + 1 : stop])
    return summary, documented


def _entries(first: str, lines: list[str]) -> dict[str, str]:
    """Return `name: text` entries; what is indented deeper than the first of them goes on with the one above."""
    block = textwrap.dedent("\n".join(lines)).splitlines()
    entries: dict[str, str] = {}
    latest = ""
    for line in ([first.strip()] if first.strip() else []) + block:
        found = None if line.startswith((" ", "\t")) else _ENTRY.fullmatch(line)
        if found is not None:
            latest = found[1]
            entries[latest] = found[2].strip()
        elif latest and line.strip():
            entries[latest] = f"{entries[latest]} {line.strip()}".strip()
    return entries


def _unwrapped(function: Callable[..., Any]) -> Any:
    """Return the function whose annotations and docstring count."""
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    if not (inspect.isroutine(plain) or inspect.isclass(plain)):
        plain = type(plain).__call__
    return inspect.unwrap(plain)


def _type_of(parameter: inspect.Parameter, hints: dict[str, Any], tool: str) -> Any:
    where = f"(tool {tool}, parameter {parameter.name})"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TypeError(f"a tool's parameters must be passed by name: got a {parameter.kind.description} one {where}")
    if parameter.name not in hints:
        raise TypeError(f"a tool's parameters must have types: got none {where}; annotate it")
    return hints[parameter.name]


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _optional(name: str, kind: Any) -> tuple[str, Any, Any]:
    return name, kind | msgspec.UnsetType, msgspec.UNSET


def _schema(
    parameters: list[inspect.Parameter], types: dict[str, Any], documented: dict[str, str], tool: str
) -> dict[str, Any]:
    """Return the JSON schema of the arguments object, complete in itself."""
    try:
        schemas, components = msgspec.json.schema_components(list(types.values()), ref_template=_REF + "{name}")
    except TypeError as error:
        raise TypeError(f"a tool's parameters must have types that JSON can carry: {error} (tool {tool})") from error
    properties: dict[str, Any] = {}
    for parameter, raw in zip(parameters, schemas, strict=True):
        schema = dict(raw)
        if parameter.name in documented:
            schema.setdefault("description", documented[parameter.name])
        schema = _inlined(schema, components)
        if not _is_required(parameter):
            try:
                schema["default"] = msgspec.to_builtins(parameter.default, str_keys=True)
            except TypeError:
                pass  # a sentinel or the like: the schema can do without, and the function's own default holds
        properties[parameter.name] = schema
    required = [parameter.name for parameter in parameters if _is_required(parameter)]
    made = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    # What is left refers to itself, and must stay beside the schema that uses it.
    kept = {name: _inlined(component, components) for name, component in components.items()}
    used = {name for name in kept if f'"{_REF}{name}"' in msgspec.json.encode([made, kept]).decode()}
    return made | {"$defs": {name: kept[name] for name in sorted(used)}} if used else made


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    """Return a schema with what it refers to in the place of the reference: some servers know no `$ref`."""
    if isinstance(schema, list):
        return [_inlined(one, components) for one in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix(_REF)
    if name in components:
        if _is_recursive(name, components):
            return schema
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inlined({**components[name], **rest}, components)
    return {key: _inlined(value, components) for key, value in schema.items()}


def _is_recursive(name: str, components: dict[str, Any]) -> bool:
    """True when a component refers to itself, directly or through others."""
    seen, todo = set[str](), [name]
    while todo:
        text = msgspec.json.encode(components[todo.pop()]).decode()
        for other in components:
            if f'"{_REF}{other}"' in text:
                if other == name:
                    return True
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
    return False
