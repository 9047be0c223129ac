"""`luce serve` without a model: what it does with one before it is ready."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.cli import serve
from luce.config.settings import Config
from luce.errors import LuceError, UsageError
from luce.server.model_pool import ModelEntry
from luce.text.vocabulary import KeptVocabularies
from tests.support.reference import Reference


class Found(LuceError):
    """Ends the server at what the test looks for."""


class Loaded:
    """A model that has been loaded."""

    def warm_up(self) -> None:
        raise Found("warms up")

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise Found("is ready")


@pytest.mark.parametrize(
    ("flags", "what"), [([], "warms up"), (["--warmup"], "warms up"), (["--no-warmup"], "is ready")]
)
def test_a_model_warms_up_before_it_is_ready(flags: list[str], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "open_model", lambda *_, **options: Loaded())
    monkeypatch.setattr(serve, "resolve_model", lambda name, **options: Path(name))
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(Found, match=what):
        serve.run(parser.parse_args(["model.gguf", "--port", "0", *flags]))


def test_a_request_that_waits_for_a_model_does_not_wait_for_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "open_model", lambda *_, **options: Loaded())
    monkeypatch.setattr(serve, "resolve_model", lambda name, **options: Path(name))
    entry = ModelEntry("a", "model.gguf", Config(warmup=True))
    with pytest.raises(Found, match="warms up"):
        serve.open_entry(None, KeptVocabularies(), entry, lambda share: None)
    entry.waiting_requests = 1
    assert isinstance(serve.open_entry(None, KeptVocabularies(), entry, lambda share: None), Loaded)


def test_a_model_that_cannot_reason_is_not_loaded_to_reason(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(UsageError) as caught:
        luce.load(Reference("qwen3-a-F32").path, target_devices="cpu:0", reasoning="on", chat_template=str(template))
    assert str(caught.value) == "--reasoning on: this model has no reasoning"
