"""Chats of ten turns across restarts: only what is new is read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import luce
from luce.api import Model
from luce.kvcache import saver
from luce.runtime.step import PAGE
from tests.support.disk_models import ask, load, placed
from tests.support.reference import DIRECTORY, Reference


@pytest.mark.parametrize("placement", ["one", "daemons", "network"])
def test_a_chat_of_ten_turns_reads_only_what_is_new_also_after_restarts(placement: str, tmp_path: Path) -> None:
    # The state of this model is 8 layers' worth whatever the length; its pages grow with the conversation.
    reference = Reference("qwen35-a-F32")
    words = reference.expected["prompt_long"].tolist()
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=1024, cache_ram=0) as plain:
        history, written, known = words[:100], 0, 0
        for turn in range(10):
            with placed(reference, tmp_path / "cache", placement, max_ctx=1024) as model:
                expected = ask(plain, history, 8)[0]
                said, cached, tier = ask(model, history, 8)
                assert (said, cached) == (expected, known)
                assert tier == ("disk" if turn else "none")
            stored = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
            if turn == 1:
                step = stored - written
            elif turn > 1:
                assert stored - written < 1.3 * step
            written = stored
            known = len(history) + 7
            history = [*history, *said, *words[turn : turn + 40]]


#: as the template of most files, but for their reasoning, which replies lose in later prompts
TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


TRAINED = DIRECTORY.parents[1] / "models" / "tiny" / "target.gguf"


def unspeakable(model: Model) -> dict[int, float]:
    """Bans what is not plain text of its own: then a reply says with other tokens what the tokenizer would."""
    texts = {token: model.detokenize([token]) for token in range(model.tokenizer.vocab)}
    return {token: -100.0 for token, text in texts.items() if not (text and text.isascii() and text.isprintable())}


@pytest.mark.parametrize(
    "path",
    [
        TRAINED,
        *(Reference(f"{name}-F32").path for name in ("qwen35-a", "qwen35moe-a", "qwen3-a", "gemma4-e", "laguna-a")),
    ],
    ids=lambda path: path.stem,
)
def test_messages_of_ten_turns_are_read_once_whatever_restarts_between_them(path: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"max_ctx": 1024}
    if path.stem.startswith("qwen"):
        fields["chat_template"] = tmp_path / "template"
        fields["chat_template"].write_text(TEMPLATE)
    # Now its digest is known, so that requests wait for the directory.
    load(path, tmp_path / "cache", **fields).close()

    def ask_next(model: Model, messages: list[dict[str, str]], turn: int) -> tuple[int, int, int]:
        """(prompt, from the cache, length of both) of a turn, which `messages` get."""
        messages.append({"role": "user", "content": f"Question {turn}: what becomes of {turn + 100} words?"})
        prompt = model.chat.prompt(messages)
        if not bans:
            bans.update(unspeakable(model))
        generation = model.generate(prompt, max_tokens=8, temperature=0, logit_bias=bans)
        said = list(generation)
        messages.append({"role": "assistant", "content": "".join(token.text for token in said)})
        assert generation.finish is not None and not any("\ufffd" in message["content"] for message in messages)
        odd = model.tokenize(messages[-1]["content"], specials=False) != [token.id for token in said]
        other.append(odd)
        return len(prompt), generation.finish.timings.cached_tokens, len(prompt) + len(said)

    bans: dict[int, float] = {}
    other: list[bool] = []
    first = 0
    opening = {"role": "system", "content": "You say little, and what you say is plain."}
    whole, resumed = [opening], [opening]
    with load(path, tmp_path / "other", **fields) as model:
        expected = [ask_next(model, whole, turn) for turn in range(10)]
    stored: list[set[str]] = [set()]
    for turn in range(10):
        with load(path, tmp_path / "cache", **fields) as model:
            assert ask_next(model, resumed, turn) == expected[turn]
            cache = model.engine.cache
            assert cache is not None and cache.disk is not None
        # All tokens of the prompt and the reply but the last one, which no step has computed.
        assert expected[turn][1] == (expected[turn - 1][2] - 1 if turn else 0)
        assert cache.disk.store is not None
        manifests = [entry.manifest for entry in cache.disk.store.snapshots]
        stored.append({manifest.id for manifest in manifests})
        assert len(stored[-1] - stored[-2]) <= (3 if not turn else 2)
        # Every page once, and beside it states, which do not grow: they have no more than a page of this conversation.
        assert sum(manifest.length // PAGE - manifest.first_page for manifest in manifests) == expected[turn][2] // PAGE
        largest = max(sum(part.bytes for part in manifest.state) for manifest in manifests)
        first = first or largest
        assert not model.spec.recurrent or largest < 2 * first
    assert resumed == whole
    assert any(other) or path == TRAINED


def letter_by_letter(model: Model, messages: list[dict[str, str]], turn: int) -> tuple[int, int]:
    """(from the cache, length of prompt and reply) of a turn, which `messages` get. The reply is spelled by letters,
    where the tokenizer takes longer tokens."""
    texts = {token: model.detokenize([token]) for token in range(model.tokenizer.vocab)}
    bans = {token: -100.0 for token, text in texts.items() if not (len(text) == 1 and text in "etaoinsr")}
    messages.append({"role": "user", "content": f"Question {turn}: what becomes of {turn + 100} words?"})
    prompt = model.chat.prompt(messages)
    generation = model.generate(prompt, max_tokens=8, temperature=2, seed=turn, logit_bias=bans)
    said = [token.id for token in generation]
    messages.append({"role": "assistant", "content": model.detokenize(said)})
    assert model.tokenize(messages[-1]["content"], specials=False) != said and generation.finish is not None
    return generation.finish.timings.cached_tokens, len(prompt) + len(said)


@pytest.mark.parametrize("why", ["too short", "too many wait for the disk"])
def test_replies_without_a_snapshot_of_their_own_come_back_as_their_tokens(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"max_ctx": 1024, "kv_cache_min_tokens": 110 if why == "too short" else 1}
    load(TRAINED, tmp_path, **fields).close()
    messages = [{"role": "system", "content": "You say little, and what you say is plain."}]
    known = 0
    for turns in (range(3), range(3, 4)):
        with load(TRAINED, tmp_path, **fields) as model:
            for turn in turns:
                monkeypatch.setattr(saver, "MAX_QUEUED", 0 if why != "too short" and turn < 2 else 16)
                cached, length = letter_by_letter(model, messages, turn)
                assert cached >= known - 1
                known = length
        assert turns[0] or known > 110


def test_of_too_many_snapshots_the_newest_of_each_conversation_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"max_ctx": 1024}
    load(TRAINED, tmp_path, **fields).close()
    chats = [[{"role": "system", "content": f"You are number {i}, and say little."}] for i in range(2)]
    with load(TRAINED, tmp_path, **fields) as model, monkeypatch.context() as busy:
        busy.setattr(saver.Saver, "pending", property(lambda self: False))
        busy.setattr(saver, "MAX_QUEUED", 4)
        lengths = [[letter_by_letter(model, chat, turn)[1] for turn in range(3)][-1] for chat in chats]
        assert model.engine.cache is not None and model.engine.cache.disk is not None
        assert model.engine.cache.disk.stats.skipped
        busy.undo()
    with load(TRAINED, tmp_path, **fields) as model:
        assert [letter_by_letter(model, chat, 3)[0] for chat in chats] == [length - 1 for length in lengths]
