"""Why and how a reply ended: `finish_details`, which the responses of all APIs have beside the fields of their own."""

from __future__ import annotations

from luce.engine.events import FinishReason
from luce.server.choice import Choice
from luce.server.prepare import Job
from luce.server.prompt_reader import compression_facts
from luce.server.response import Json

_LENGTH_CAUSES = {
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "context",
    FinishReason.DEADLINE: "deadline",
    FinishReason.SHUTDOWN: "shutdown",
    FinishReason.CANCELLED: "cancelled",
}


def was_cut(choice: Choice) -> bool:
    """Whether a finished reply ended at a limit, and not by itself or at a stop text."""
    return choice.finished is not None and choice.finished.reason in _LENGTH_CAUSES


def finish_details(choice: Choice, job: Job) -> Json:
    """The details of a finished reply."""
    finished = choice.finished
    assert finished is not None
    facts = compression_facts(choice.reading)
    grammar = job.grammar
    held: Json = {}
    if grammar is not None:
        forced = finished.timings.grammar_forced
        held = {"grammar": {"kind": grammar.wanted.kind, "relaxed": grammar.relaxed, "forced": forced}}
    return {
        "cause": _LENGTH_CAUSES.get(finished.reason, finished.reason.value),
        "stop": finished.stop,
        "seed": finished.seed,
        "close_kind": finished.close_kind,
        "thinking_tokens": choice.parser.reasoning_tokens,
        "content_tokens": finished.timings.predicted_tokens - choice.parser.reasoning_tokens,
        "bad_calls": choice.parser.bad_calls,
        "cut_call": choice.parser.cut_calls > 0,
        "cache": {"tier": finished.timings.cache_tier},
        **held,
        **({} if facts is None else {"prompt_compression": facts}),
    }
