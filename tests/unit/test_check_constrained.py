"""tools/check_constrained.py: what it counts as valid, and replies of a few requests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tools import check_constrained
from tools.check_constrained import Case, RandomSchemas, Report, Run, error_of, without


@pytest.mark.parametrize(
    ("text", "schema", "problem"),
    [
        ('{"a": 1}', {"type": "object", "required": ["a"]}, None),
        ('{"a": 1', {"type": "object"}, "no JSON: "),
        ("{}", {"type": "object", "required": ["a"]}, "$: 'a' is a required property (required)"),
        ('["x", 2]', {"items": {"type": "string"}}, "$[1]: 2 is not of type 'string' (items/type)"),
        # In floats, 0.7 is no multiple of 0.1.
        ("0.7", {"multipleOf": 0.1}, None),
        ("0.75", {"multipleOf": 0.1}, "$: "),
        ("9007199254740993", {"const": 9007199254740992}, "$: "),
        ("1e99999999999999999999", {"type": "number"}, None),
        ('"2026-02-30"', {"format": "date"}, "$: "),
        ("[1]", {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}]}, "$[0]: "),
    ],
)
def test_the_judge(text: str, schema: Any, problem: str | None) -> None:
    found = error_of(text, schema)
    assert found is None if problem is None else found is not None and found.startswith(problem)


@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("", True),
        (".properties.a.pattern", {"properties": {"a": {"type": "string"}, "a.b": {"oneOf": [1]}}}),
        (".properties.a", {"properties": {"a": True, "a.b": {"oneOf": [1]}}}),
        (
            ".properties.a.b.oneOf",
            {"properties": {"a": {"type": "string", "pattern": "x"}, "a.b": {"allOf": [{"anyOf": [1]}]}}},
        ),
        (
            ".properties.a.b.oneOf[0]",
            {"properties": {"a": {"type": "string", "pattern": "x"}, "a.b": {"oneOf": [True]}}},
        ),
    ],
)
def test_what_is_not_enforced_is_taken_out(path: str, left: Any) -> None:
    schema: dict[str, Any] = {"properties": {"a": {"type": "string", "pattern": "x"}, "a.b": {"oneOf": [1]}}}
    assert without(schema, [path]) == left
    assert "pattern" in schema["properties"]["a"]


def test_random_schemas_are_schemas_and_differ() -> None:
    made = [RandomSchemas(random.Random(seed)).whole() for seed in range(200)]
    for schema in made:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert len({json.dumps(schema) for schema in made}) > 190
    text = json.dumps(made)
    for keyword in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const", "prefixItems", "patternProperties", "format"):
        assert f'"{keyword}"' in text


def test_replies(tmp_path: Path) -> None:
    schema = tmp_path / "one.json"
    schema.write_text('{"type": "object", "properties": {"n": {"enum": [1, null]}}, "required": ["n"]}')
    options = ["-n", "24", "--schemas", str(schema), "--max-tokens", "60", "--seed", "3", "--jobs", "2"]
    command = [sys.executable, check_constrained.__file__, *options]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\n24 replies, 0 invalid; " in ran.stdout
    for place in ("1 shard, plain", "1 shard, drafted", "3 shards, plain", "3 shards, drafted"):
        assert f"{place}, bodies" in ran.stdout and f"{place}, calls" in ran.stdout


@pytest.mark.parametrize("what", [["absent.gguf"], ["--schemas", "absent.json"]])
def test_mistakes_end_in_one_line(what: list[str]) -> None:
    ran = subprocess.run([sys.executable, check_constrained.__file__, *what], capture_output=True, text=True)
    assert ran.returncode and ran.stderr.startswith("check_constrained: ") and ran.stderr.count("\n") == 1


@pytest.mark.parametrize(("outcome", "code"), [("valid", 143), ("failed (x)", 1)])
def test_a_signal_ends_with_the_table(
    outcome: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Run] = []

    def generate(run: Run, cases: Sequence[Case], max_tokens: int, sequences: int) -> Report:
        calls.append(run)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        report = Report()
        for case in cases:
            report.add(case, outcome)
        return report

    monkeypatch.setattr(check_constrained, "generate", generate)
    monkeypatch.setattr(sys, "argv", ["check_constrained", "-n", "16"])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert check_constrained.main() == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert len(calls) == 3
    assert "\n4 replies, 0 invalid; " in capsys.readouterr().out
