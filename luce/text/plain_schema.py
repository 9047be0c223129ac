"""JSON schemas as the grammar library takes them: without annotations, and with only what it enforces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from luce.text import schema_limits
from luce.text.schema_arms import check_arms, exclusive
from luce.text.schema_bounds import bound_integers, close_bounds, number_bounds
from luce.text.schema_limits import SchemaError, too_complex
from luce.text.schema_pattern import has_lookaround, rust_pattern
from luce.text.schema_refs import References

_Json = dict[str, Any]

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
#: formats of strings that the library enforces
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
#: keywords that change no instance
_ANNOTATIONS = frozenset(
    [
        "$schema",
        "$comment",
        "$vocabulary",
        "$anchor",
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "nullable",
        "discriminator",
        "xml",
        "externalDocs",
        "enumNames",
        "enumDescriptions",
        "markdownDescription",
    ]
)
#: what is read from elsewhere, or not at all
_PASSIVE = _ANNOTATIONS | {"$id", "$defs", "definitions", "additionalItems"}
_APPLICATORS = frozenset(("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas", "$dynamicRef"))
#: keywords that the library does not enforce
_UNENFORCED = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "uniqueItems",
        "propertyNames",
        "$dynamicRef",
        "$recursiveRef",
    ]
)
_OBJECT_KEYWORDS = frozenset(["properties", "patternProperties", "additionalProperties", "required", "minProperties"])
_ARRAY_KEYWORDS = frozenset(["items", "prefixItems", "minItems", "maxItems"])
#: the least integer that `const` and `enum` may hold
LEAST_VALUE = -(2**63 - 1024)
#: keywords that may give a schema without `type` one
_TYPED_ELSEWHERE = frozenset(("type", "$ref", "enum", "const", "anyOf", "oneOf", "allOf"))


class Place(tuple[str | int, ...]):
    """Keys and indices from a plain schema to one inside it."""


class PlainSchema(NamedTuple):
    """A schema for the library, and paths of what it does not enforce, such as `.properties.a.pattern`."""

    #: its `$ref`s lead to `#/$defs/NAME`
    schema: _Json
    relaxed: tuple[str, ...]
    #: paths of the `$defs` in the schema that it was made of
    paths: Mapping[str, str]

    def path(self, place: Place) -> str:
        """The path of a place in the schema that this one was made of."""
        begin = ""
        if len(place) > 1 and place[0] == "$defs":
            begin, place = self.paths[str(place[1])], Place(place[2:])
        return begin + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)


def plain_schema(schema: Any, *, strict: bool, forgiving: bool = False, root: bool = True) -> PlainSchema:
    """The plain form of a schema.

    `strict`: what the library does not enforce is refused, not dropped. `forgiving`: invalid keywords are dropped too.
    `root`: a schema without a type is one of an object or array. Raises SchemaError with the path of the keyword.
    """
    walk = _Walk(schema, strict=strict, forgiving=forgiving)
    made = walk.whole()
    if root:
        made = _rooted(made)
    whole = {**made, "$defs": walk.defs} if walk.defs else made
    return PlainSchema(whole, tuple(dict.fromkeys(walk.relaxed)), walk.paths)


def _rooted(schema: Any) -> _Json:
    """A schema whose instances are objects or arrays if it names no type."""
    if schema is True:
        schema = {}
    if schema.keys() & _TYPED_ELSEWHERE:
        return dict(schema)
    objects, arrays = schema.keys() & _OBJECT_KEYWORDS, schema.keys() & _ARRAY_KEYWORDS
    kinds = ["object"] * bool(objects or not arrays) + ["array"] * bool(arrays or not objects)
    return {"type": kinds if len(kinds) > 1 else kinds[0], **schema}


class _At(NamedTuple):
    """A keyword's place: its path, the depth of its schema, and that schema."""

    path: str
    depth: int
    schema: _Json


