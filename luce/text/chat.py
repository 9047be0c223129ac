"""Conversations to prompts: the messages that a template gets, and the control tokens that its result may hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from luce.engine.events import Texts
from luce.engine.reasoning_limit import ReasoningLimit
from luce.errors import ContextError, RequestError, UnavailableError
from luce.models.spec import Dialect, Markers, ReasoningBudget
from luce.models.tool_formats import choose_calls
from luce.text.boundaries import Boundaries
from luce.text.call_memory import CallMemory, Known, PromptDigest
from luce.text.call_parser import CallableTools, CallParser
from luce.text.channel_splitter import channel_splitter
from luce.text.detokenizer import Detokenizer
from luce.text.marks import Marks
from luce.text.output import ReplyText
from luce.text.plain_messages import as_user, merged, plain_message, with_system_in_user
from luce.text.prompt_limit import NO_LIMIT, PromptLimit
from luce.text.reasoning import (
    ReasoningTokens,
    Splitter,
    reasoning_limit,
    reasoning_splitter,
    reasoning_tokens,
)
from luce.text.reply_parser import CallEnded, ReplyParser
from luce.text.template import ChatTemplate
from luce.text.token_memory import TokenMemory
from luce.text.tokenizer import Tokenizer
from luce.text.tool_history import for_template

Message = Mapping[str, Any]
#: most line feeds that templates put between a reply and the marker that ends its message
_LINE_FEEDS = 2
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_STEP = 1 << 20
#: tokens at the end of a prompt that may spell a marker of reasoning
_OPENING = 64


class ChatFormat:
    """A model's template and tokenizer together. Thread-safe; both methods block while the template renders.

    Templates get simple conversations: each content is one string, `developer` becomes `system`, and the system
    messages at the start become one. Many templates take a system message in first place only: if a template refuses
    the others, they become user messages that begin with "System: ".

    Control tokens come only from the template: their texts inside anything that a client sent (contents, names, tools,
    further variables) become ordinary text. Before rendering, one private-use character that occurs nowhere else
    replaces each such text; the result is cut at its special tokens; then the texts are put back and tokenised
    together with the text around them. The template gets the same structure, only a few characters shorter.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        dialect: Dialect | None = None,
        tool_format: str = "auto",
    ) -> None:
        """`tool_format` as in choose_calls. Raises ValueError for an unknown one."""
        self.template = template
        self._tokenizer = tokenizer
        dialect = dialect or Dialect()
        self._dialect = dialect
        self._reasoning = dialect.reasoning
        self._boundaries = Boundaries(tokenizer, dialect.message)
        #: the dialect of tool calls, and why it is this one
        self.calls, self.calls_why = choose_calls(
            None if template is None else template.source, dialect.calls, tool_format
        )
        self._call_marks = Marks(self.calls, tokenizer, dialect.channels)
        #: texts that begin calls and are no control tokens: clients may write them
        self._triggers = tuple(
            dict.fromkeys(
                calls.trigger
                for calls in (self.calls, *self.calls.accepts)
                if all(token is None for token, _ in tokenizer.control.cut(calls.trigger))
            )
        )
        #: the ids of the texts of replies
        self.memory = TokenMemory(tokenizer)
        self._call_memory = CallMemory(self._call_marks, tokenizer, self.memory)

    def text(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt as text, as the template renders it. Arguments are those of `prompt`. Raises RequestError."""
        text, marks = self._render(
            messages, tools, kwargs, opens=add_generation_prompt, continues=continue_final_message
        )
        return text.translate(marks)

    def set_budget(self, budget: ReasoningBudget) -> None:
        """End the reasoning of later replies as this budget says."""
        self._dialect = replace(self._dialect, budget=budget)

    def reads(self, name: str) -> bool:
        """Whether the template has a variable, a key or a word of this name."""
        return self.template is not None and re.search(rf"\b{re.escape(name)}\b", self.template.source) is not None

    def prompt(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        limit: PromptLimit = NO_LIMIT,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt as ids, with BOS if the tokenizer wants one and the template wrote none. Raises RequestError,
        and what `limit` raises.

        `continue_final_message`: the prompt ends with the content of the last message, which must be an assistant's, so
        that the reply continues it; `add_generation_prompt` must be False.

        Texts that `remember` has seen get the ids that they had there, also where the template adds line feeds to
        them, and past calls those of calls that mean the same.
        """
        text, marks = self._render(
            messages, tools, kwargs, opens=add_generation_prompt, continues=continue_final_message, limit=limit
        )
        tokenizer = self._tokenizer
        if not marks:
            tokenizer.refuse_long(text, limit)
        ids: list[int] = []
        at, digest = 0, PromptDigest()

        def add_until(offset: int) -> None:
            nonlocal at
            self._add_ids(ids, text[at:offset], marks, limit)
            at = offset

        def before(offset: int) -> bytes:
            nonlocal ids
            add_until(offset)
            ids = tokenizer.with_bos(ids)
            return digest.of(ids)

        for known in self._known_calls(messages, tools, text, marks, limit, before):
            add_until(known.begin)
            ids += known.ids
            at = known.end
        add_until(len(text))
        return tokenizer.with_bos(ids)

    def _known_calls(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        text: str,
        marks: Mapping[int, str],
        limit: PromptLimit,
        before: Callable[[int], bytes],
    ) -> Iterator[Known]:
        """The known calls of a rendered conversation that has calls."""
        limit.check(0)
        if not tools or not _has_calls(messages):
            return iter(())
        functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
        schemas = {str(function.get("name")): function.get("parameters") for function in functions}
        return self._call_memory.find(text, marks, schemas, before)

    def _add_ids(self, ids: list[int], text: str, marks: Mapping[int, str], limit: PromptLimit) -> None:
        """Add the ids of a part of a rendered text."""
        # A client's trigger is what it was without tools: one that is visible text stays a token.
        triggers = {mark: control for mark, control in marks.items() if control in self._triggers}
        text = text.translate(triggers) if triggers else text
        for token, piece in self._tokenizer.special.cut(text):
            limit.check(len(ids))
            if token is not None:
                ids.append(token)
            else:
                ids += self._encoded(piece.translate(marks) if marks else piece, limit, len(ids))

    @property
    def reasoning_markers(self) -> Markers | None:
        """The texts around the reasoning of a reply; None: the family has none."""
        return self._reasoning

    @property
    def reasons(self) -> bool:
        """Whether replies may have reasoning: the template writes or reads its markers."""
        markers, source = self._reasoning, "" if self.template is None else self.template.source
        return markers is not None and any(text.strip() in source for text in (markers.open, markers.close))

    def remember(self, prompt: Sequence[int], reply: Sequence[int], tools: CallableTools | None = None) -> Texts:
        """Remember the ids of a reply, and those between the prompt's last special token and the reply, for later
        prompts that contain their text; those of its calls of `tools` too, for prompts with calls that mean the same.

        Returns the remembered texts, with their positions in prompt and reply.
        """
        opening = len(prompt)
        while opening and not self._tokenizer.is_special(prompt[opening - 1]):
            opening -= 1
        found = self.memory.remember([*prompt[opening:], *reply])
        texts = tuple((digest, opening + begin, opening + end) for digest, begin, end in found)
        if tools is None:
            return texts
        return texts + self._call_memory.remember(prompt, reply, tools.schemas, self.splitter(prompt, calls=True))

    def boundaries(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Lengths at which prompts that begin like this one are likely to diverge from it, ascending."""
        return self._boundaries.find(prompt)

    def splitter(self, prompt: Sequence[int], *, calls: bool = False) -> Splitter | None:
        """Separates reasoning from content in a reply to this prompt; None if the model marks no reasoning. `calls`:
        the token that begins a call ends the reasoning."""
        if self._call_marks.channels is not None:
            return channel_splitter(self._call_marks, self._tokenizer, prompt, calls=calls)
        trigger = self._call_marks.calls.trigger
        call = trigger if calls and self._call_marks.is_mark(trigger) else ""
        return None if self._reasoning is None else reasoning_splitter(self._reasoning, self._tokenizer, prompt, call)

    def reply_parser(self, prompt: Sequence[int], tools: CallableTools | None = None) -> ReplyParser:
        """Divides a reply to this prompt into its parts: the texts of reply_text with the same tools."""
        if tools is None:
            return ReplyParser(self.splitter(prompt))
        return ReplyParser(self.splitter(prompt, calls=True), CallParser(self._call_marks, tools.schemas))

    def reply_text(
        self,
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        remember: bool = True,
        split: bool = False,
        tools: CallableTools | None = None,
    ) -> ReplyText:
        """The text of one reply to a prompt; the first stop string ends it. `remember`: whether later prompts that
        repeat the reply get its ids. `split`: the text is for `splitter`; with `tools` it is for reply_parser."""
        single = self.reply_parser(prompt, tools) if tools is not None and tools.single else None

        def complete(text: str) -> bool:
            return single is not None and any(isinstance(part, CallEnded) for part in single.push(-1, text))

        return ReplyText(
            self._tokenizer,
            stops,
            (lambda reply: self.remember(prompt, reply, tools)) if remember else None,
            marks=self._call_marks if tools is not None or (split and self._call_marks.channels) else None,
            complete=None if single is None else complete,
        )

    @property
    def trigger(self) -> int | None:
        """The token that begins a call, None if it is not one special token."""
        return next(
            (token for token, mark in self._call_marks.of_token.items() if mark == self._call_marks.calls.trigger), None
        )

    @property
    def exact_calls(self) -> bool:
        """Whether calls begin with a special token."""
        return self._call_marks.is_mark(self._call_marks.calls.trigger[:1])

    @property
    def call_ends(self) -> frozenset[int]:
        """The tokens that end a reply once it has a call."""
        return frozenset(
            token for token, mark in self._call_marks.of_token.items() if mark in self._call_marks.calls.ends
        )

    def reasoning_tokens(self, prompt: Sequence[int]) -> ReasoningTokens | None:
        """The markers of reasoning as a reply to this prompt finds them; None if the model marks no reasoning."""
        found = None if self._reasoning is None else reasoning_tokens(self._reasoning, self._tokenizer, prompt)
        if found is None or self._call_marks.channels is None or self._dialect.channels is None:
            return found
        place = channel_splitter(self._call_marks, self._tokenizer, prompt).place
        return found._replace(inside=place == "reasoning", channels=(self._dialect.channels, place))

    def reasons_without_end(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt begins the reasoning, and the vocabulary has no token that ends it."""
        if self._reasoning is None or self.reasoning_tokens(prompt) is not None:
            return False
        decoder = Detokenizer(self._tokenizer, continues=True)
        end = "".join(map(decoder.push, prompt[-_OPENING:])) + decoder.flush()
        return end.rstrip().endswith(self._reasoning.open.strip())

    def reasoning_limit(self, prompt: Sequence[int], budget: int | None, reply_reserve: int) -> ReasoningLimit | None:
        """The limit of the reasoning in a reply to this prompt; None if the model marks no reasoning. Arguments are
        those of ReasoningLimit."""
        found, tokens = self.reasoning_tokens(prompt), self._tokenizer
        return None if found is None else reasoning_limit(self._dialect, tokens, found, budget, reply_reserve)

    def _encoded(self, text: str, limit: PromptLimit, before: int) -> Sequence[int]:
        for end in range(len(text), max(len(text.rstrip("\n")), len(text) - _LINE_FEEDS, 1) - 1, -1):
            found = self.memory.recall(text[:end])
            if found is not None:
                return [*found, *self._tokenizer.encode(text[end:], specials=False)]
        return self._tokenizer.encode(text, specials=False, limit=limit, before=before)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        kwargs: Mapping[str, Any],
        *,
        opens: bool,
        continues: bool = False,
        limit: PromptLimit = NO_LIMIT,
    ) -> tuple[str, dict[int, str]]:
        """The rendered text with marks in it, and the control text of each mark (a code point).

        `opens`: the template opens the reply. `continues`: the text ends with the content of the last message.
        """
        if self.template is None:
            raise RequestError("the model file has no chat template; use /v1/completions or --chat-template")
        plain = merged([plain_message(message, i) for i, message in enumerate(messages)])
        # Before calls become text, in templates that have no place for them.
        if continues and (plain[-1].get("role") != "assistant" or plain[-1].get("tool_calls")):
            raise _not_continued("the last message must be an assistant's, without tool calls")
        plain, tools, triggers = self._without_triggers(plain, tools)
        plain, tools = for_template(plain, tools, self.calls, self.template.source)
        # Before the template gets it: the conversation as JSON is one call, which stops all other threads. Templates
        # write a user's words as they are, but for the whitespace around them.
        for message in plain:
            if message.get("role") == "user" and isinstance(message["content"], str):
                self._tokenizer.refuse_long(message["content"].strip(), limit)
        variables = {**kwargs, "tools": tools, "add_generation_prompt": opens}
        text, marks = self._render_folded(plain, variables, limit, continues=continues)
        return text, marks | triggers

    def _without_triggers(
        self, messages: list[dict[str, Any]], tools: Sequence[Message] | None
    ) -> tuple[list[dict[str, Any]], Sequence[Message] | None, dict[int, str]]:
        """The conversation, if it has calls, with marks for the triggers in it, and the trigger of each mark (a code
        point): only calls of messages, which the template writes, are looked up in the memory of calls."""
        assert self.template is not None
        marks: dict[str, str] = {}
        if tools and _has_calls(messages):
            try:
                free = _Unused({"messages": messages, "tools": tools}, self.template.source)
            except RecursionError:
                return messages, tools, {}
            found = [text for text in self._triggers if any(text in string for string in free.strings)]
            marks = {text: free.take() for text in found}
        if not marks:
            return messages, tools, {}
        kept = ("tool_calls", "function_call")
        masked = [
            {key: value if key in kept else _replaced(value, marks) for key, value in message.items()}
            for message in messages
        ]
        return masked, _replaced(tools, marks), {ord(mark): text for text, mark in marks.items()}

    def _render_folded(
        self, plain: list[dict[str, Any]], variables: Mapping[str, Any], limit: PromptLimit, *, continues: bool
    ) -> tuple[str, dict[int, str]]:
        """The rendered text, with system messages where the template takes them."""
        try:
            return self._render_plain(plain, variables, limit, continues=continues)
        except (ContextError, UnavailableError):
            raise
        except RequestError:
            led = plain[:1] + [as_user(message) for message in plain[1:]]
            folded = with_system_in_user(led)
            if led == plain and folded == led:
                raise
        try:
            return self._render_plain(led, variables, limit, continues=continues)
        except (ContextError, UnavailableError):
            raise
        except RequestError:
            if folded == led:
                raise
            return self._render_plain(folded, variables, limit, continues=continues)

    def _render_plain(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], limit: PromptLimit, *, continues: bool
    ) -> tuple[str, dict[int, str]]:
        assert self.template is not None
        variables = {**variables, "messages": messages}
        try:
            free = _Unused(variables, self.template.source)
            marks = self._marks(free, limit)
            if marks:
                variables = {name: self._masked(value, marks) for name, value in variables.items()}
        except RecursionError:
            raise RequestError("messages or tools are nested too deeply") from None
        *earlier, last = variables.pop("messages")
        if not continues:
            text = self.template.render([*earlier, last], **variables)
        else:
            # A character behind the content shows where it ends, whatever the template writes there.
            end = free.take()
            text = self.template.render([*earlier, {**last, "content": last["content"] + end}], **variables)
            if text.count(end) != 1:
                raise _not_continued("the chat template does not write the last message as it is")
            text = text[: text.index(end)]
        return text, {ord(mark): control for control, mark in marks.items()}

    def _marks(self, free: _Unused, limit: PromptLimit) -> dict[str, str]:
        """For each control token's text in the strings, a character that is neither in them nor in the source."""
        cut = self._tokenizer.control.cut
        controls: set[str] = set()
        for string in free.strings:
            limit.check(0)
            controls.update(piece for token, piece in cut(string) if token is not None)
        return {control: free.take() for control in sorted(controls)}

    def _masked(self, value: Any, marks: Mapping[str, str]) -> Any:
        if isinstance(value, str):
            pieces = self._tokenizer.control.cut(value)
            return "".join(piece if token is None else marks[piece] for token, piece in pieces)
        if isinstance(value, Mapping):
            return {self._masked(key, marks): self._masked(item, marks) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked(item, marks) for item in value]
        return value


