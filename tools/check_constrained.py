#!/usr/bin/env python3
"""Checks that constrained replies are valid: JSON by a schema and calls of tools, of models with random weights.

    tools/check_constrained.py                              200 replies of two models of tests/reference
    tools/check_constrained.py -n 10000 --schemas DIR       more of them, also by the schemas in the files of DIR
    tools/check_constrained.py MODEL... --seed 7            other models, other schemas and replies

Each reply has a schema of its own, from the suite of tests/reference, from DIR (JSON schemas, one a file), or made at
random; half of them are bodies (`response_format`, strict and not), half calls (`tool_choice` required, named, and auto
with a bias that brings the call), in each dialect in turn. Half are drafted (`--draft ngram`), half run on one shard,
half on three. Requests, grammars and responses are those of the server's /v1/chat/completions, at temperature 1. Four
of five requests have a bias for quotes and brackets, so that more replies end. In dialects that do not write arguments
as JSON, half of the tools are strict; of the others only the parameters' names are enforced.

The package jsonschema judges. Keywords that a response's request did not enforce (`relaxed`) are taken out before.
`cut`: the reply came to --max-tokens, and is neither valid nor invalid. `refused`: the request was, by a limit or, if
strict, for a keyword. Exit code 1 if a reply is invalid; each comes as one line of JSON on stderr. SIGINT and SIGTERM
end it with a table, in which replies of models that are still loaded are missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import queue
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation, setcontext
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

import luce
from luce.api import Model
from luce.engine.events import Event, Failed, Finished
from luce.errors import ContextError, LuceError, RequestError
from luce.models.calls import Json
from luce.models.tool_formats import TOOL_FORMATS
from luce.server.chat_response import ChatResponse
from luce.server.prepare import Job, chat_job
from luce.text.grammar import CompiledGrammar, WantedReply

REFERENCE = Path(__file__).resolve().parent.parent / "tests" / "reference"
TARGETS = ("qwen35-a-F32", "cohere2-a-F32")
DEVICES = ("cpu:0", "cpu:0,cpu:1,cpu:2")
KINDS = ("body", "required", "strict body", "named", "body", "auto")
FORMATS = ("date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "duration")
PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^(GET|PUT|POST)$",
    "^#[0-9a-f]{6}$",
    "[0-9]",
    "^v\\d+\\.\\d+$",
    "^x?y*z+$",
)
WORDS = (
    "id",
    "name",
    "type",
    "value",
    "items",
    "path",
    "file",
    "command",
    "content",
    "old string",
    "größe",
    "a.b",
    "x-y",
)
#: keywords whose members are schemas by name
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_TIMEOUT = 300
_CONTEXT = 2048
#: the parameters of a tool beside the one with the schema
_PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}

_Json = dict[str, Any]


# --- schemas


class RandomSchemas:
    """Schemas as public collections have them: small objects, nested, with few keywords each."""

    def __init__(self, draw: random.Random) -> None:
        self._random = draw

    def whole(self) -> _Json:
        """An object's schema, at times with definitions that refer to each other."""
        names = self._random.sample(("node", "leaf", "ref_type"), self._random.choice((0, 0, 1, 2)))
        refs = [f"#/$defs/{name}" for name in names]
        made = self._object(3, refs)
        if names:
            made["$defs"] = {
                name: self._schema(1, refs) if i else self._object(1, refs[1:]) for i, name in enumerate(names)
            }
        return made

    def _schema(self, depth: int, refs: Sequence[str]) -> _Json:
        makers: list[Callable[[], _Json]] = [
            self._string,
            self._string,
            self._number,
            self._integer,
            self._enum,
            self._flat,
        ]
        if depth > 0:
            makers += [lambda: self._object(depth - 1, refs), lambda: self._array(depth - 1, refs)]
            makers.append(lambda: self._choice(depth - 1, refs))
            makers += [lambda: {"$ref": self._random.choice(refs)}] * (2 * bool(refs))
        return self._random.choice(makers)()

    def _object(self, depth: int, refs: Sequence[str]) -> _Json:
        names = self._random.sample(WORDS, self._random.randint(1, 5))
        made: _Json = {"type": "object", "properties": {name: self._schema(depth, refs) for name in names}}
        # What is not required may be absent, so that recursion ends.
        required = [name for name in names if "$ref" not in json.dumps(made["properties"][name]) and self._chance(0.5)]
        if required:
            made["required"] = required
        if self._chance(0.7):
            made["additionalProperties"] = False if self._chance(0.8) else {"type": "boolean"}
        if self._chance(0.1):
            made["minProperties"] = len(required)
        if self._chance(0.1):
            made["patternProperties"] = {"^x-[a-z]{1,4}$": {"type": "integer", "minimum": 0}}
        return made

    def _array(self, depth: int, refs: Sequence[str]) -> _Json:
        made: _Json = {"type": "array", "items": self._schema(depth, refs), "maxItems": self._random.randint(1, 4)}
        if self._chance(0.3) and "$ref" not in json.dumps(made["items"]):
            made["minItems"] = 1
        if self._chance(0.2):
            made["prefixItems"] = [self._string(), self._integer()]
        if self._chance(0.1):
            made["uniqueItems"] = True
        return made

    def _choice(self, depth: int, refs: Sequence[str]) -> _Json:
        if self._chance(0.2):
            low = self._random.randint(-5, 5)
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + self._random.randint(0, 50)}]}
        if self._chance(0.3):
            arms = [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, kind: self._schema(0, ())},
                    "required": ["kind"],
                }
                for kind in ("one", "two")
            ]
            return {self._random.choice(("anyOf", "oneOf")): arms}
        return {"anyOf": [self._schema(depth, refs), {"type": "null"}]}

    def _string(self) -> _Json:
        kind = self._random.randrange(5)
        if kind == 0:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        if kind == 1:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        low = self._random.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 12), "title": "T"}

    def _number(self) -> _Json:
        low = self._random.choice((-1, 0, 0.5, -273.15, 1e-3))
        made: _Json = {"type": "number", self._random.choice(("minimum", "exclusiveMinimum")): low}
        if self._chance(0.7):
            made[self._random.choice(("maximum", "exclusiveMaximum"))] = low + self._random.choice((0.25, 1, 100, 1e4))
        return made

    def _integer(self) -> _Json:
        low = self._random.randint(-1000, 1000)
        made: _Json = {"type": "integer"}
        if self._chance(0.6):
            made |= {"minimum": low, "maximum": low + self._random.randint(10, 10**6)}
        if self._chance(0.2):
            made["multipleOf"] = self._random.choice((2, 5, 7, 10))
        return made

    def _enum(self) -> _Json:
        values: list[Any] = ["red", "green", 'a "quoted" one', 7, -1.5, None, True, {"a": [1]}, "ä\n"]
        if self._chance(0.3):
            return {"const": self._random.choice(values)}
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _flat(self) -> _Json:
        return {"type": self._random.choice(("boolean", "null", ["string", "null"], ["integer", "boolean"]))}

    def _chance(self, share: float) -> bool:
        return self._random.random() < share


