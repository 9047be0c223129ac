"""The grammar of a call's arguments in the dialects that do not write them as one JSON object."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from luce.models.calls import Bare, Tagged
from luce.text.keyword_reader import is_keyword
from luce.text.lark import ANY, Rules, text_rule
from luce.text.parameter_types import kind_of, named_values, written
from luce.text.plain_schema import PlainSchema
from luce.text.schema_limits import SchemaError

_Json = dict[str, Any]
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
#: what models write for JSON's words, having read them in templates that print Python's
_PYTHON = (("boolean", "True"), ("boolean", "False"), ("null", "None"))
_NULL = '"null" | "None"'
#: keywords of an object that the rules of its properties follow
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties", "$defs"))
#: keywords that the rules of values follow
_OF_VALUES = frozenset(("type", "enum", "const"))
#: keywords whose schemas are beside that of a type
_COMBINED = frozenset(("anyOf", "oneOf", "allOf", "$ref"))
#: keywords of values inside of others that no rule follows
_NOT_BARE = frozenset(("patternProperties", "minProperties", "maxProperties", "multipleOf"))
_ALL = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))


class ArgumentRules(ABC):
    """Writes the rule of one tool's arguments. `strict`: SchemaError for what it cannot enforce. A schema that allows
    nothing is refused in any case. `string`: what every string is, in place of its schema: the name of a grammar, or
    a regular expression with its slashes."""

    def __init__(self, rules: Rules, plain: PlainSchema, *, strict: bool, string: str = "") -> None:
        self._rules = rules
        self._defs: Mapping[str, Any] = plain.schema.get("$defs", {})
        self._schema = plain.schema
        self._strict = strict
        self._text = string

    def _string_up_to(self, end: str, schema: _Json, path: str) -> str:
        """A string without quotation marks, and the text or token that ends it."""
        if self._text.startswith("@"):
            return self._rules.rule(f"{self._text} {self._rules.literal(end)}")
        return self._rules.until(end, self._text or self._content(schema, path))

    @abstractmethod
    def arguments(self) -> str:
        """A piece of grammar for the arguments. Raises SchemaError with a path in the schema."""

    def _target(self, schema: Any) -> _Json:
        """A schema behind its references, `true` and `false` as objects."""
        for _ in range(len(self._defs) + 1):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self._defs[schema["$ref"].rpartition("/")[2]]
        if schema is False:
            return {"enum": []}
        return schema if isinstance(schema, dict) else {}

    def _whole(self, schema: Any) -> _Json:
        """The schema with the definitions that it may refer to."""
        schema = self._target(schema)
        return {**schema, "$defs": dict(self._defs)} if self._defs else schema

    def _check_object(self, schema: _Json, path: str) -> None:
        """Refuse a strict object with keywords that rules of its properties do not enforce."""
        self._refuse(schema, frozenset(schema) - _OF_OBJECTS, path)

    def _properties(self, schema: _Json) -> tuple[list[tuple[str, Any]], int]:
        """The properties that may come, the required ones first, and how many those are."""
        known: _Json = schema.get("properties", {})
        required = list(schema.get("required", ()))
        names = [*required, *(name for name in known if name not in required and known[name] is not False)]
        return [(name, known.get(name, True)) for name in names], len(required)

    def _kinds(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that a value may have."""
        schema = self._target(schema)
        kinds = schema.get("type")
        found = _ALL if kinds is None else frozenset([kinds] if isinstance(kinds, str) else kinds)
        if "number" in found:
            found |= {"integer"}
        values = named_values(schema)
        if values is not None:
            found &= frozenset(map(kind_of, values))
        if depth < 16:
            for key in ("anyOf", "oneOf"):
                if key in schema:
                    found &= frozenset().union(*(self._kinds(arm, depth + 1) for arm in schema[key]))
            for arm in schema.get("allOf", ()):
                found &= self._kinds(arm, depth + 1)
        return found

    def _checked_kinds(self, schema: Any, path: str) -> frozenset[str]:
        """As `_kinds`. Raises SchemaError if the schema allows no value: an enum may have none of the schema's type."""
        kinds = self._kinds(schema)
        if not kinds:
            raise SchemaError(path, "allows no value", "invalid_schema")
        return kinds

    def _possible(self, arms: list[Any]) -> Iterator[tuple[int, Any]]:
        """The arms that allow a value, with their indices."""
        return ((i, arm) for i, arm in enumerate(arms) if self._kinds(arm))

    def _of_type(self, values: list[Any], schema: _Json, path: str) -> list[Any]:
        """The values of a schema with `const` or `enum` that have one of its types."""
        beside = frozenset(("enum",)) if "const" in schema else frozenset()
        self._refuse(schema, (frozenset(schema) - _OF_VALUES) | beside, path)
        kinds = self._kinds(schema)
        return [value for value in values if kind_of(value) in kinds]

    def _refuse(self, schema: _Json, keywords: frozenset[str], path: str) -> None:
        """Refuse a strict schema with one of these keywords."""
        for key in sorted(schema.keys() & keywords) if self._strict else ():
            raise _unenforced(f"{path}.{key}", key)

    def _content(self, schema: _Json, path: str) -> str:
        """A terminal's body for a string without quotation marks."""
        self._refuse(schema, _COMBINED | {"pattern", "format"}, path)
        if not self._strict:
            return f"/{ANY}*/"
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        return f"/{ANY}{{{low},{high}}}/" if low or high != "" else f"/{ANY}*/"


