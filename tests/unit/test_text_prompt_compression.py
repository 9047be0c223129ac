"""Prompts as the target reads them, with a scripted small model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from luce.compress.compression_options import CompressionOptions, Verdict
from luce.compress.compressor import Compressor
from luce.engine.events import Event, Finished, FinishReason, Started, Timings
from luce.errors import RequestError, UsageError
from luce.text.prompt_compression import CompressionRequest, PromptCompression
from tests.support.scorers import ScriptedScorer
from tests.support.scripted_model import END, tokenizer

CONTEXT = 4096
#: token i is the byte i, with one control token inside
PROMPT = [*(97 + i * i % 23 for i in range(2000)), END, *(97 + i * i % 19 for i in range(1000))]


def compression(scorer: ScriptedScorer | None = None, **options: Any) -> PromptCompression:
    found = scorer or ScriptedScorer()
    settings = CompressionOptions(**{"mode": "always", "keep_ratio": 0.1, **options})
    return PromptCompression(Compressor(settings, lambda: found, identity="a"), tokenizer(), CONTEXT, CONTEXT)


def test_control_tokens_are_kept() -> None:
    found = compression().read(PROMPT)
    assert found.verdict is Verdict.COMPRESS and END in found.ids and len(found.ids) < len(PROMPT) / 2


def test_what_is_around_headers_is_not_kept_for_their_sake() -> None:
    random, header = np.random.default_rng(0), [END, 10, 11, 12]
    prompt = [token for n in (600, 600, 600, 600, 40) for token in (*header, *random.integers(20, 220, n).tolist())]
    found = compression(keep_ratio=0.05).read(prompt)
    # Four chunks, and the control tokens with what lies up to the next place for a cut.
    assert len(found.ids) < 4 * 32 + 5 * 17


@pytest.mark.parametrize("id", [-1, 10**6])
def test_the_engine_gets_unknown_ids_as_they_are(id: int) -> None:
    found = compression().read([*PROMPT, id])
    assert found.verdict is Verdict.OFF and list(found.ids) == [*PROMPT, id]
    assert compression().read([]).verdict is Verdict.OFF


def test_a_request_goes_before_the_settings() -> None:
    off, on = compression(mode="off"), compression()
    assert off.read(PROMPT).verdict is Verdict.OFF
    asked = off.read(PROMPT, request=CompressionRequest("always", 0.5))
    assert asked.verdict is Verdict.COMPRESS and len(asked.ids) > len(on.read(PROMPT).ids)
    assert on.read(PROMPT, request=CompressionRequest("off")).verdict is Verdict.OFF


def test_kept_tokens_have_their_original_positions_if_asked_for() -> None:
    rebased, original = compression().read(PROMPT), compression(positions="original").read(PROMPT)
    assert rebased.position_ids is None and original.position_ids is not None
    assert list(original.ids) == list(rebased.ids) == [PROMPT[position] for position in original.position_ids]
    whole = compression(positions="original").read(PROMPT, request=CompressionRequest("off"))
    assert whole.position_ids is None


def test_positions_beyond_the_trained_length_are_counted_anew() -> None:
    made = compression(positions="original")
    exact, longer = (replace(made, positions=len(PROMPT) + more) for more in (1, 0))
    read = exact.read(PROMPT)
    assert read.position_ids is not None and exact.room(read) == 1
    assert replace(made, positions=len(PROMPT) + 9).room(read) == 9
    read = longer.read(PROMPT)
    assert read.position_ids is None and longer.room(read) == CONTEXT - len(read.ids)


def test_without_a_small_model_nothing_is_compressed() -> None:
    none = PromptCompression(None, tokenizer(), CONTEXT, CONTEXT)
    assert none.read(PROMPT).verdict is Verdict.OFF and none.mode(CompressionRequest("off")) == "off"
    with pytest.raises(UsageError, match="always: requires --prefill-drafter"):
        none.read(PROMPT, request=CompressionRequest("always"))


def test_a_reply_leaves_no_room_unless_it_has_no_tokens() -> None:
    """The prompt of CONTEXT tokens fits only without a reply."""
    prompt = (PROMPT * 2)[:CONTEXT]
    auto = compression(mode="auto", threshold=10**6)
    assert auto.read(prompt, room=0).verdict is Verdict.SHORT
    assert auto.read(prompt).verdict is Verdict.COMPRESS


def test_the_check_ends_the_work() -> None:
    def leave() -> None:
        raise RequestError("the client has left", code="cancelled")

    with pytest.raises(RequestError, match="left"):
        compression().read(PROMPT, check=leave)


def test_the_time_of_the_target_is_that_of_the_tokens_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    seen: list[tuple[int, float]] = []
    auto = compression(mode="auto")
    assert auto.compressor is not None
    monkeypatch.setattr(auto.compressor, "observe", lambda *measured: seen.append(measured))
    finished = Finished(FinishReason.LENGTH, "", Timings(prompt=1.5, prompt_tokens=3000, cached_tokens=1000), seed=0)
    for event in (Started(), finished):
        auto.observing(events.append)(event)
    assert len(events) == 2 and events[1] is finished and seen == [(2000, 1.5)]