def suite_schemas() -> list[_Json]:
    """The schemas of the official suite's selection, but for those that refer to others.

    The server takes NUL out of bodies, so no reply has one.
    """
    cases = json.loads((REFERENCE / "json-schema-suite.json").read_text())
    return [
        case[2]
        for case in cases
        if isinstance(case[2], dict)
        and "$id" not in case[2]
        and "$ref" not in str(case[2])
        and "\\x00" not in repr(case[2])
    ]


def schemas_of(path: Path) -> list[_Json]:
    """The schemas in a file, or in those of a directory; what is no JSON object is left out."""
    found = []
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        value = json.loads(file.read_text())
        if isinstance(value, dict):
            found.append(value)
    if not found:
        raise ValueError(f"--schemas {path}: has no JSON schema")
    return found


# --- judge


def without(schema: Any, paths: Sequence[str]) -> Any:
    """A copy of a schema without what stands at these paths, such as `.properties.a.pattern`."""
    made = json.loads(json.dumps(schema))
    for path in sorted(paths, key=len, reverse=True):
        if not path:
            return True
        _take_out(made, path, "schema")
    return made


def _take_out(value: Any, path: str, inside: str) -> None:
    """Take out what stands at a path. `inside`: value is a schema, a map of schemas, or a list of them."""
    if isinstance(value, list):
        index, _, rest = path[1:].partition("]")
        if not rest:
            value[int(index)] = True
        else:
            _take_out(value[int(index)], rest, "schema")
        return
    if not isinstance(value, dict):
        return
    # Keys may have dots: the longest that fits.
    for key in sorted(value, key=len, reverse=True):
        rest = path.removeprefix(f".{key}")
        if rest == path or (rest and rest[0] not in ".["):
            continue
        if rest:
            _take_out(value[key], rest, "map" if inside == "schema" and key in _MAPS else "schema")
        elif inside == "map":
            value[key] = True
        elif key == "oneOf":
            value.setdefault("allOf", []).append({"anyOf": value.pop(key)})
        else:
            del value[key]
        return


