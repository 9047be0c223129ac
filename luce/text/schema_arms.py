"""What the arms of a plain schema mean together: whether they exclude each other, how many ways they combine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from luce.text import schema_limits
from luce.text.schema_limits import SchemaError, too_complex

_Json = dict[str, Any]
_REF = "#/$defs/"


def exclusive(arms: Sequence[Any], defs: Mapping[str, Any]) -> bool:
    """Whether no instance is one of two arms: they differ in their types, their values, or the values of a property
    that all of them require."""
    found = [_target(arm, defs) for arm in arms]
    if not all(isinstance(arm, dict) for arm in found):
        return False
    if _distinct([_kinds(arm) for arm in found]) or _distinct([_values(arm) for arm in found]):
        return True
    tags = set.intersection(*(set(arm.get("required", ())) & arm.get("properties", {}).keys() for arm in found))
    objects = all(arm.get("type") == "object" for arm in found)
    return objects and any(
        _distinct([_values(_target(arm["properties"][tag], defs)) for arm in found]) for tag in sorted(tags)
    )


def _distinct(sets: Sequence[frozenset[str]]) -> bool:
    """Whether no two of the sets share a member; an empty one says nothing."""
    return all(sets) and sum(map(len, sets)) == len(frozenset().union(*sets))


def _kinds(schema: _Json) -> frozenset[str]:
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    # An integer is a number.
    return frozenset(kinds | {"integer"} if "number" in kinds else kinds)


def _values(schema: Any) -> frozenset[str]:
    """The values that `const` or `enum` allow, as JSON; empty: any."""
    if not isinstance(schema, dict):
        return frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return frozenset(json.dumps(_number(value), sort_keys=True) for value in values)


def _number(value: Any) -> Any:
    """JSON has one number for 1 and 1.0."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _target(schema: Any, defs: Mapping[str, Any]) -> Any:
    """A schema behind its references; there are no loops of them alone."""
    seen = 0
    while isinstance(schema, dict) and schema.keys() == {"$ref"} and seen <= len(defs):
        schema = defs[schema["$ref"].removeprefix(_REF)]
        seen += 1
    return schema


def check_arms(root: Any, defs: Mapping[str, Any], pointers: Mapping[str, str]) -> None:
    """Raises SchemaError for a schema that is defined by itself, and for too many combinations of arms. `pointers`:
    paths of the definitions."""
    ways: dict[str, int] = {}
    # Definitions in the order in which each comes behind those that it needs; a chain of them may be long.
    for name in _ordered(defs, pointers):
        ways[name] = _ways(defs[name], ways, pointers[name])
    _ways(root, ways, "")
    for schema in (root, *defs.values()):
        for inner in _inner(schema):
            _ways(inner, ways, "")


def _ordered(defs: Mapping[str, Any], pointers: Mapping[str, str]) -> Iterator[str]:
    done: set[str] = set()
    for first in defs:
        open_names: dict[str, Iterator[str]] = {first: _same(defs[first])} if first not in done else {}
        while open_names:
            name = next(reversed(open_names))
            needed = next((other for other in open_names[name] if other not in done), None)
            if needed is None:
                del open_names[name]
                done.add(name)
                yield name
            elif needed in open_names:
                raise SchemaError(f"{pointers[needed]}.$ref", "refers to itself", "invalid_schema")
            else:
                open_names[needed] = _same(defs[needed])


def _same(schema: Any) -> Iterator[str]:
    """Names of definitions that say something about the same instance."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield schema["$ref"].removeprefix(_REF)
    for key in ("anyOf", "oneOf", "allOf"):
        for arm in schema.get(key, ()):
            yield from _same(arm)


def _ways(schema: Any, ways: Mapping[str, int], path: str) -> int:
    """In how many ways the arms of a schema about one instance combine."""
    if not isinstance(schema, dict):
        return 1
    found = ways[schema["$ref"].removeprefix(_REF)] if "$ref" in schema else 1
    for key in ("anyOf", "oneOf"):
        found *= max(sum(_ways(arm, ways, path) for arm in schema.get(key, ())), 1)
    for arm in schema.get("allOf", ()):
        found *= _ways(arm, ways, path)
    combined = "allOf" in schema or {"anyOf", "oneOf"} <= schema.keys()
    if combined and found > schema_limits.MAX_ARMS:
        raise too_complex(
            path, f"combines {found:,} arms of anyOf and oneOf, expected at most {schema_limits.MAX_ARMS:,}"
        )
    return found


def _inner(schema: Any) -> Iterator[Any]:
    """The schemas inside a plain schema, about other instances or the same."""
    if not isinstance(schema, dict):
        return
    nested = [schema[key] for key in ("items", "additionalProperties") if key in schema]
    for key in ("properties", "patternProperties"):
        nested += schema.get(key, {}).values()
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        nested += schema.get(key, ())
    for inner in nested:
        yield inner
        yield from _inner(inner)
