"""A reply goes on behind tokens that another engine has chosen, as it would have gone on there."""

from __future__ import annotations

import queue

import pytest

import luce
from luce.config.sampling import SamplingParams
from luce.engine.events import Event, Failed, Finished, Tokens
from luce.errors import RequestError
from tests.support.draft_identity import TINY

PARAMS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0),
    "drawn": SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True),
    "candidates": SamplingParams(max_tokens=40, temperature=1.0, top_k=20, top_p=0.9, seed=8, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=40, temperature=0.8, seed=9, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True
    ),
}


def reply(model: luce.Model, params: SamplingParams, given: tuple[int, ...] = ()) -> tuple[list[int], Finished]:
    """The tokens that events have, and the last event."""
    ids, events, found = model.tokenize("Once upon a time"), queue.SimpleQueue[Event](), list[int]()
    model.engine.submit(ids, params, output=model.reply_text((), ids), on_event=events.put, given=given)
    while True:
        event = events.get(timeout=60)
        assert not isinstance(event, Failed), event
        if isinstance(event, Finished):
            return found, event
        if isinstance(event, Tokens):
            found += [token.id for token in event.tokens]


@pytest.fixture(scope="module", params=["off", "ngram"])
def model(request: pytest.FixtureRequest) -> object:
    draft = {} if request.param == "off" else {"draft": "ngram"}
    with luce.load(TINY / "target.gguf", target_device="cpu:0", threads=1, kv_cache_dir="off", **draft) as found:
        yield found


@pytest.mark.parametrize("name", PARAMS)
def test_a_reply_goes_on_behind_given_tokens(model: luce.Model, name: str) -> None:
    whole, end = reply(model, PARAMS[name])
    assert len(whole) == 40
    for count in (1, 2, 17, 39, 40):
        rest, last = reply(model, PARAMS[name], tuple(whole[:count]))
        assert [*whole[:count], *rest] == whole
        # Where the given tokens end the reply, nothing is read.
        read = end.timings.prompt_tokens if count < 40 else 0
        assert (last.reason, last.timings.predicted_tokens, last.timings.prompt_tokens) == (end.reason, 40, read)


def test_given_tokens_that_end_a_reply_end_it(model: luce.Model) -> None:
    whole, _ = reply(model, PARAMS["greedy"])
    ids = model.tokenize("Once upon a time")
    stop = SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=frozenset({whole[4]}))
    rest, last = reply(model, stop, tuple(whole[:5]))
    assert rest == [] and last.stop == whole[4]
    for wrong in ((model.tokenizer.vocab,), tuple(whole) * 2):
        with pytest.raises(RequestError, match="begins with"):
            model.engine.submit(
                ids, PARAMS["greedy"], output=model.reply_text((), ids), on_event=lambda event: None, given=wrong
            )