def _unenforced(path: str, what: str) -> SchemaError:
    return SchemaError(path, f"{what} cannot be enforced in calls of this model", "unsupported_schema")


class TaggedRules(ArgumentRules):
    """Parameters between tags, in any order: strings as they are, all else as JSON."""

    def __init__(self, rules: Rules, dialect: Tagged, plain: PlainSchema, *, strict: bool, string: str = "") -> None:
        super().__init__(rules, plain, strict=strict, string=string)
        self._dialect = dialect

    def arguments(self) -> str:
        """As in ArgumentRules."""
        self._check_object(self._schema, "")
        known, required = self._properties(self._schema)
        items = [self._rules.rule(self._parameter(name, inner)) for name, inner in known]
        ordered = self._rules.any_order(items, required)
        extra = self._schema.get("additionalProperties", True)
        if extra is False:
            return ordered
        if self._strict and extra not in (True, {}):
            raise _unenforced(".additionalProperties", "a schema")
        typed = self._typed(frozenset({"string"}))
        key = self._rules.terminal(r"/[^<>=\"\n]{1,64}/")
        further = self._rules.rule(
            f"{self._rules.literal(self._dialect.key[0])} {key} "
            f"{self._rules.literal(self._dialect.key[1] + typed + self._dialect.value[0])} "
            f"{self._rules.until(self._dialect.value[1])}"
        )
        return f"{ordered} {further}*" if items else f"{further}*"

    def _parameter(self, name: str, schema: Any) -> str:
        """A parameter and its value, which the attribute, if the dialect has one, calls a string or not."""
        path = f".properties.{name}"
        kinds = self._checked_kinds(schema, path)
        begin = f"{self._rules.literal(self._dialect.key[0])} {text_rule(name)}"
        if self._dialect.typed is None or "string" not in kinds or kinds == {"string"}:
            return f"{begin} {self._opening(kinds)} {self._value(schema, path)}"
        # What the attribute calls no string is JSON, as the schema has it.
        other = f"{self._rules.json(self._whole(schema))} {self._rules.literal(self._dialect.value[1])}"
        string = self._value(self._strings(schema), path)
        return f"{begin} ({self._opening(frozenset({'string'}))} {string} | {self._opening(frozenset())} {other})"

    def _strings(self, schema: Any) -> _Json:
        """The schema without values that are no strings."""
        target = self._target(schema)
        values = named_values(target)
        return target if values is None else {"enum": [value for value in values if isinstance(value, str)]}

    def _typed(self, kinds: frozenset[str]) -> str:
        """The attribute that says whether the value is a string."""
        return "" if self._dialect.typed is None else self._dialect.typed % ("true" if "string" in kinds else "false")

    def _opening(self, kinds: frozenset[str]) -> str:
        """What stands between a parameter's name and its value."""
        dialect = self._dialect
        return self._rules.literal(dialect.key[1] + self._typed(kinds) + dialect.value[0])

    def _value(self, schema: Any, path: str) -> str:
        """A value and the tag behind it."""
        rules, end = self._rules, self._dialect.value[1]
        kinds, target = self._kinds(schema), self._target(schema)
        if "string" not in kinds:
            python = [word for kind, word in _PYTHON if kind in kinds and named_values(target) is None]
            forms = [rules.json(self._whole(schema)), *map(text_rule, python)]
            return f"({' | '.join(forms)}) {rules.literal(end)}"
        values = named_values(target)
        if values is not None:
            of_type = self._of_type(values, target, path)
            texts = [text_rule(written(value, of_type)) for value in of_type]
            return f"({' | '.join(texts)}) {rules.literal(end)}"
        if self._strict and kinds != {"string"}:
            raise _unenforced(path, "a union with strings")
        if kinds == {"string"} and target.keys() == {"anyOf"}:
            arms = (self._value(arm, f"{path}.anyOf[{i}]") for i, arm in self._possible(target["anyOf"]))
            return f"({' | '.join(arms)})"
        return self._string_up_to(end, target, path)


