"""The types of a tool's parameters, and texts as values of them, for dialects that write strings without quotes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from luce.text.json_reader import json_text
from luce.text.marks import quoted

Schema = Mapping[str, Any]
#: the types that a parameter has, by the schema of all parameters and its name
ParameterTypes = Callable[[Schema | None, str], frozenset[str]]

# References and unions of a schema that are followed.
_DEPTH = 16
_CONTAINERS = frozenset({"object", "array"})
_PYTHON = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def parameter_types(schema: Schema | None, parameter: str) -> frozenset[str]:
    """The JSON types that a parameter may have, of the schema of all parameters; empty: any."""
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    found = properties.get(parameter) if isinstance(properties, Mapping) else None
    return frozenset(_types(found, schema, _DEPTH)) if isinstance(found, Mapping) else frozenset()


def certain_types(schema: Schema | None, parameter: str) -> frozenset[str]:
    """The types as of parameter_types, but a scalar that may be a string is one: the texts `True` and `true` of such a
    parameter are two values, although `typed` reads both as a boolean."""
    found = parameter_types(schema, parameter)
    if found and "string" not in found:
        return found
    return ((found or _CONTAINERS) & _CONTAINERS) | {"string"}


def decides_early(types: frozenset[str], first: str) -> bool:
    """Whether a value whose text begins with this character is a string: it is one, or no other type begins so."""
    return types == {"string"} or ("string" in types and first not in '{[-0123456789tfnTFN"' and not first.isspace())


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that stands between tags.

    A parameter that is only a string has the text as it is. One that is no string has it as JSON, one of several types
    as JSON if the value has one of the others. What is no JSON is a string.
    """
    found = None if types == {"string"} else json_text(text)
    if found is None or (found[0] == '"' and (not types or "string" in types)):
        return f'"{quoted(text)}"'
    if types and "string" in types and not _kinds(found) & types:
        return f'"{quoted(text)}"'
    return found


def _kinds(value: str) -> set[str]:
    """The types that a JSON text has."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    if value[0] in kinds:
        return {kinds[value[0]]}
    return {"number"} if any(char in ".eE" for char in value) else {"number", "integer"}


def _types(schema: Schema, root: Schema, depth: int) -> Iterator[str]:
    if not depth:
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str):
            yield kind.lower()
    if kinds is not None:
        return
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    for value in values:
        yield _PYTHON.get(type(value), "null")
    for name in ("anyOf", "oneOf", "allOf"):
        arms = schema.get(name)
        for arm in arms if isinstance(arms, list) else ():
            if isinstance(arm, Mapping):
                yield from _types(arm, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and isinstance(found := _found(reference, root), Mapping):
        yield from _types(found, root, depth - 1)


def _found(reference: str, root: Schema) -> Any:
    """What a local reference names, None if nothing."""
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
