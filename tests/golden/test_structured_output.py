"""Replies of random-weight models to JSON schemas, at every temperature: what ends is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import luce
from luce.engine.events import FinishReason

REFERENCE = Path(__file__).parents[1] / "reference"
DATED = {"d": {"type": "string", "format": "date"}, "p": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"}}
LINKED = {"v": {"type": "number", "minimum": -1, "maximum": 1}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}
PAIR = [{"type": "integer", "multipleOf": 7}, {"type": "string", "minLength": 1, "maxLength": 3}]
SHORT = {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 5}}
MANY = {f"p{i}": {"type": ["boolean", "null"]} for i in range(20)}


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


SCHEMAS: list[Any] = [
    closed(SHORT, "n", "s"),
    {"type": "array", "items": {"enum": ["a", 1, None, {"b": []}]}, "minItems": 1, "maxItems": 4},
    closed(DATED, "d"),
    {"anyOf": [closed({"kind": {"const": kind}, kind: {"type": "boolean"}}, "kind", kind) for kind in "xyz"]},
    closed(LINKED, "v"),
    closed(MANY, "p3", "p17"),
    {"type": "array", "prefixItems": PAIR, "items": False, "minItems": 2},
    {"allOf": [closed({"a": {"type": "integer", "minimum": 3}}, "a"), {"properties": {"a": {"maximum": 9}}}]},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    closed({"u": {"type": "string", "format": "uuid"}, "t": {"type": "string", "format": "ipv4"}}, "u", "t"),
]


@pytest.mark.parametrize("name", ["qwen35-a", "cohere2-a"])
def test_replies_that_end_are_valid(name: str) -> None:
    path = next(iter(sorted(REFERENCE.glob(f"{name}-*.gguf"))), None)
    assert path is not None
    ended = 0
    with luce.load(path, max_ctx=1024, parallel=4, draft="none") as model:
        ids = model.tokenize("Answer in JSON: ")
        for schema in SCHEMAS:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
            replies = [
                model.generate(ids, response_format=form, temperature=temperature, seed=seed, max_tokens=300)
                for seed, temperature in enumerate((0.0, 0.8, 1.5, 1.5))
            ]
            for reply in replies:
                splitter = model.chat.splitter(ids)
                text = "".join(token.text for token in reply)
                if splitter is not None:
                    text = splitter.push(text).content + splitter.flush().content
                assert reply.finish is not None
                if reply.finish.reason is FinishReason.EOS:
                    ended += 1
                    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
                else:
                    assert reply.finish.reason is FinishReason.LENGTH
    assert ended >= 2 * len(SCHEMAS)