class KeywordRules(ArgumentRules):
    """Python's keyword arguments in any order. Values are JSON, with Python's words where a whole value is one."""

    def arguments(self) -> str:
        """As in ArgumentRules."""
        self._check_object(self._schema, "")
        known, required = self._properties(self._schema)
        items = [self._rules.rule(self._argument(name, inner)) for name, inner in known]
        extra = self._schema.get("additionalProperties", True)
        if extra is False or items:
            if self._strict and extra is not False:
                raise _unenforced("", "an open object")
            return self._rules.any_order(items, required, '", "')
        value = self._value(extra, ".additionalProperties")
        pair = self._rules.rule(f"{self._rules.terminal(r'/[A-Za-z_][A-Za-z0-9_]{0,63}=/')} {value}")
        return self._rules.rule(f'({pair} (", " {pair})*)?')

    def _argument(self, name: str, schema: Any) -> str:
        value = self._value(schema, f".properties.{name}")
        if is_keyword(name):
            return f"{text_rule(name + '=')} {value}"
        return f"{text_rule('**{' + json.dumps(name, ensure_ascii=False) + ': ')} {value} {text_rule('}')}"

    def _value(self, schema: Any, path: str) -> str:
        kinds = self._checked_kinds(schema, path)
        words = [word for kind, word in _PYTHON if kind in kinds and named_values(self._target(schema)) is None]
        return f"({' | '.join([self._rules.json(self._whole(schema)), *map(text_rule, words)])})"


