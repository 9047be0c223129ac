"""The grammar of calls of tools, from the record of a dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from luce.models.calls import Bare, Calls, Json, Tagged
from luce.text.call_format import CallableTool, CallFormat
from luce.text.call_values import ArgumentRules, BareRules, KeywordRules, TaggedRules
from luce.text.channel_grammar import ChannelRules
from luce.text.grammar_library import EMPTY, INVALID, GrammarError
from luce.text.grammar_options import GrammarOptions
from luce.text.lark import ANY, Cut, Rules, pattern_of, text_rule
from luce.text.plain_schema import PlainSchema, plain_schema
from luce.text.reply_grammar import Compile, reply_grammar
from luce.text.schema_limits import SchemaError, too_complex

if TYPE_CHECKING:
    from llguidance import LLMatcher

_Json = dict[str, Any]
_ANY_OBJECT: _Json = {"type": "object"}


class CallGrammar(NamedTuple):
    """A compiled grammar of calls."""

    matcher: LLMatcher
    #: fields of the request that are not enforced
    relaxed: tuple[str, ...]
    #: tokens before which the reply is free, and with which the grammar begins; empty: it begins with the reply
    triggers: frozenset[int]
    #: special tokens with which calls begin
    begins: frozenset[int]
    #: texts that end the free texts of the grammar; empty: it has none, or others that are nearly as free
    markers: frozenset[str]


class _Tool(NamedTuple):
    """A tool with its plain schema."""

    tool: CallableTool
    plain: PlainSchema
    #: the text that it is called with, as in ArgumentRules; empty: any
    text: str = ""


class CallRules:
    """The rules of the calls of a reply. `cut` divides a text into special tokens and the text between. Raises
    SchemaError for what a strict tool asks for and no rule enforces, and for the text of a tool that is no grammar.
    """

    def __init__(self, form: CallFormat, compiled: Compile, cut: Cut, options: GrammarOptions) -> None:
        self._form = form
        self._options = options
        self._calls = form.calls
        self._cut = cut
        first = next(cut(form.calls.trigger), (None, ""))
        #: the special token that is the trigger
        self.trigger = first[0] if first[1] == form.calls.trigger else None
        #: whether the trigger is text alone, so that free text could hold it
        self._spelled = all(token is None for token, _ in cut(form.calls.trigger))
        # In a vocabulary without the special tokens a reply has no channels, and the white space that begins another
        # spelling's trigger is lost behind the reasoning.
        others = (calls for calls in form.calls.accepts if calls.written and not self._spelled)
        self._spellings = (form.calls, *others)
        self._rules = Rules(cut, compact=options.compact_json)
        self.relaxed: list[str] = []
        #: grammars that the rules name
        self.grammars: dict[str, str] = {}
        self._tools = [self._tool(tool, compiled) for tool in form.tools]
        if not isinstance(form.calls.arguments, Json):
            for index in range(len(self._tools)):
                self._check(index)

    def _tool(self, tool: CallableTool, compiled: Compile) -> _Tool:
        plain, form = self._plain(tool), tool.input
        if form is None:
            return _Tool(tool, plain)
        try:
            rule = reply_grammar(form, compiled, blank="", options=self._options).rule
        except SchemaError as error:
            raise SchemaError(form.param + error.path, str(error), str(error.code)) from None
        if isinstance(self._calls.arguments, Tagged | Bare):
            if form.kind == "grammar":
                name = f"input{len(self.grammars)}"
                self.grammars[name], rule = form.value, f"@{name}"
            return _Tool(tool, plain, rule)
        if form.kind == "regex":
            return _Tool(tool, _with_pattern(plain, form.value))
        # The library has no grammar of a string's content in which JSON's escapes stand for their characters.
        if tool.strict:
            reason = "a grammar cannot be enforced in the JSON of this model's calls; a regular expression can"
            raise SchemaError(form.param, reason, "unsupported_schema")
        self.relaxed.append(form.param)
        return _Tool(tool, plain)

    def _plain(self, tool: CallableTool) -> PlainSchema:
        """The plain schema of a tool's arguments: an object's. Raises SchemaError for a strict tool's."""
        try:
            plain = plain_schema(
                tool.parameters or _ANY_OBJECT, strict=tool.strict, forgiving=not tool.strict, root=False
            )
        except SchemaError as error:
            if tool.strict:
                raise SchemaError(tool.param + error.path, str(error), str(error.code)) from None
            self.relaxed.append(tool.param)
            return _any_object()
        self.relaxed += [tool.param + path for path in plain.relaxed]
        schema = plain.schema
        kinds = schema.get("type", "object")
        if kinds != "object" and "object" not in kinds:
            if tool.strict:
                raise SchemaError(f"{tool.param}.type", "expected object", "invalid_schema")
            self.relaxed.append(tool.param)
            return _any_object()
        closed = {} if tool.strict or not schema.get("properties") else {"additionalProperties": False}
        # A model that may add keys adds them; only a schema without properties asks for keys of its own.
        return plain._replace(schema={**closed, **schema, "type": "object"})

    def _check(self, index: int) -> None:
        """Let the arguments of a tool be any object if a rule cannot be written for them. Raises SchemaError if the
        tool is strict."""
        try:
            self.alone(index)
        except SchemaError:
            if self._tools[index].tool.strict:
                raise
            self.forget(index)

    def forget(self, index: int) -> None:
        """Let the arguments of a tool that does not compile be any object."""
        self.relaxed.append(self._tools[index].tool.param)
        self._tools[index] = _Tool(self._tools[index].tool, _any_object())

    def alone(self, index: int) -> str:
        """The grammar of one call of one tool."""
        rules = Rules(self._cut, compact=self._options.compact_json)
        return rules.text(self._call(rules, self._tools[index], self._calls))

    def required(self, blank: str, body: str | None = None, before_body: str = "") -> str:
        """The grammar of a reply of calls, or of `body`, the body of a rule, instead. `blank` and `before_body` stand
        before them."""
        rules = self._begun()
        calls = rules.rule(self._all(rules, self._form.parallel and self._calls.parallel))
        rest = "" if body is None else f" | {before_body}{rules.rule(body)}"
        return rules.text(f"{blank}{calls}{rest}")

    def in_channels(self, heads: ChannelRules) -> str:
        """The grammar of messages with text, and of a call."""
        rules = self._begun()
        return rules.text(heads.free(rules.rule(self._all(rules, several=False))))

    def behind_trigger(self) -> str:
        """The grammar of what begins with the trigger and stands in free text: a section of calls, or one call."""
        rules = self._begun()
        several = self._calls.section != ("", "") and self._form.parallel and self._calls.parallel
        return rules.text(self._all(rules, several))

    def in_text(self, blank: str, head: str = "") -> str:
        """The grammar of free text with calls in it, where the trigger is text too. `head` stands before the text."""
        rules, calls = self._begun(), self._calls
        trigger = pattern_of(calls.trigger)
        several = self._form.parallel and calls.parallel
        # A terminal takes as much as it can, so the text in front of a call ends with the trigger.
        if calls.at_start:
            rules.markers.add(calls.trigger)
            free = rules.rule(rules.terminal(f"/[ \\n]*{trigger}/"), "[lazy]")
            rest = rules.terminal(f"/{ANY}*/ & ~/[ \\n]*{trigger}{ANY}*/")
            return rules.text(f"{head}{blank}({free} {self._all(rules, several, read=True)} | {rest})")
        free = rules.until(calls.trigger)
        rest = rules.terminal(f"/{ANY}*/ & ~/{ANY}*{trigger}{ANY}*/" if self._spelled else f"/{ANY}*/")
        chunk = f"{free} {self._all(rules, several and bool(calls.section[0]), read=True)}"
        return rules.text(f"{head}(({chunk})* {rest})" if several else f"{head}({chunk} | {rest})")

    def markers(self) -> frozenset[str]:
        """The markers of the grammar that was written last, if its texts are free up to these, and it names no other
        grammar, which may have texts that are free up to a length."""
        rules = self._rules
        return frozenset(rules.markers) if rules.only_free and not self.grammars else frozenset()

    # --- parts

    def _begun(self) -> Rules:
        self._rules = Rules(self._cut, compact=self._options.compact_json)
        return self._rules

    def _all(self, rules: Rules, several: bool, *, read: bool = False) -> str:
        """A section of calls, in which `several` may stand. `read`: its trigger has come already."""
        calls = self._calls
        call = first = self._any_call(rules)
        opening = calls.section[0].removeprefix(calls.trigger) if read else calls.section[0]
        if read and not calls.section[0]:
            first = self._any_call(rules, read=True)
        between = rules.literal(calls.between)
        more = f"({_joined(between, call)})*" if several else ""
        return _joined(rules.literal(opening), first, more, rules.literal(calls.section[1]))

    def _any_call(self, rules: Rules, *, read: bool = False) -> str:
        """A call of one of the tools."""
        spellings = self._spellings[: 1 if read else None]
        arms = (self._call(rules, tool, calls, read=read) for tool in self._tools for calls in spellings)
        return rules.rule(" | ".join(map(rules.rule, arms)))

    def _call(self, rules: Rules, tool: _Tool, calls: Calls, *, read: bool = False) -> str:
        """One call in one of the spellings."""
        kind = calls.arguments
        begin = calls.call[0].removeprefix(calls.trigger) if read else calls.call[0]
        if isinstance(kind, Json) and kind.fields is not None:
            value = _object(rules, tool, kind, kind.fields, read=read and not calls.call[0])
            return _joined(rules.literal(begin), value, self._end(rules))
        name = text_rule(tool.tool.name)
        head = _joined(rules.literal(begin + calls.name[0]), name, rules.literal(calls.name[1]))
        if isinstance(kind, Json):
            return _joined(head, rules.json(tool.plain.schema), self._end(rules))
        values: ArgumentRules
        if isinstance(kind, Tagged):
            values = TaggedRules(rules, kind, tool.plain, strict=tool.tool.strict, string=tool.text)
        elif isinstance(kind, Bare):
            values = BareRules(rules, kind, tool.plain, strict=tool.tool.strict, string=tool.text)
        else:
            values = KeywordRules(rules, tool.plain, strict=tool.tool.strict)
        try:
            return _joined(head, values.arguments(), self._end(rules))
        except SchemaError as error:
            raise SchemaError(tool.tool.param + error.path, str(error), str(error.code)) from None

    def _end(self, rules: Rules) -> str:
        return rules.literal(self._calls.call[1])


