"""Responses of /v1/messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from luce import log
from luce.api import Model
from luce.engine.events import Progress, Token
from luce.errors import LuceError
from luce.server.content_blocks import ContentBlocks
from luce.server.errors import anthropic_error
from luce.server.finish_details import finish_details, was_cut
from luce.server.prepare import Job
from luce.server.response import Json, ResponseBuilder
from luce.server.stream import ServerSentEvent
from luce.server.thinking_signature import sign
from luce.text.reply_parser import Part, ReplyParser, joined


@dataclass(frozen=True)
class MessagesDetails:
    """Job.details of /v1/messages."""

    #: tokens of the prompt up to the last block with a cache mark, 0 without one
    marked_tokens: int
    omits_thinking: bool


class MessagesResponse(ResponseBuilder):
    """/v1/messages: one reply, of content blocks."""

    prefix = "msg_"

    def __init__(self, job: Job, model: Model) -> None:
        super().__init__(job, model)
        assert isinstance(job.details, MessagesDetails)
        self._details = job.details
        self._blocks = self._new_blocks()
        self._started = False

    def _parser(self, index: int) -> ReplyParser:
        return self._model.chat.reply_parser(self._job.prompts[index], self._job.tools)

    def _new_blocks(self) -> ContentBlocks:
        carries = self._details.omits_thinking
        signed = partial(sign, model=self._model.fingerprint, carries=carries)
        return ContentBlocks(signed, omits_thinking=carries)

    # --- stream

    def opening(self, index: int) -> Iterable[ServerSentEvent]:
        """Nothing: message_start has the tokens from the cache, which are known when the prompt begins."""
        return ()

    def progress(self, index: int, event: Progress) -> Iterable[ServerSentEvent]:
        """message_start, when the prompt begins."""
        return self._start()

    def _start(self) -> Iterable[ServerSentEvent]:
        if not self._started:
            self._started = True
            message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
            # As the protocol has it: the reply's first token is in the first count.
            yield _event("message_start", message={**message, "usage": self._usage(1)})

    def extension(self, index: int, parts: Sequence[Part], tokens: Sequence[Token] = ()) -> Iterable[ServerSentEvent]:
        """The events of the blocks that grow."""
        yield from self._start()
        yield from self._blocks.extend(parts)

    def closing(self, index: int) -> Iterable[ServerSentEvent]:
        """The end of the last block, and why the reply ended."""
        yield from self._blocks.close()
        finished = self.choices[index].finished
        assert finished is not None
        usage = self._output(self._usage(finished.timings.predicted_tokens))
        details = finish_details(self.choices[index], self._job)
        yield _event("message_delta", delta=self._ending(self._blocks), usage=usage, finish_details=details)

    def ending(self) -> Iterable[ServerSentEvent]:
        """The last event."""
        return (_event("message_stop"),)

    @staticmethod
    def refusal(error: LuceError) -> Iterable[ServerSentEvent]:
        """The error as an event."""
        return (ServerSentEvent(anthropic_error(error, log.request_id.get()), "error"),)

    def ping(self) -> bytes:
        """The protocol's own event."""
        return _event("ping").encoded()

    # --- whole reply

    def reply(self) -> Json:
        """The message. Takes time in proportion to its size."""
        (choice,) = self.choices
        assert choice.finished is not None
        blocks = self._new_blocks()
        for _ in (*blocks.extend(joined(choice.parts)), *blocks.close()):
            pass
        usage = self._output(self._usage(choice.finished.timings.predicted_tokens))
        ending = {**self._ending(blocks), "usage": usage, "finish_details": finish_details(choice, self._job)}
        return {**self._head(), "content": blocks.closed, **ending}

    def _head(self) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._job.model}

    def _ending(self, blocks: ContentBlocks) -> Json:
        finished = self.choices[0].finished
        assert finished is not None
        stop = finished.stop if isinstance(finished.stop, str) else None
        reason = "stop_sequence" if stop is not None else "end_turn"
        if was_cut(self.choices[0]):
            reason = "max_tokens"
        elif blocks.calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _usage(self, output: int) -> Json:
        """Prompt tokens in three parts that add up: read from the cache, new up to the last mark, and the rest."""
        (choice,) = self.choices
        cached = choice.cached
        created = max(0, self._details.marked_tokens - cached)
        return {
            "input_tokens": choice.reading.original - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
        }

    def _output(self, usage: Json) -> Json:
        return {**usage, "output_tokens_details": {"thinking_tokens": self.choices[0].parser.reasoning_tokens}}


def _event(name: str, **fields: object) -> ServerSentEvent:
    return ServerSentEvent({"type": name, **fields}, name)
