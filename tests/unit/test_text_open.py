"""The text side of a model, opened."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from luce.config.settings import Config
from luce.errors import ModelError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.text import open as text_open
from luce.text.template_child import TemplateChild

MODEL = Path(__file__).parents[1] / "reference" / "qwen3-a-F32.gguf"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[TemplateChild]:
    """The processes that `open_text` starts."""
    made: list[TemplateChild] = []

    def start() -> TemplateChild:
        made.append(TemplateChild())
        return made[-1]

    monkeypatch.setattr(text_open, "TemplateChild", start)
    return made


def test_the_process_of_the_template_ends_with_the_model(children: list[TemplateChild], tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open_gguf(MODEL))
        spec = read_spec(Source(str(MODEL), file.metadata, file.tensors))
        config = Config(chat_template=template)
        _, chat = text_open.open_text(opened, file, spec, config)
        assert chat.template is not None and chat.template.process is children[0].process
        assert children[0].process.poll() is None
        with pytest.raises(ModelError, match=r"tensor token_embd\.weight has 3 rows"):
            text_open.open_text(opened, file, dataclasses.replace(spec, vocab=3), config)
        assert children[1].process.poll() is None
    assert all(child.process.poll() is not None for child in children)