def _names_of(schema: Any) -> _Json:
    """The schema of an object with the names of a schema's properties."""
    if not isinstance(schema, dict):
        return {"type": "object"}
    made: _Json = {"type": "object", "required": schema.get("required", [])}
    if schema.get("properties") and schema.get("additionalProperties", False) is False:
        made |= {"properties": dict.fromkeys(schema["properties"], True), "additionalProperties": False}
        made["patternProperties"] = dict.fromkeys(schema.get("patternProperties", ()), True)
    return made


def _number(text: str) -> Decimal | float:
    """A number as it is written; a float where the exponent is beyond those of decimals."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def error_of(text: str, schema: Any) -> str | None:
    """Why a text is no JSON by a schema; None if it is. Numbers are compared as they are written."""
    try:
        value = json.loads(text, parse_float=_number)
    except ValueError as error:
        return f"no JSON: {error}"
    # Enough digits for a remainder of any number that a reply may have.
    setcontext(Context(prec=400, Emax=MAX_EMAX, Emin=MIN_EMIN))
    exact = json.loads(json.dumps(schema), parse_float=_number)
    kind = jsonschema.validators.validator_for(exact, jsonschema.Draft202012Validator)
    found = next(kind(exact, format_checker=kind.FORMAT_CHECKER).iter_errors(value), None)
    return (
        None
        if found is None
        else f"{found.json_path}: {found.message[:200]} ({'/'.join(map(str, found.absolute_schema_path))})"
    )


# --- replies


@dataclass(frozen=True)
class Run:
    """Where replies are generated, and how."""

    target: Path
    devices: str
    drafted: bool
    dialect: str

    @property
    def place(self) -> str:
        """As reports name it."""
        shards = len(self.devices.split(","))
        return f"{shards} shard{'s' * (shards > 1)}, {'drafted' if self.drafted else 'plain'}"


@dataclass
class Case:
    """A request, and what its reply is judged by."""

    number: int
    kind: str
    schema: _Json
    run: Run
    #: the tools that may be called, with the schemas of their arguments
    tools: dict[str, Any] = field(default_factory=dict)
    #: the whole schema is enforced; else, in dialects that do not write JSON, only the names of parameters
    exact: bool = True

    def request(self, model: Model, max_tokens: int) -> _Json:
        """The body of /v1/chat/completions."""
        draw = random.Random(self.number)
        # A reply that reasons is free until its reasoning ends.
        body: _Json = {
            "messages": [{"role": "user", "content": f"Answer {self.number}."}],
            "temperature": 1.0,
            "seed": self.number,
            "max_tokens": max_tokens,
        }
        if model.chat.reasons:
            body["thinking_token_budget"] = draw.randrange(3)
        if draw.random() < 0.3:
            body["top_k"] = 40
        bias = dict(_closers(model)) if draw.random() < 0.8 else {}
        if self.kind.endswith("body"):
            form = {"name": "reply", "schema": self.schema, "strict": self.kind == "strict body"}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        else:
            self.tools = {"look": _PLACE, "take": self.schema}
            self.exact = isinstance(model.chat.calls.arguments, Json) or draw.random() < 0.5
            strict = not isinstance(model.chat.calls.arguments, Json) and self.exact
            body["tools"] = [
                {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
                for name, schema in self.tools.items()
            ]
            named = {"type": "function", "function": {"name": "take"}}
            body["tool_choice"] = named if self.kind == "named" else "required"
            body["parallel_tool_calls"] = draw.random() < 0.2
            if self.kind == "named":
                self.tools = {"take": self.schema}
            elif self.kind == "auto" and (trigger := model.chat.trigger) is not None:
                body |= {"tool_choice": "auto", "parallel_tool_calls": False}
                bias[str(trigger)] = 100.0
        return body | ({"logit_bias": bias} if bias else {})


def _closers(model: Model) -> Iterator[tuple[str, float]]:
    """The tokens that end strings, objects and arrays, with a bias."""
    for text, bias in (('"', 3.0), ("}", 2.0), ("]", 2.0), ("<", 2.0)):
        ids = model.tokenize(text, specials=False)
        if len(ids) == 1:
            yield str(ids[0]), bias


@dataclass
class Report:
    """What became of replies."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    invalid: list[_Json] = field(default_factory=list)
    relaxed: int = 0

    def add(self, case: Case, outcome: str) -> None:
        """Count one."""
        self.counts[case.run.place, "bodies" if case.kind.endswith("body") else "calls", outcome] += 1

    def merge(self, other: Report) -> None:
        """Count those of another report too."""
        self.counts += other.counts
        self.invalid += other.invalid
        self.relaxed += other.relaxed

    @property
    def failed(self) -> bool:
        """Whether a reply is invalid, or failed."""
        return bool(self.invalid) or any(key[2].startswith("failed") for key in self.counts)

    def total(self, outcome: str) -> int:
        """How many came to this."""
        return sum(count for key, count in self.counts.items() if key[2] == outcome)