def call_grammar(
    form: CallFormat,
    compiled: Compile,
    cut: Cut,
    *,
    blank: str,
    body: str | None = None,
    heads: ChannelRules | None = None,
    options: GrammarOptions = GrammarOptions(),  # noqa: B008  # frozen
) -> CallGrammar:
    """The grammar of a reply of calls, or of calls in free text; with `body`, a piece of grammar, of calls or of it.

    `blank`: a piece of grammar for what stands before; `heads`: for a reply of channels. The arguments of a tool that
    is not strict are any object if its schema does not compile. Raises SchemaError with the path of a strict tool's
    schema in the request.
    """
    if len(form.text) > options.tools_max_kib << 10:
        raise too_complex("tools", f"have {len(form.text) >> 10:,} KiB, expected at most {options.tools_max_kib:,}")
    rules = CallRules(form, compiled, cut, options)

    def made(lark: str) -> LLMatcher:
        return compiled(lark, **rules.grammars)

    def grammar() -> CallGrammar:
        matcher = made(make())
        markers = frozenset[str]() if body is not None else rules.markers()
        return CallGrammar(matcher, tuple(dict.fromkeys(rules.relaxed)), triggers, begins, markers)

    begins = frozenset() if rules.trigger is None else frozenset({rules.trigger})
    triggers: frozenset[int] = frozenset()
    make: Callable[[], str]
    text_head = blank if heads is None else heads.body
    if form.required or body is not None:
        make = partial(rules.required, heads.calls if heads and form.calls.message else text_head, body, text_head)
    elif heads is not None and form.calls.message:
        make = partial(rules.in_channels, heads)
    elif begins:
        make, triggers = rules.behind_trigger, begins
    else:
        make = partial(rules.in_text, blank, "" if heads is None else heads.body)
    try:
        return grammar()
    except GrammarError as error:
        failed = error
    for index, tool in enumerate(form.tools):
        try:
            made(rules.alone(index))
        except GrammarError as error:
            if tool.strict:
                code = {EMPTY: "invalid_schema", INVALID: "unsupported_schema"}.get(str(error.code), str(error.code))
                raise SchemaError(tool.param, error.reason, code) from None
            rules.forget(index)
    try:
        return grammar()
    except GrammarError as error:
        raise SchemaError("tools", failed.reason, str(error.code)) from None


