"""Every reference file across restarts: what a sequence resumed from the disk says is what the whole one says."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

import luce
from luce.api import Model
from luce.backend import layersplit
from luce.errors import ShardLostError
from luce.ipc.child import Child
from luce.kvcache import saver
from luce.kvcache.disk import manifest as manifests
from luce.kvcache.disk.part import PartReader
from luce.remote import saved_state
from luce.remote.messages import Fetch, Forward, LoadState, Save
from luce.remote.rpc import Requests
from luce.remote.saved_state import RemoteSavedState
from luce.runtime.step import PAGE
from luce.shard.pipeline import Pipeline
from luce.shard.saved_state import JoinedSavedState
from luce.shard.sizes import mirrored
from tests.support.daemons import HERE, key_file, listener
from tests.support.reference import DIRECTORY, Reference, references

each_file = pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)


def load(path: Path, directory: Path, **more: Any) -> Model:
    fields = {
        "target_devices": "cpu:0",
        "max_ctx": 256,
        "kv_cache_min_tokens": 1,
        "kv_cache_dir": str(directory),
        **more,
    }
    return luce.load(path, **fields)


def ask(model: Model, prompt: list[int], n: int) -> tuple[list[int], int, str]:
    """(greedy reply, tokens from the cache, tier)."""
    generation = model.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
    tokens = [token.id for token in generation if token.id >= 0]
    assert generation.finish is not None
    return tokens, generation.finish.timings.cached_tokens, generation.finish.timings.cache_tier


def saved(model: Model, prompt: list[int]) -> int:
    """How much of a prompt is on the disk after its reply: up to its last boundary where states are large, else all."""
    spec = model.spec
    exact = spec.recurrent or any(group.window is not None for group in spec.page_groups)
    return [len(prompt), *(model.chat.boundaries(prompt) if exact else ())][-1]


@each_file
def test_greedy_after_a_restart(reference: Reference, tmp_path: Path) -> None:
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with load(reference.path, tmp_path) as model:
        assert ask(model, prompt, 10) == (expected[:10], 0, "none")
    with load(reference.path, tmp_path) as model:
        assert ask(model, prompt, 32) == (expected, saved(model, prompt), "disk")
        assert ask(model, prompt, 32) == (expected, len(prompt), "ram")
    # And behind the reply of the first run, whose snapshot continues that of the prompt.
    with load(reference.path, tmp_path) as model:
        assert ask(model, [*prompt, *expected[:10]], 22) == (expected[10:], len(prompt) + 9, "disk")


@pytest.mark.parametrize(
    "name", ["qwen3-a-F32", "qwen35-a-F32", "qwen35moe-b-Q4_K_M", "laguna-a-F32", "gemma4-e-F32", "gemma4-moe-F32"]
)
def test_any_placement_restores_what_any_other_one_saved(name: str, tmp_path: Path) -> None:
    reference = Reference(name)
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    layers = len(reference.spec.layers)
    splits: list[tuple[float, ...]] = [(), (1.0,) * layers, (2.0, layers - 2.0)]
    for i, before in enumerate(splits):
        for j, after in enumerate(splits):
            directory = tmp_path / f"{i}{j}"
            for split, tier in ((before, "none"), (after, "disk")):
                devices = tuple(f"cpu:{n}" for n in range(len(split) or 1))
                with load(reference.path, directory, target_devices=devices, target_layer_split=split) as model:
                    known = saved(model, prompt) if tier == "disk" else 0
                    assert ask(model, prompt, 32) == (expected, known, tier)


def test_only_the_same_placement_restores_what_is_to_be_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reference = Reference("qwen35-a-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    layers = len(reference.spec.layers)
    one, two = {"target_devices": "cpu:0"}, {"target_devices": "cpu:0,cpu:1", "target_layer_split": (1.0, layers - 1.0)}

    def tier(**more: Any) -> str:
        with load(reference.path, tmp_path, **more) as model:
            reply, _, tier = ask(model, prompt, 32)
            assert reply == expected
            return tier

    exact = {"kv_cache_placement": "exact"}
    assert [tier(**one, **exact), tier(**one, **exact)] == ["none", "disk"]
    assert tier(**two, **exact) == "none"
    here, there = f"cpu:0 0..0, cpu:1 1..{layers - 1} here", f"cpu:0 0..{layers - 1} there"
    assert f"snapshots of this model are not used: --kv-cache-placement exact is {here} and {there}" in caplog.text
    # Both have their own; what any placement may use is apart from these.
    assert [tier(**two, **exact), tier(**one, **exact)] == ["disk", "disk"]
    assert [tier(**one), tier(**two)] == ["none", "disk"]


@pytest.mark.parametrize("name", ["qwen3-a-F32", "qwen3-b-Q4_K_M"])
def test_diverging_prompts_resume_in_any_placement(name: str, tmp_path: Path) -> None:
    reference = Reference(name)
    prompt = reference.expected["prompt_long"].tolist()
    at = len(prompt) // 64 * 64 - 10
    others = [[*prompt[:at], *prompt[begin : begin + 20]] for begin in (3, 9)]
    known = at // 64 * 64
    with load(reference.path, tmp_path, kv_cache_dir="off", kv_cache_min_tokens=512, cache_ram=0) as model:
        expected = [ask(model, other, 16)[0] for other in others]
    with load(reference.path, tmp_path, target_devices="cpu:0,cpu:1") as model:
        ask(model, prompt, 4)
    for devices, other, reply in zip(("cpu:0", "cpu:0,cpu:1,cpu:2"), others, expected, strict=True):
        with load(reference.path, tmp_path, target_devices=devices) as model:
            assert ask(model, other, 16) == (reply, known, "disk")


#: shards in this process, in child processes, on another machine, of which a daemon may have two
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one": {"target_devices": "cpu:0"},
    "three": {"target_devices": "cpu:0,cpu:1,cpu:2"},
    "daemons": {"target_devices": "cpu:0,cpu:1,cpu:2", "target_shard_ipc_bin": HERE, "isolate_shards": True},
    "daemon of two, by stream": {
        "target_devices": "cpu:0,cpu:1,cpu:2",
        "target_shard_ipc_bin": HERE,
        "shard_transport": "stream",
    },
    "network": {"target_devices": "cpu:0,{0}cpu:0,{0}cpu:1"},
}


@contextmanager
def placed(reference: Reference, directory: Path, placement: str, **more: Any) -> Iterator[Model]:
    fields = {"shard_start_timeout": 60, **PLACEMENTS[placement], **more}
    with ExitStack() as opened:
        if placement == "network":
            key = key_file(directory.parent / "key")
            port, _ = opened.enter_context(listener(reference.path, key))
            address = f"tcp://127.0.0.1:{port}/"
            fields |= {"target_devices": fields["target_devices"].format(address), "shard_key_file": key}
        yield opened.enter_context(load(reference.path, directory, **fields))


@pytest.mark.parametrize(
    ("before", "after"), [("one", other) for other in PLACEMENTS] + [(other, "one") for other in PLACEMENTS]
)
def test_daemons_restore_what_this_process_saved_and_the_reverse(before: str, after: str, tmp_path: Path) -> None:
    # Its last layers borrow keys and values of others, which their shards mirror; it has windows, too.
    reference = Reference("gemma4-e-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with placed(reference, tmp_path / "cache", before) as model:
        assert ask(model, prompt, 32) == (expected, 0, "none")
    with placed(reference, tmp_path / "cache", after) as model:
        assert ask(model, prompt, 32) == (expected, saved(model, prompt), "disk")
        # Now from where the shards themselves have put it aside, also when others have had the pages.
        for _ in range(2):
            assert ask(model, prompt, 32) == (expected, len(prompt), "ram")
            ask(model, prompt[::-1], 1)


@pytest.mark.parametrize("shards", ["one", "as many as layers"])
def test_borrowed_keys_and_values_are_stored_once(shards: str, tmp_path: Path) -> None:
    reference = Reference("gemma4-e-F32")
    layers = range(len(reference.spec.layers))
    prompt = reference.expected["prompt_long"].tolist()
    devices = [f"cpu:{n}" for n in (layers if shards != "one" else range(1))]
    assert any(mirrored(reference.spec, range(layer, layer + 1)) for layer in layers)
    with load(reference.path, tmp_path, target_devices=devices) as model:
        assert len(model.placement) == len(devices)
        ask(model, prompt, 4)
    stored: Counter[tuple[str, str, str, int]] = Counter()
    for path in tmp_path.rglob("manifest.json"):
        manifest = manifests.decode(path.read_bytes(), path.parent.parent.name, path.parent.name)
        for info in (*manifest.pages, *manifest.state):
            part = PartReader(path.parent, info)
            for frame in part.frames:
                if frame.name.startswith("blk."):
                    stored[manifest.id, info.name.split("-")[0], frame.name, frame.page] += 1
            part.close()
    owners = {f"blk.{layer}.{kind}" for layer in layers if reference.spec.donor(layer) is None for kind in "kv"}
    assert {name for _, _, name, _ in stored} == owners
    assert set(stored.values()) == {1}


def test_activations_of_fewer_bits_have_snapshots_of_their_own(tmp_path: Path) -> None:
    reference = Reference("qwen3-a-F32")
    prompt = reference.expected["prompt_long"].tolist()
    tiers = []
    for kind in ("f32", "bf16", "bf16", "f32"):
        placement = {"shard_transport": "stream", "shard_activations": kind}
        with placed(reference, tmp_path / "cache", "daemons", **placement) as model:
            tiers.append(ask(model, prompt, 4)[2])
    assert tiers == ["none", "none", "disk", "disk"]


@pytest.mark.parametrize("placement", ["daemons", "network"])
def test_recurrent_states_go_to_daemons_and_come_from_there(placement: str, tmp_path: Path) -> None:
    reference = Reference("qwen35-a-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    for after in (placement, "one", placement):
        with placed(reference, tmp_path / "cache", after) as model:
            assert ask(model, prompt, 32)[0] == expected
    assert len(list((tmp_path / "cache").rglob("state-*-*.part"))) > 1


def test_data_of_remote_shards_passes_in_small_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, window = Reference("qwen35-a-F32"), 100_000
    monkeypatch.setattr(saved_state, "WINDOW_BYTES", window)
    fetched: list[int] = []
    fetch = RemoteSavedState.fetch

    def watched(saved: RemoteSavedState, names: list[str], *given: Any) -> Any:
        tensors = fetch(saved, names, *given)
        fetched.append(sum(tensor.nbytes for tensor in tensors.values()))
        assert len(tensors) == 1 or fetched[-1] <= window
        return tensors

    monkeypatch.setattr(RemoteSavedState, "fetch", watched)
    prompt = reference.expected["prompt_long"].tolist()
    with placed(reference, tmp_path / "cache", "daemons") as model:
        ask(model, prompt, 4)
        cache = model.engine.cache
        assert cache is not None
        # The saved states of daemons count here, and none of their bytes are in this process.
        remote = [
            part
            for checkpoint in cache.memory.tree.checkpoints
            for part in cast("JoinedSavedState", checkpoint.state).parts[1:]
        ]
        assert remote and all(isinstance(part, RemoteSavedState) and part.nbytes for part in remote)
    assert len(fetched) > 3 and sum(fetched) > 3 * window


def test_a_daemon_is_asked_only_while_its_shard_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine does not wait for steps without output: they may still run.
    reference = Reference("qwen35-a-F32")
    monkeypatch.setattr(saved_state, "WINDOW_BYTES", 50_000)
    monkeypatch.setattr(saver, "PAUSE_RATIO", 0)
    idle: list[bool] = []
    pipelines: list[Pipeline] = []
    ask_daemon = Requests.ask

    class WatchedPipeline(Pipeline):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            pipelines.append(self)

    def watched(requests: Requests, message: Any, *given: Any, **more: Any) -> Any:
        if not isinstance(message, Forward):
            idle.append(pipelines[-1].idle)
        return ask_daemon(requests, message, *given, **more)

    monkeypatch.setattr(layersplit, "Pipeline", WatchedPipeline)

    prompt = reference.expected["prompt_long"].tolist()
    with placed(reference, tmp_path / "cache", "daemons", max_ctx=2048, chunk=16) as model:
        monkeypatch.setattr(Requests, "ask", watched)
        for turn in range(2):
            ask(model, [turn, *prompt, *prompt[::-1]], 2)
        assert len(idle) > 20 and all(idle)


@pytest.mark.parametrize("kind", [Save, Fetch, LoadState])
def test_a_daemon_that_ends_costs_the_request_and_not_the_snapshots(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference("qwen35-a-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with placed(reference, tmp_path / "cache", "one") as model:
        known = saved(model, prompt)
        ask(model, prompt, 4)
    ask_daemon = Requests.ask
    calls: list[int] = []

    def deadly(requests: Requests, message: Any, *given: Any) -> Any:
        if isinstance(message, kind):
            calls.append(1)
            if len(calls) == 2:
                peer = requests.daemon.peer
                assert isinstance(peer, Child)
                os.kill(peer.process.pid, signal.SIGKILL)
        return ask_daemon(requests, message, *given)

    monkeypatch.setattr(Requests, "ask", deadly)
    with placed(reference, tmp_path / "cache", "daemons") as model:
        # Other prompts and this one, until the daemon has ended; then everything is as before.
        for ids in (prompt[::-1], prompt, prompt[::-1], prompt):
            with suppress(ShardLostError):
                ask(model, ids, 4)
        assert len(calls) > 1
        assert ask(model, prompt, 32)[0] == expected
    with placed(reference, tmp_path / "cache", "daemons") as model:
        assert ask(model, prompt, 32) == (expected, known, "disk")


@pytest.mark.parametrize(
    ("types", "placements"),
    [
        (("f16", "f16"), ("daemons", "one")),
        (("bf16", "bf16"), ("three", "one")),
        (("q8_0", "q4_0"), ("daemons", "three")),
    ],
    ids=["f16", "bf16", "q8_0-q4_0"],
)
@pytest.mark.parametrize(
    "name", ["qwen3-a-F32", "qwen35-a-F32", "qwen35moe-a-F32", "laguna-a-F32", "gemma4-e-F32", "gemma4-moe-F32"]
)
def test_stored_types(name: str, types: tuple[str, str], placements: tuple[str, ...], tmp_path: Path) -> None:
    reference = Reference(name)
    prompt = reference.expected["prompt_long"].tolist()
    kinds = dict(zip(("cache_type_k", "cache_type_v"), types, strict=True))
    with load(reference.path, tmp_path / "cache", **kinds) as model:
        expected = ask(model, prompt, 20)
    # What one shard of this process wrote, then what those of the first placement did.
    found = []
    for placement in placements:
        with placed(reference, tmp_path / "cache", placement, **kinds) as model:
            assert ask(model, prompt, 20) == (expected[0], saved(model, prompt), "disk")
            found.append(ask(model, prompt[::-1], 20))
    assert [tier for _, _, tier in found] == ["none", "disk"]
    assert found[0][0] == found[1][0]
    with load(reference.path, tmp_path / "cache") as model:
        assert ask(model, prompt, 20)[1:] == (0, "none")
        disk = model.engine.stats().cache.disk
        assert disk is not None
        k, v = types
        assert [other.reason for other in disk.unused] == [
            f"--cache-type-k is auto here and {k} there, --cache-type-v is auto here and {v} there"
        ]


def test_a_copy_of_the_file_is_the_same_model_and_another_file_is_not(tmp_path: Path) -> None:
    reference, other = Reference("qwen35-a-F32"), tmp_path / "other.gguf"
    prompt = reference.expected["prompt_long"].tolist()
    shutil.copy(reference.path, other)
    with load(reference.path, tmp_path / "cache") as model:
        expected = ask(model, prompt, 4)[0]
    with load(other, tmp_path / "cache") as model:
        # The bytes of an unknown file are read first, behind the scenes.
        assert model.engine.cache is not None and model.engine.cache.disk is not None
        while model.engine.cache.disk.store is None:
            time.sleep(0.01)
        assert ask(model, prompt, 4) == (expected, saved(model, prompt), "disk")
    data = bytearray(other.read_bytes())
    data[-5] ^= 1
    other.write_bytes(data)
    with load(other, tmp_path / "cache") as model:
        assert ask(model, prompt, 1)[1:] == (0, "none")
    with load(Reference("qwen35-a-Q8_0").path, tmp_path / "cache") as model:
        assert ask(model, prompt, 1)[1:] == (0, "none")


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
        said = [token for token in generation if token.id >= 0]
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