class BareRules(ArgumentRules):
    """JSON with bare keys, strings between delimiters and no white space."""

    def __init__(self, rules: Rules, dialect: Bare, plain: PlainSchema, *, strict: bool, string: str = "") -> None:
        super().__init__(rules, plain, strict=strict, string=string)
        self._quote = rules.literal(dialect.quote)
        self._end = dialect.quote
        #: rules of definitions, which may refer to themselves
        self._named: dict[str, str] = {}
        self._any: str | None = None

    def arguments(self) -> str:
        """As in ArgumentRules."""
        self._check_object(self._schema, "")
        return self._object(self._schema, "")

    def _value(self, schema: Any, path: str) -> str:
        self._checked_kinds(schema, path)
        if isinstance(schema, dict) and schema.keys() == {"$ref"}:
            name = schema["$ref"].rpartition("/")[2]
            if name not in self._named:
                self._named[name] = self._rules.reserve()
                self._rules.define(self._named[name], self._value(self._defs[name], path))
            return self._named[name]
        schema = self._target(schema)
        values = named_values(schema)
        if values is not None:
            return self._rules.rule(" | ".join(map(self._written, self._of_type(values, schema, path))))
        if schema.keys() == {"anyOf"}:
            arms = (self._value(arm, f"{path}.anyOf[{i}]") for i, arm in self._possible(schema["anyOf"]))
            return self._rules.rule(" | ".join(arms))
        if "type" not in schema:
            if self._strict and schema:
                raise _unenforced(path, "this schema")
            return self._anything()
        self._refuse(schema, _COMBINED | _NOT_BARE, path)
        kinds = schema["type"]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return self._rules.rule(" | ".join(self._typed(kind, schema, path) for kind in kinds))

    def _typed(self, kind: str, schema: _Json, path: str) -> str:
        if kind == "object":
            return self._object(schema, path)
        if kind == "array":
            return self._array(schema, path)
        if kind == "string":
            return self._string(schema, path)
        if kind in ("number", "integer"):
            bounds: _Json = {key: bound for key, bound in schema.items() if key in _BOUNDS}
            # Numbers are those of JSON.
            return self._rules.json(bounds | {"type": kind})
        return '"true" | "false"' if kind == "boolean" else _NULL

    def _string(self, schema: _Json, path: str) -> str:
        return self._rules.rule(f"{self._quote} {self._string_up_to(self._end, schema, path)}")

    def _object(self, schema: _Json, path: str) -> str:
        known, required = self._properties(schema)
        items = [
            self._rules.rule(f"{text_rule(name + ':')} {self._value(inner, f'{path}.properties.{name}')}")
            for name, inner in known
        ]
        extra = schema.get("additionalProperties", True)
        ordered = self._rules.any_order(items, required, '","') if items else ""
        if extra is False or items:
            if self._strict and extra is not False:
                raise _unenforced(path, "an open object")
            return self._rules.rule(f'"{{" {ordered} "}}"')
        value = self._value(extra, f"{path}.additionalProperties")
        pair = self._rules.rule(f"{self._rules.terminal(r'/[A-Za-z_][A-Za-z0-9_.-]{0,63}:/')} {value}")
        return self._rules.rule(f'"{{" ({pair} ("," {pair})*)? "}}"')

    def _array(self, schema: _Json, path: str) -> str:
        self._refuse(schema, frozenset(("prefixItems",)), path)
        items = True if "prefixItems" in schema else schema.get("items", True)
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if items is False or high == 0:
            return '"[" "]"'
        item = self._value(items, f"{path}.items")
        more = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        several = f'{item} ("," {item}){more}'
        return f'"[" {several} "]"' if low else f'"[" ({several})? "]"'

    def _anything(self) -> str:
        """Any value."""
        if self._any is None:
            self._any = self._rules.reserve()
            objects = self._object({}, "")
            arrays = f'"[" ({self._any} ("," {self._any})*)? "]"'
            number = self._rules.json({"type": "number"})
            string = self._string({}, "")
            self._rules.define(self._any, f'{objects} | {arrays} | {string} | {number} | "true" | "false" | {_NULL}')
        return self._any

    def _written(self, value: Any) -> str:
        """A value that is known."""
        if isinstance(value, str):
            return self._rules.rule(f"{self._quote} {text_rule(value)} {self._quote}")
        if isinstance(value, list):
            return '"[" ' + ' "," '.join(map(self._written, value)) + ' "]"'
        if isinstance(value, dict):
            pairs = (f"{text_rule(key + ':')} {self._written(inner)}" for key, inner in value.items())
            return '"{" ' + ' "," '.join(pairs) + ' "}"'
        return text_rule(json.dumps(value))