def _any_object() -> PlainSchema:
    return PlainSchema(_ANY_OBJECT, (), {})


def _with_pattern(plain: PlainSchema, pattern: str) -> PlainSchema:
    """The schema of one text, which a regular expression matches whole."""
    properties = plain.schema["properties"]
    matched = {name: {**inner, "pattern": f"^(?:{pattern})$"} for name, inner in properties.items()}
    return plain._replace(schema={**plain.schema, "properties": matched})


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part and part != '""') or '""'


def _object(rules: Rules, tool: _Tool, kind: Json, fields: tuple[str, str], *, read: bool) -> str:
    """A call that is one object. It begins with a brace and the first key, which may be a trigger that has been
    `read`."""
    space, gap = rules.space(), rules.space(gap=True)
    name = text_rule(json.dumps(tool.tool.name, ensure_ascii=False))
    pairs = [(fields[0], name), (fields[1], rules.json(tool.plain.schema))]
    if kind.number is not None:
        pairs.insert(0, (kind.number, rules.terminal('"\\"" /(0|[1-9][0-9]{0,3})/ "\\""')))
    if kind.id is not None:
        pairs.append((kind.id, rules.terminal('"\\"" /[a-zA-Z0-9]{9}/ "\\""')))
    parts = [_joined(text_rule(json.dumps(key)), space, '":"', gap, value, space) for key, value in pairs]
    whole = '"{" ' + f'"," {gap} '.join(parts) + ' "}"'
    return whole.removeprefix('"{" ' + text_rule(json.dumps(pairs[0][0]))) if read else whole