class _Running:
    """A reply that is generated."""

    def __init__(self, case: Case, job: Job, grammar: CompiledGrammar | None, model: Model) -> None:
        self.case = case
        self.grammar = grammar
        self.builder = ChatResponse(job, model)

    def judged(self, report: Report) -> None:
        """Count the reply, which has ended."""
        (choice,) = self.builder.reply()["choices"]
        relaxed = () if self.grammar is None else self.grammar.relaxed
        report.relaxed += bool(relaxed)
        if choice["finish_reason"] == "length":
            report.add(self.case, "cut")
            return
        problem = self._problem(choice, relaxed)
        report.add(self.case, "valid" if problem is None else "invalid")
        if problem is not None:
            case = self.case
            where = {"target": case.run.target.name, "devices": case.run.devices, "dialect": case.run.dialect}
            report.invalid.append(
                {
                    "number": case.number,
                    "kind": case.kind,
                    "problem": problem,
                    **where,
                    "choice": choice,
                    "schema": case.schema,
                }
            )
            print(json.dumps(report.invalid[-1], ensure_ascii=False), file=sys.stderr, flush=True)

    def _problem(self, choice: _Json, relaxed: Sequence[str]) -> str | None:
        message, parser = choice["message"], self.builder.choices[0].parser
        if self.case.kind.endswith("body"):
            if choice["finish_reason"] != "stop":
                return f"ended with {choice['finish_reason']}"
            begin = "response_format.json_schema.schema"
            return error_of(
                message["content"], without(self.case.schema, [path.removeprefix(begin) for path in relaxed])
            )
        calls = message.get("tool_calls", [])
        if not calls or choice["finish_reason"] != "tool_calls":
            return f"{len(calls)} calls, ended with {choice['finish_reason']}"
        if parser.bad_calls or parser.cut_calls:
            return f"{parser.bad_calls} bad calls, {parser.cut_calls} cut"
        if self.case.kind != "auto" and (message["content"] or "").strip():
            return "text beside required calls"
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name not in self.case.tools:
                return f"calls {name}"
            schema = self.case.tools[name]
            begins = [f"tools[{i}].function.parameters" for i, known in enumerate(("look", "take")) if known == name]
            paths = [path.removeprefix(begins[0]) for path in relaxed if path.startswith(begins[0])]
            known = without(schema, paths)
            problem = error_of(arguments, known if self.case.exact else _names_of(known))
            if problem is not None:
                return f"{name}: {problem}"
        return None


def generate(run: Run, cases: Sequence[Case], max_tokens: int, sequences: int) -> Report:
    """Generate and judge the replies to some requests, `sequences` at a time."""
    report = Report()
    drafting: _Json = {"draft": "ngram"} if run.drafted else {}
    place = {"target_devices": run.devices, "parallel": sequences, "tool_format": run.dialect}
    with luce.load(run.target, max_ctx=_CONTEXT, cache_ram=0, **place, **drafting) as model:
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        running: dict[int, _Running] = {}
        waiting = iter(cases)
        while True:
            while len(running) < sequences and (case := next(waiting, None)) is not None:
                found = _submitted(case, model, max_tokens, events, report)
                if found is not None:
                    running[case.number] = found
            if not running:
                return report
            number, event = events.get(timeout=_TIMEOUT)
            if isinstance(event, Failed):
                report.add(running.pop(number).case, f"failed ({event.error.code or event.error.type})")
                continue
            running[number].builder.add(0, event)
            if isinstance(event, Finished):
                running.pop(number).judged(report)


def _submitted(
    case: Case, model: Model, max_tokens: int, events: queue.SimpleQueue[tuple[int, Event]], report: Report
) -> _Running | None:
    """The reply to a request, submitted to the engine as the server does; None for one that is refused."""
    try:
        job = chat_job(msgspec.json.encode(case.request(model, max_tokens)), {}, model)
        wanted = WantedReply(job.reply_format, job.call_format)
        grammar = model.grammars.wait(wanted, job.reasoning_tokens) if any(wanted) else None
        (prompt,) = job.prompts
        model.engine.submit(
            prompt,
            job.params,
            output=model.reply_text(job.stops, prompt, split=job.chat, tools=job.tools),
            on_event=lambda event: events.put((case.number, event)),
            boundaries=job.boundaries[0],
            reasoning=job.reasoning,
            constraint=None if grammar is None else grammar.constraint(job.reasoning_tokens),
        )
    except (ContextError, RequestError) as error:
        report.add(case, f"refused ({error.code})")
        return None
    return _Running(case, job, grammar, model)