class _Unused:
    """Private-use characters that are neither in the strings of the variables nor in the template's source.

    Raises RecursionError for variables that are nested too deeply.
    """

    def __init__(self, variables: Mapping[str, Any], source: str) -> None:
        #: all strings of the variables
        self.strings = list(_strings(variables))
        self._source = source
        self._free: Iterator[str] | None = None

    def take(self) -> str:
        """One that was not taken before. Raises RequestError if there is none."""
        if self._free is None:
            taken = set().union(*(_private(text) for text in (self._source, *self.strings)))
            self._free = (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in taken)
        found = next(self._free, None)
        if found is None:
            raise RequestError("the messages hold control tokens and every private-use character")
        return found


def _has_calls(messages: Sequence[Message]) -> bool:
    return any(message.get("tool_calls") or message.get("function_call") for message in messages)


def _replaced(value: Any, marks: Mapping[str, str]) -> Any:
    """A JSON value with marks for texts in its strings, but for the keys of objects."""
    if isinstance(value, str):
        for text, mark in marks.items():
            value = value.replace(text, mark)
        return value
    if isinstance(value, Mapping):
        return {key: _replaced(item, marks) for key, item in value.items()}
    return [_replaced(item, marks) for item in value] if isinstance(value, list | tuple) else value


def _private(text: str) -> set[str]:
    """The private-use characters of a text. In steps: one call on a long text would stop all other threads."""
    if text.isascii():
        return set()
    return set().union(*(_PRIVATE.findall(text[at : at + _STEP]) for at in range(0, len(text), _STEP)))


def _not_continued(why: str) -> RequestError:
    return RequestError(f"continue_final_message: {why}", param="continue_final_message", code="invalid_value")


def _strings(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