class _Walk:
    """One walk over the schemas of a schema. It follows keywords, not objects: a property named `title` stays."""

    def __init__(self, schema: Any, *, strict: bool, forgiving: bool) -> None:
        self._root = schema
        self._strict = strict
        self._forgiving = forgiving
        self._schemas = 0
        #: of each reference: the name of its target
        self._names: dict[str, str] = {}
        #: names of targets, the schemas there and their paths, in the order in which they were found
        self._targets: dict[str, tuple[Any, str]] = {}
        self._references = References(schema)
        #: schemas with a oneOf whose arms are not compared yet, and its path
        self._choices: list[tuple[_Json, str]] = []
        #: plain targets of references, by their name
        self.defs: _Json = {}
        self.relaxed: list[str] = []

    def whole(self) -> Any:
        """The root's plain form."""
        made = self._plain(self._root, "", 0)
        # A target may have references of its own, which add targets.
        while len(self.defs) < len(self._targets):
            name = list(self._targets)[len(self.defs)]
            target, path = self._targets[name]
            self.defs[name] = self._plain(target, path, 1)
        check_arms(made, self.defs, self.paths)
        for schema, path in self._choices:
            self._settle(schema, path)
        if made is False:
            raise SchemaError("", "allows nothing", "invalid_schema")
        return made

    @property
    def paths(self) -> dict[str, str]:
        """The path of each of `defs`."""
        return {name: path for name, (_, path) in self._targets.items()}

    # --- errors

    def _invalid(self, path: str, reason: str) -> None:
        """Refuse a keyword with a value that the standard does not allow; forgiving: note that it goes."""
        if not self._forgiving:
            raise SchemaError(path, reason, "invalid_schema")
        self.relaxed.append(path)

    def _relax(self, path: str, reason: str) -> None:
        """Note that a keyword goes, or refuse it if the schema is strict."""
        if self._strict:
            raise SchemaError(path, f"{reason}; use strict: false to leave it out", "unsupported_schema")
        self.relaxed.append(path)

    def _fits(self, check: Callable[[str, Any], None], path: str, value: Any) -> bool:
        """Whether the value of one keyword is within its limit. If not, the keyword goes, or a strict schema is
        refused."""
        try:
            check(path, value)
        except SchemaError:
            if self._strict:
                raise
            self.relaxed.append(path)
            return False
        return True

    # --- one schema

    def _plain(self, schema: Any, path: str, depth: int) -> Any:
        self._schemas += 1
        if depth > schema_limits.MAX_DEPTH:
            raise too_complex(path, f"is nested deeper than {schema_limits.MAX_DEPTH} schemas")
        if self._schemas > schema_limits.MAX_SCHEMAS:
            raise too_complex(path, f"expected at most {schema_limits.MAX_SCHEMAS:,} schemas")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._invalid(path, "expected a schema: an object, true or false")
            return True
        made: _Json = {}
        for key, value in schema.items():
            at = _At(f"{path}.{key}", depth, schema)
            if (rule := _RULES.get(key)) is not None:
                rule(self, made, key, value, at)
            elif key in _UNENFORCED:
                self._unenforced(made, key, value, at)
            elif key == "$id" and depth:
                self._relax(at.path, "a base for references inside a schema is not supported")
            elif key not in _PASSIVE and not key.startswith("x-"):
                self._relax(at.path, "is no keyword that Luce knows")
        return self._joined(made, path)

    def _joined(self, made: _Json, path: str) -> Any:
        """A schema of plain keywords, with what follows from several of them."""
        kinds = made.get("type", ())
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        self._check_required(made, path)
        if "properties" in made:
            schema_limits.check_properties(f"{path}.properties", made["properties"], made.get("required", []))
        number_bounds(made)
        if kinds and "integer" not in kinds:
            close_bounds(made)
        if "integer" in kinds and "number" not in kinds and not {"enum", "const"} & made.keys():
            bound_integers(made)
        if "oneOf" in made:
            self._choices.append((made, f"{path}.oneOf"))
        for key in ("anyOf", "oneOf", "allOf"):
            if made.keys() == {key} and len(made[key]) == 1:
                return made[key][0]
        return made

    def _check_required(self, made: _Json, path: str) -> None:
        required = made.get("required")
        if not required or made.get("additionalProperties") is not False or "patternProperties" in made:
            return
        known = made.get("properties", {})
        missing = [name for name in required if known.get(name, False) is False]
        if missing:
            self._invalid(f"{path}.required", f"{missing[0][:80]!r} is no property of this closed object")
            made["required"] = [name for name in required if name not in missing]

    def _settle(self, made: _Json, path: str) -> None:
        """Make anyOf of a oneOf. Where its arms may overlap that allows more; strict: the library decides."""
        if not exclusive(made["oneOf"], self.defs):
            if self._strict:
                return
            self.relaxed.append(path)
        arms = made.pop("oneOf")
        if "anyOf" in made:
            made["allOf"] = [*made.get("allOf", ()), {"anyOf": arms}]
        else:
            made["anyOf"] = arms

    # --- keywords

    def _type(self, made: _Json, key: str, value: Any, at: _At) -> None:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(name in _TYPES for name in names):
            self._invalid(at.path, f"expected one or several of {', '.join(_TYPES)}")
        else:
            made[key] = names[0] if len(names) == 1 else names

    def _count(self, made: _Json, key: str, value: Any, at: _At) -> None:
        if not _is_number(value) or value < 0 or value != value // 1:
            self._invalid(at.path, "expected a whole number, 0 or more")
        elif self._fits(schema_limits.check_count, at.path, int(value)):
            made[key] = int(value)

    def _bound(self, made: _Json, key: str, value: Any, at: _At) -> None:
        if _is_number(value) or (isinstance(value, bool) and key.startswith("exclusive")):
            made[key] = value
        else:
            self._invalid(at.path, "expected a number")

    def _multiple(self, made: _Json, key: str, value: Any, at: _At) -> None:
        if not _is_number(value) or value <= 0:
            self._invalid(at.path, "expected a number above 0")
        elif self._fits(schema_limits.check_multiple, at.path, value):
            made[key] = value

    def _pattern(self, made: _Json, key: str, value: Any, at: _At) -> None:
        if not isinstance(value, str):
            self._invalid(at.path, "expected a regular expression")
        elif has_lookaround(value):
            self._relax(at.path, "look-around and back-references cannot be enforced")
        elif self._fits(schema_limits.check_pattern, at.path, value):
            made[key] = rust_pattern(value)

    def _format(self, made: _Json, key: str, value: Any, at: _At) -> None:
        kinds = at.schema.get("type")
        if not isinstance(value, str):
            self._invalid(at.path, "expected the name of a format")
        elif kinds is not None and kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
            # Formats bind strings alone; OpenAPI's name the width of numbers.
            return
        elif value in _FORMATS:
            made[key] = value
        else:
            self._relax(at.path, f"the format {value[:40]!r} cannot be enforced")

    def _enum(self, made: _Json, key: str, value: Any, at: _At) -> None:
        if not isinstance(value, list) or not value:
            self._invalid(at.path, "expected a list of values, at least one")
        else:
            self._values(made, key, value, value, at)

    def _const(self, made: _Json, key: str, value: Any, at: _At) -> None:
        self._values(made, key, value, [value], at)

    def _values(self, made: _Json, key: str, value: Any, values: list[Any], at: _At) -> None:
        schema_limits.check_values(at.path, values)
        if _unwritable(values):
            self._relax(at.path, "integers beyond 64 bits, and the least of those with 64, cannot be enforced")
        else:
            made[key] = value

    def _required(self, made: _Json, key: str, value: Any, at: _At) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._invalid(at.path, "expected a list of names")
        elif value:
            made[key] = list(dict.fromkeys(value))

    def _schema(self, made: _Json, key: str, value: Any, at: _At) -> None:
        made[key] = self._plain(value, at.path, at.depth + 1)

    def _items(self, made: _Json, key: str, value: Any, at: _At) -> None:
        """`items`; older drafts spell prefixItems and items as items and additionalItems."""
        if not isinstance(value, list):
            made[key] = self._plain(value, at.path, at.depth + 1)
            return
        made["prefixItems"] = [self._plain(item, f"{at.path}[{i}]", at.depth + 1) for i, item in enumerate(value)]
        if "additionalItems" in at.schema:
            path = f"{at.path.removesuffix('items')}additionalItems"
            made["items"] = self._plain(at.schema["additionalItems"], path, at.depth + 1)

    def _named(self, made: _Json, key: str, value: Any, at: _At) -> None:
        """`properties`, `patternProperties`."""
        if not isinstance(value, dict):
            self._invalid(at.path, "expected an object of schemas")
            return
        if len(value) > schema_limits.MAX_PROPERTIES:
            raise too_complex(at.path, f"has {len(value):,}, expected at most {schema_limits.MAX_PROPERTIES:,}")
        patterns, plain = key == "patternProperties", {}
        for name, inner in value.items():
            path = f"{at.path}.{name}"
            if patterns and has_lookaround(name):
                self._relax(path, "look-around and back-references cannot be enforced")
                continue
            if patterns and not self._fits(schema_limits.check_pattern, path, name):
                continue
            plain[rust_pattern(name) if patterns else name] = self._plain(inner, path, at.depth + 1)
        made[key] = plain

    def _arms(self, made: _Json, key: str, value: Any, at: _At) -> None:
        if not isinstance(value, list) or not value:
            self._invalid(at.path, "expected a list of schemas, at least one")
        else:
            made[key] = [self._plain(arm, f"{at.path}[{i}]", at.depth + 1) for i, arm in enumerate(value)]

    def _unenforced(self, made: _Json, key: str, value: Any, at: _At) -> None:
        if key == "uniqueItems" and value is False:
            return
        if key == "propertyNames" and value in (True, {}, {"type": "string"}):
            return
        needed = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}.get(key)
        if needed is not None and needed not in at.schema:
            return
        if key == "unevaluatedProperties" and not at.schema.keys() & _APPLICATORS:
            # Nothing but this schema says which properties there are.
            made.setdefault("additionalProperties", self._plain(value, at.path, at.depth + 1))
            return
        self._relax(at.path, f"{key} cannot be enforced")

    # --- references

    def _ref(self, made: _Json, key: str, value: Any, at: _At) -> None:
        if not isinstance(value, str):
            self._invalid(at.path, "expected a reference")
        elif not value.startswith("#"):
            self._relax(at.path, "references to other documents are not followed")
        elif (name := self._name(value, at.path)) is not None:
            made[key] = f"#/$defs/{name}"

    def _name(self, ref: str, path: str) -> str | None:
        """The name of a reference's target among the plain definitions; None if it leads nowhere."""
        if ref in self._names:
            return self._names[ref]
        target = self._references.find(ref)
        if target is None or not isinstance(target.schema, dict | bool):
            self._invalid(path, f"{ref[:80]!r} leads to no schema")
            return None
        stem = re.sub(r"\W", "_", target.pointer.rpartition("/")[2]) or "root"
        name = stem if stem not in self._targets else f"{stem}_{len(self._targets)}"
        self._names[ref] = name
        self._targets[name] = target.schema, target.pointer.replace("/", ".")
        return name


def _unwritable(value: Any) -> bool:
    """Whether a value has an integer that the library cannot hold a reply to."""
    if isinstance(value, int):
        # It makes doubles of integers beyond 64 bits, and ends the process at one whose double is -2**63.
        return not LEAST_VALUE <= value < 2**64
    if isinstance(value, dict):
        return any(map(_unwritable, value.values()))
    return isinstance(value, list) and any(map(_unwritable, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_Rule = Callable[[_Walk, _Json, str, Any, _At], None]
_RULES: dict[str, _Rule] = {
    "type": _Walk._type,
    "multipleOf": _Walk._multiple,
    "pattern": _Walk._pattern,
    "format": _Walk._format,
    "enum": _Walk._enum,
    "const": _Walk._const,
    "required": _Walk._required,
    "items": _Walk._items,
    "additionalProperties": _Walk._schema,
    "$ref": _Walk._ref,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _Walk._count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _Walk._bound),
    **dict.fromkeys(("properties", "patternProperties"), _Walk._named),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _Walk._arms),
}