def groups(targets: Sequence[Path], count: int, seed: int, schemas: Sequence[_Json]) -> dict[Run, list[Case]]:
    """`count` requests to the targets, by where their replies are generated."""
    dialects = [calls.format for calls in TOOL_FORMATS]
    placed = list(itertools.product(targets, DEVICES, (False, True)))
    collections = [found for found in (suite_schemas(), list(schemas)) if found]
    found: dict[Run, list[Case]] = {}
    for number in range(count):
        # Each place has each kind of request, then each dialect.
        turn, place = divmod(number, len(placed))
        dialect = dialects[(seed + turn // len(KINDS)) % len(dialects)]
        draw = random.Random(f"{seed} {number}")
        schema = RandomSchemas(draw).whole() if draw.random() < 0.5 else draw.choice(draw.choice(collections))
        run = Run(*placed[place], dialect)
        found.setdefault(run, []).append(Case(number, KINDS[turn % len(KINDS)], schema, run))
    return found


def reports(work: Sequence[tuple[Run, list[Case], int, int]], jobs: int) -> Iterator[Report]:
    """The reports of some calls of `generate`, as they come from `jobs` processes."""
    if jobs == 1:
        yield from itertools.starmap(generate, work)
        return
    # The terminal sends SIGINT to all processes, and this one ends the others.
    ignored = (signal.SIGINT, signal.SIG_IGN)
    with multiprocessing.get_context("spawn").Pool(jobs, signal.signal, ignored) as pool:
        yield from pool.imap_unordered(_generated, work)


def _generated(arguments: tuple[Run, list[Case], int, int]) -> Report:
    return generate(*arguments)


def show(report: Report) -> None:
    """Print what became of replies, by place and kind."""
    outcomes = sorted({key[2] for key in report.counts})
    print(f"{'':28}" + "".join(f"{outcome:>{max(9, len(outcome) + 2)}}" for outcome in outcomes))
    for place, kind in sorted({key[:2] for key in report.counts}):
        row = (f"{report.counts[place, kind, outcome]:{max(9, len(outcome) + 2)}}" for outcome in outcomes)
        print(f"{f'{place}, {kind}':28}" + "".join(row))
    row = (f"{report.total(outcome):{max(9, len(outcome) + 2)}}" for outcome in outcomes)
    print(f"{'all':28}" + "".join(row))
    print(f"{report.counts.total()} replies, {report.total('invalid')} invalid; {report.relaxed} with relaxed keywords")


def main() -> int:
    """Check and print a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = [REFERENCE / f"{name}.gguf" for name in TARGETS]
    parser.add_argument(
        "targets", nargs="*", type=Path, default=own, metavar="MODEL", help="GGUF files with random weights"
    )
    parser.add_argument("-n", "--count", type=int, default=200, help="replies, default 200")
    parser.add_argument("--seed", type=int, default=0, help="of schemas and replies, default 0")
    parser.add_argument("--schemas", type=Path, metavar="PATH", help="a JSON schema, or a directory of them")
    parser.add_argument("--max-tokens", type=int, default=200, help="of a reply, default 200")
    parser.add_argument("--sequences", type=int, default=16, help="replies at a time in a process, default 16")
    parser.add_argument("--jobs", type=int, default=1, help="processes, default 1")
    arguments = parser.parse_args()

    def ended(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ended)
    report = Report()
    try:
        schemas = schemas_of(arguments.schemas) if arguments.schemas else []
        found = groups(arguments.targets, arguments.count, arguments.seed, schemas)
        work = [(run, cases, arguments.max_tokens, arguments.sequences) for run, cases in found.items()]
        for part in reports(work, arguments.jobs):
            report.merge(part)
            if sys.stderr.isatty():
                print(f"\r{report.counts.total()} of {arguments.count}", end="", file=sys.stderr, flush=True)
    except (LuceError, OSError, ValueError) as error:
        print(f"check_constrained: {error}", file=sys.stderr)
        return 2
    except SystemExit as killed:
        show(report)
        return 1 if report.failed else int(killed.code or 0)
    show(report)
    return 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
