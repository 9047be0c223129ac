"""luce/cli/repl/model_replier.py: replies of channels come as reasoning and content in the terminal too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from luce.api import Model
from luce.cli.repl.model_replier import ModelReplier, ModelReply
from luce.cli.repl.replier import Request
from luce.config.settings import Config
from tests.support.harmony import chat, saying, tokenizer
from tests.support.scripted_model import ScriptedModel

SAID = (
    "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>4.<|return|>"
)


class Speaking(ScriptedModel, Model):
    """A scripted model with the methods of luce.api.Model."""

    placement: list[dict[str, Any]] = []  # noqa: RUF012  # each model has its own
    recommended_by = ""


@pytest.fixture
def model() -> Iterator[Speaking]:
    made = Speaking(Config(), chat=chat, vocabulary=tokenizer(), script=saying(("2 + 2?", SAID)), context=2048)
    yield made
    made.close()


def test_a_reply_of_channels_is_divided(model: Speaking) -> None:
    reply = ModelReplier(model).reply([{"role": "user", "content": "2 + 2?"}], Request(), lambda done, total: None)
    assert isinstance(reply, ModelReply)
    deltas = list(reply)
    assert "".join(delta.reasoning for delta in deltas) == "Simple."
    assert "".join(delta.content for delta in deltas) == "I add.\n\n4."
    assert len(deltas) > len("Simple.I add.4.")


def test_the_text_of_tokens_is_for_the_splitter_or_without_marks(model: Speaking) -> None:
    ids = model.chat.prompt([{"role": "user", "content": "2 + 2?"}])
    plain = "".join(token.text for token in model.generate(ids, temperature=0))
    assert plain == "analysisSimple.assistantcommentaryI add.assistantfinal4."
    splitter = model.chat.splitter(ids)
    assert splitter is not None
    deltas = [splitter.push(token.text) for token in model.generate(ids, temperature=0, split=True)]
    assert "".join(delta.content for delta in [*deltas, splitter.flush()]) == "I add.\n\n4."
