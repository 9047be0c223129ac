"""The text side of a model, opened."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from luce.config.settings import Config
from luce.errors import UsageError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.text import open as text_open
from luce.text.template_child import TemplateChild
from luce.text.vocabulary import Vocabulary

MODEL = Path(__file__).parents[1] / "reference" / "qwen3-a-F32.gguf"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[TemplateChild]:
    """The processes that `start_template` starts."""
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
        child = text_open.start_template(opened)
        assert [child] == children
        file = opened.enter_context(open_gguf(MODEL))
        spec = read_spec(Source(str(MODEL), file.metadata, file.tensors))
        config, tokenizer = Config(chat_template=template), Vocabulary.read(file, spec).tokenizer
        chat = text_open.open_chat(opened, file, spec, config, tokenizer, child)
        assert chat.template is not None and chat.template.process is children[0].process
        assert children[0].process.poll() is None
        unused = text_open.start_template(opened)
        assert unused is not None and unused.process.poll() is None
    assert all(child.process.poll() is not None for child in children)


def test_a_file_without_a_template_keeps_no_process(tmp_path: Path) -> None:
    base = tmp_path / "base.gguf"
    # A key of another name in the place of the template's.
    base.write_bytes(MODEL.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatf", 1))
    with contextlib.ExitStack() as opened:
        child = text_open.start_template(opened)
        assert child is not None
        file = opened.enter_context(open_gguf(base))
        spec = read_spec(Source(str(base), file.metadata, file.tensors))
        chat = text_open.open_chat(opened, file, spec, Config(), Vocabulary.read(file, spec).tokenizer, child)
        assert chat.template is None and child.process.poll() is not None


def test_a_template_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    config = Config(chat_template=tmp_path / "nowhere")
    with contextlib.ExitStack() as opened, pytest.raises(UsageError) as caught:
        file = opened.enter_context(open_gguf(MODEL))
        spec = read_spec(Source(str(MODEL), file.metadata, file.tensors))
        text_open.open_chat(opened, file, spec, config, Vocabulary.read(file, spec).tokenizer, None)
    assert str(caught.value) == f"--chat-template {tmp_path}/nowhere: No such file or directory"


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with contextlib.ExitStack() as opened:
        assert text_open.start_template(opened) is None
