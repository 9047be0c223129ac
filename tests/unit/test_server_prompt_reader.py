"""How long the prompts of a request may be before they are compressed, and when the reading of them ends."""

from __future__ import annotations

from typing import Any

import pytest

from luce.compress.compression_options import CompressionOptions
from luce.compress.compressor import Compressor
from luce.config.settings import Config
from luce.errors import RequestError
from luce.server.prompt_reader import PromptReader
from luce.server.schema import ChatRequest, Message
from tests.support.scorers import ScriptedScorer
from tests.support.scripted_model import ScriptedModel

CONTEXT = 2048
QUESTION = Message(role="user", content="a")
PROMPT = [97 + i * i % 23 for i in range(3000)]


def reader(
    scorer: ScriptedScorer, request: ChatRequest | None = None, *, freeze: bool = False, **options: Any
) -> PromptReader:
    settings = CompressionOptions("auto", keep_ratio=0.1, freeze=freeze)
    model = ScriptedModel(Config(), context=CONTEXT, compressor=Compressor(settings, lambda: scorer, identity="a"))
    try:
        chosen = {"stopped": lambda: False, **options}
        return PromptReader(request or ChatRequest(), model, **chosen)  # type: ignore[arg-type]
    finally:
        model.close()


@pytest.mark.parametrize(
    ("request_", "freeze", "options", "longer"),
    [
        (ChatRequest(), False, {"messages": [QUESTION]}, True),
        (ChatRequest(prefill_compression="off"), False, {"messages": [QUESTION]}, False),
        (ChatRequest(), False, {"whole": True}, False),
        (ChatRequest(), False, {"messages": [QUESTION, Message(role="assistant", content="b")]}, False),
        (ChatRequest(), True, {"messages": [QUESTION, Message(role="assistant", content="b")]}, True),
    ],
    ids=["compressed", "off", "whole", "continuation", "older messages compressed"],
)
def test_only_prompts_that_may_be_compressed_are_read_beyond_the_context(
    request_: ChatRequest, freeze: bool, options: dict[str, Any], longer: bool
) -> None:
    limit = reader(ScriptedScorer(), request_, freeze=freeze, **options).limit.tokens
    assert limit is not None and (limit > CONTEXT) is longer and limit >= CONTEXT


def test_a_client_that_leaves_ends_the_compression() -> None:
    left: list[int] = []
    scorer = ScriptedScorer(lambda text: left.append(text))
    with pytest.raises(RequestError, match="left") as caught:
        reader(scorer, stopped=lambda: bool(left)).read(PROMPT)
    assert caught.value.code == "cancelled" and scorer.read == [len(PROMPT)]
