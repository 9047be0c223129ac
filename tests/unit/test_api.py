"""Generation: the tokens of a reply, and the text that is held back until its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import luce
from luce.api import Generation
from luce.config.sampling import SamplingParams
from luce.config.settings import Config
from luce.engine.events import FinishReason
from luce.errors import BackendError
from luce.kvcache.disk.files import open_directory
from luce.kvcache.disk.fingerprint import read_about
from luce.kvcache.disk.manifest import LAYOUT
from luce.runtime.step import Step
from tests.support.drafters import oracle
from tests.support.reference import Reference
from tests.support.replies import Gate
from tests.support.scripted_model import ScriptedModel, saying

PROMPT = list(b"Q:")


def test_a_warm_up_is_neither_counted_nor_cached() -> None:
    with luce.load(Reference("qwen3-a-F32").path, target_devices="cpu:0", max_ctx=256, kv_cache_dir="off") as model:
        model.warm_up()
        stats = model.engine.stats()
        assert (stats.steps, stats.prompt_tokens, stats.predicted_tokens) == (0, 0, 0)
        assert (stats.cache.misses, stats.cache.checkpoints) == (0, 0)
        first = model.generate([model.tokenizer.bos_id or 0, 5], max_tokens=2, temperature=0, ignore_eos=True)
        assert len(list(first)) == 2
        assert first.finish is not None and first.finish.timings.cached_tokens == 0
        stats = model.engine.stats()
        assert (stats.steps, stats.prompt_tokens, stats.predicted_tokens, stats.cache.misses) == (2, 2, 2, 1)


@pytest.mark.parametrize(("alias", "name"), [((), "qwen3-a"), (("mine", "other"), "mine")])
def test_snapshots_are_recorded_under_the_models_name(tmp_path: Path, alias: tuple[str, ...], name: str) -> None:
    path = Reference("qwen3-a-F32").path
    with luce.load(path, target_devices="cpu:0", max_ctx=256, kv_cache_dir=str(tmp_path), alias=alias) as model:
        disk = model.engine.cache.disk if model.engine.cache is not None else None
        assert disk is not None
        disk.wait_opened(60)
        assert disk.store is not None
        with open_directory(tmp_path, LAYOUT, disk.store.model) as directory:
            about = read_about(directory)
    assert about is not None and (about.name, about.model) == (name, disk.store.model)
    assert model.name == name


@pytest.fixture
def made() -> Iterator[list[ScriptedModel]]:
    models: list[ScriptedModel] = []
    yield models
    for model in models:
        model.close()


def generate(model: ScriptedModel, n: int, *stops: str) -> Generation:
    params = SamplingParams(max_tokens=n)
    return Generation(
        lambda sink: model.engine.submit(PROMPT, params, output=model.reply_text(stops, PROMPT), on_event=sink),
        None,
    )


def scripted(made: list[ScriptedModel], says: str | bytes, *, drafts: bool = False) -> ScriptedModel:
    made.append(ScriptedModel(Config(), script=saying(says, marker="Q:", end=False)))  # type: ignore[arg-type]
    if drafts:
        backend = made[-1].backend
        made.append(ScriptedModel(Config(), script=backend.script, drafter=oracle(backend)))
    return made[-1]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("says", "n", "stop", "text"),
    [
        # A character that is not complete, a stop string that is not, and both at once.
        ("abé", 3, "never", "ab\ufffd"),
        ("ab\n--", 4, "\n--x", "ab\n-"),
        ("ab\n\n", 3, "\n\n", "ab\n"),
        ("a🎉", 4, "🎉!", "a\ufffd"),
        ("abcd", 4, "never", "abcd"),
    ],
)
def test_as_many_tokens_as_ids_with_all_of_the_text(
    says: str, n: int, stop: str, text: str, drafts: bool, made: list[ScriptedModel]
) -> None:
    model = scripted(made, says, drafts=drafts)
    generation = generate(model, n, stop)
    tokens = list(generation)
    assert [token.id for token in tokens] == list(says.encode()[:n])
    assert "".join(token.text for token in tokens) == text
    finish = generation.finish
    assert finish is not None and finish.reason is FinishReason.LENGTH
    assert (finish.text, finish.timings.predicted_tokens) == ("", n)
    # The end stays the end.
    assert next(generation, None) is None


def test_an_end_token_carries_the_text_held_back(made: list[ScriptedModel]) -> None:
    made.append(ScriptedModel(Config(), script=saying("ab\n", marker="Q:")))
    generation = generate(made[-1], 10, "\n\n")
    tokens = list(generation)
    assert [token.text for token in tokens] == ["a", "b", "", "\n"]
    assert tokens[-1].id in made[-1].tokenizer.eos_ids


def test_the_finish_is_there_with_the_last_token(made: list[ScriptedModel]) -> None:
    generation = generate(scripted(made, "abcd"), 3)
    for _ in range(2):
        next(generation)
        assert generation.finish is None
    assert next(generation).text == "c"
    assert generation.finish is not None


def test_an_end_without_a_token_leaves_the_text_held_back_in_the_finish(made: list[ScriptedModel]) -> None:
    model = scripted(made, "a\nbcdefg")
    gate = model.backend.hook = Gate()
    generation = generate(model, 100, "\nbcdefgh")
    for _ in range(3):
        gate.let()
    assert [next(generation).text for _ in range(3)] == ["a", "", ""]
    gate.wait()
    model.engine.stop_running()
    gate.open.set()
    rest = "".join(token.text for token in generation)
    finish = generation.finish
    assert finish is not None and finish.reason is FinishReason.SHUTDOWN
    assert rest == "" and finish.text.startswith("\nb")


def test_an_error_follows_the_tokens_before_it(made: list[ScriptedModel]) -> None:
    model = scripted(made, "abcd")
    steps = 0

    def fail(step: Step) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise BackendError("a shard is gone")

    model.backend.hook = fail
    generation = generate(model, 10)
    assert [next(generation).text for _ in range(2)] == ["a", "b"]
    for _ in range(2):
        with pytest.raises(BackendError, match="a shard is gone"):
            next(generation)
    assert generation.finish is None
