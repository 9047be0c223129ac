"""A tool's parameters by their schema, and texts as values of them, for dialects that do not write JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from luce.text.json_reader import json_text
from luce.text.marks import quoted
from luce.text.schema_refs import References

Schema = Mapping[str, Any]

# References and unions of a schema that are followed.
_DEPTH = 16
_CONTAINERS = frozenset({"object", "array"})
_PYTHON = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Parameter(NamedTuple):
    """The types and the values that the schema of a parameter allows."""

    #: JSON types; empty: any; "json": the type that the text has as JSON
    types: frozenset[str]
    #: the values that an enum or a const names, of these types; empty: any
    values: tuple[Any, ...] = ()


#: a parameter, by the schema of all parameters and its name
ParameterOf = Callable[[Schema | None, str], Parameter]


def parameter_of(schema: Schema | None, name: str) -> Parameter:
    """A parameter, by the schema of all parameters and its name."""
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    if not isinstance(found, Mapping):
        return Parameter(frozenset())
    references = References(schema)
    types = frozenset(_types(found, references, _DEPTH))
    values = _values(found, references, _DEPTH)
    return Parameter(types, tuple(value for value in values if kind_of(value) in _spread(types)))


def certain_parameter_of(schema: Schema | None, name: str) -> Parameter:
    """As parameter_of, but a scalar that may be a string is one, and values are not looked at: the texts `True` and
    `true` of such a parameter are two values, although `typed` reads both as a boolean."""
    found = parameter_of(schema, name).types
    if not found or "string" in found:
        found = ((found or _CONTAINERS) & _CONTAINERS) | {"string"}
    return Parameter(found)


def names_in(schema: Any) -> list[str]:
    """The keys of all objects in a schema, and the names that are required, the longest first: those that calls have,
    and others."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            found.update(value)
            waiting += value.values()
            if isinstance(required := value.get("required"), list):
                found.update(name for name in required if isinstance(name, str))
        elif isinstance(value, list):
            waiting += value
    return sorted(found, key=lambda name: (-len(name), name))


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    return _PYTHON.get(type(value), "null")


def named_values(schema: Schema) -> list[Any] | None:
    """The values that `const` or `enum` names; None: any."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def decides_early(types: frozenset[str], first: str) -> bool:
    """Whether a value whose text begins with this character is a string: it is one, or no other type begins so."""
    return types == {"string"} or ("string" in types and first not in '{[-0123456789tfnTFN"' and not first.isspace())


def typed(text: str, parameter: Parameter) -> str:
    """The JSON text of a value that stands between tags.

    A parameter that is only a string has the text as it is. One that is no string has it as JSON, one of several types
    as JSON if the value has one of the others, or is the one that `written` writes so. What is no JSON is a string.
    """
    types = parameter.types
    found = None if types == {"string"} else json_text(text)
    if found is None:
        return f'"{quoted(text)}"'
    if parameter.values and (known := _known(text, found, parameter.values)) is not None:
        return known
    if found[0] == '"' and (not types or "string" in types):
        return f'"{quoted(text)}"'
    if types and "string" in types and not _kinds(found) & types:
        return f'"{quoted(text)}"'
    return found


def written(value: Any, values: Sequence[Any]) -> str:
    """The text between tags for one of the values that a parameter may have. A string is itself, with JSON's quotation
    marks if another value is written so without them."""
    if not isinstance(value, str):
        return json.dumps(value)
    found = json_text(value)
    return value if found is None or not _has(values, found) else json.dumps(value, ensure_ascii=False)


def _known(text: str, found: str, values: Sequence[Any]) -> str | None:
    """The JSON text of the value that is written as this text, which as JSON is `found`; None if none is."""
    if _has(values, found):
        return found
    if text in values:
        return f'"{quoted(text)}"'
    return found if found[0] == '"' and json.loads(found) in values else None


def _has(values: Sequence[Any], found: str) -> bool:
    """Whether a JSON text is that of one of the values that are no strings."""
    return any(not isinstance(value, str) and json.dumps(value) == found for value in values)


def _spread(types: frozenset[str]) -> frozenset[str]:
    """The types with those that they include."""
    return types | {"integer"} if "number" in types else types


def _kinds(value: str) -> set[str]:
    """The types that a JSON text has."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    if value[0] in kinds:
        return {kinds[value[0]]}
    return {"number"} if any(char in ".eE" for char in value) else {"number", "integer"}


def _types(schema: Schema, references: References, depth: int) -> Iterator[str]:
    if not depth:
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str):
            yield kind.lower()
    if kinds is not None:
        return
    for value in named_values(schema) or ():
        yield kind_of(value)
    for name in ("anyOf", "oneOf", "allOf"):
        arms = schema.get(name)
        for arm in arms if isinstance(arms, list) else ():
            if isinstance(arm, Mapping):
                yield from _types(arm, references, depth - 1)
    if (found := _referred(schema, references)) is not None:
        yield from _types(found, references, depth - 1)


def _values(schema: Schema, references: References, depth: int) -> Sequence[Any]:
    """The values that a schema names, behind references too; none: any."""
    if depth and (found := _referred(schema, references)) is not None:
        return _values(found, references, depth - 1)
    return named_values(schema) or ()


def _referred(schema: Schema, references: References) -> Schema | None:
    """The schema that a schema refers to, None if none."""
    reference = schema.get("$ref")
    target = references.find(reference) if isinstance(reference, str) else None
    return target.schema if target is not None and isinstance(target.schema, Mapping) else None
