"""LongRoPE: a sequence beyond the original context has the long divisors, at every position, on every placement."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import luce
from luce.config.sampling import SamplingParams
from luce.engine.events import Event, Finished, PromptLogits, Tokens
from luce.errors import UsageError
from luce.shard.local import LocalShard
from tests.support.changed import changed
from tests.support.reference import Reference, errors
from tests.support.warm import WARM

REFERENCE = Reference("phi3-a-F32")
ORIGINAL, LONGER, REPLY = 64, 512, 40
PROMPT = REFERENCE.expected["prompt_long"].tolist()
#: a prompt whose reply leaves the original context
SHORT = PROMPT[: ORIGINAL - 9]
#: devices, and settings that put them into daemons
PLACEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two devices": ("cpu:0,cpu:1", {}),
    "three devices": ("cpu:0,cpu:1,cpu:2", {}),
    "a device and a daemon": ("cpu:0,cpu:1", {"target_shard_ipc_bin": WARM}),
}
#: the same weights with an original context that no reply leaves: right up to the border, and beyond it not always
DRAFT = str(REFERENCE.path)
DRAFTS: dict[str, dict[str, Any]] = {
    "a chain": {"draft": DRAFT, "verify_width": 6},
    "as many as pay": {"draft": DRAFT},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference file with an original context that its long prompt leaves behind."""
    target = tmp_path_factory.mktemp("files") / "phi3.gguf"
    return changed(REFERENCE.path, target, **{"rope.scaling.original_context_length": ORIGINAL})


def oracle(path: Path) -> Any:
    """The model of transformers with the file's weights, which takes the long divisors for longer sequences."""
    torch = pytest.importorskip("torch", reason="torch is an oracle of this test and not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is an oracle of this test, not installed")
    reader = gguf.GGUFReader(path)
    values = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    keys = {name.removeprefix("phi3."): field.contents() for name, field in reader.fields.items() if "phi3." in name}
    scaling = {
        "rope_type": "longrope",
        "rope_theta": keys["rope.freq_base"],
        "short_factor": values["rope_factors_short.weight"].tolist(),
        "long_factor": values["rope_factors_long.weight"].tolist(),
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": keys["rope.scaling.attn_factor"],
    }
    config = transformers.Phi3Config(
        vocab_size=len(values["token_embd.weight"]),
        hidden_size=keys["embedding_length"],
        intermediate_size=keys["feed_forward_length"],
        num_hidden_layers=keys["block_count"],
        num_attention_heads=keys["attention.head_count"],
        num_key_value_heads=keys["attention.head_count_kv"],
        max_position_embeddings=keys["context_length"],
        original_max_position_embeddings=ORIGINAL,
        rms_norm_eps=keys["attention.layer_norm_rms_epsilon"],
        rope_parameters=scaling,
        pad_token_id=None,
        attn_implementation="eager",
    )
    network = transformers.Phi3ForCausalLM(config).eval().float()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.PHI3, keys["block_count"])
    for name, parameter in network.named_parameters():
        stem, _, ending = name.rpartition(".")
        parameter.data = torch.from_numpy(values[f"{names.get_name(stem)}.{ending}"])
    return network


def ask(model: luce.Model, prompt: list[int], size: int = REPLY) -> tuple[list[int], str, int]:
    """The greedy reply, and where how many tokens of the prompt were cached."""
    generation = model.generate(prompt, max_tokens=size, temperature=0, ignore_eos=True)
    reply = [token.id for token in generation]
    assert generation.finish is not None
    timings = generation.finish.timings
    return reply, timings.cache_tier, timings.cached_tokens


def load(path: Path, **settings: Any) -> luce.Model:
    return luce.load(path, **{"target_devices": "cpu:0", "max_ctx": LONGER, "chunk": 40} | settings)


@pytest.fixture(scope="module")
def reply(path: Path) -> list[int]:
    with load(path, cache_ram=0) as model:
        return ask(model, SHORT)[0]


@pytest.mark.oracle
def test_logits_equal_transformers_below_and_beyond_the_original_context(path: Path) -> None:
    network = oracle(path)
    import torch

    with load(path) as model:
        for length in (ORIGINAL, len(PROMPT), ORIGINAL + 1, 5):
            with torch.no_grad():
                expected = network(torch.tensor([PROMPT[:length]]), use_cache=False).logits[0].numpy()
            assert errors(model.logits(PROMPT[:length]), expected).max() < 1e-8


@pytest.mark.oracle
@pytest.mark.parametrize("last", [ORIGINAL - 1, ORIGINAL])
def test_logits_of_a_part_of_a_longer_text_equal_transformers(path: Path, last: int) -> None:
    network = oracle(path)
    import torch

    ids = np.array([*range(19), last], np.int32)
    with torch.no_grad():
        ones, own = torch.ones((1, 20), dtype=torch.long), torch.from_numpy(ids.astype(np.int64))[None]
        asked = {"input_ids": torch.tensor([PROMPT[:20]]), "attention_mask": ones, "position_ids": own}
        expected = network(**asked, use_cache=False).logits[0].numpy()
    with load(path) as model:
        assert errors(model.logits(PROMPT[:20], ids), expected).max() < 1e-8


@pytest.mark.oracle
def test_a_reply_that_leaves_the_original_context_equals_transformers(path: Path, reply: list[int]) -> None:
    network = oracle(path)
    import torch

    with torch.no_grad():
        asked = {"max_new_tokens": REPLY, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = network.generate(torch.tensor([SHORT]), **asked)[0, len(SHORT) :].tolist()
    assert reply == expected
    with luce.load(REFERENCE.path, target_devices="cpu:0", max_ctx=LONGER) as model:
        short = ask(model, SHORT)[0]
    # The first token behind a row of the long divisors is that of the row at position ORIGINAL.
    assert short[:10] == reply[:10] and short != reply


@pytest.mark.parametrize("place", PLACEMENTS)
def test_placements_give_the_same_bits(path: Path, reply: list[int], place: str) -> None:
    devices, settings = PLACEMENTS[place]
    with load(path) as one, load(path, target_devices=devices, **settings) as model:
        assert (model.logits(PROMPT) == one.logits(PROMPT)).all()
        assert ask(model, SHORT)[0] == reply


def test_replayed_steps(path: Path, reply: list[int]) -> None:
    with load(path, cpu_weights="packed") as model:
        assert ask(model, SHORT)[0] == reply
        (shard,) = model.backend.shards
        # Steps of one row of either kind.
        assert isinstance(shard, LocalShard) and shard.replayed >= REPLY - 8


def test_a_prompt_is_scored_once(path: Path, reply: list[int]) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=REPLY, temperature=0, ignore_eos=True, prompt_logits=True)
    with load(path) as model:
        model.engine.submit(SHORT, params, output=model.reply_text(), on_event=events.put)
        found = []
        while not isinstance(event := events.get(), Finished):
            found.append(event)
    assert [token.id for event in found if isinstance(event, Tokens) for token in event.tokens] == reply
    assert sum(len(event.logits) for event in found if isinstance(event, PromptLogits)) == len(SHORT)


@pytest.mark.parametrize("how", DRAFTS)
def test_drafts_end_before_a_sequence_is_stretched(path: Path, reply: list[int], how: str) -> None:
    with load(path, cache_ram=0, **DRAFTS[how]) as model:
        for known in range(8):
            assert ask(model, [*SHORT, *reply[:known]], REPLY - known)[0] == reply[known:]
        stats = model.engine.stats().draft
        assert stats is not None and stats.state == "on"
        assert how == "as many as pay" or stats.accepted > 5


def test_sequences_of_both_kinds_run_together(path: Path, reply: list[int]) -> None:
    with load(path, cache_ram=0) as model:
        alone = ask(model, PROMPT, 16)[0]
    with load(path, parallel=3) as model:
        prompts = SHORT, PROMPT, SHORT[:20]
        sizes = REPLY, 16, 16
        running = [
            model.generate(ids, max_tokens=size, temperature=0, ignore_eos=True)
            for ids, size in zip(prompts, sizes, strict=True)
        ]
        found = [[token.id for token in generation] for generation in running]
    assert found[:2] == [reply, alone]


def test_a_paged_sequence_is_stretched_from_its_begin(path: Path, reply: list[int]) -> None:
    with load(path, kvflash="512", max_ctx=1024) as model:
        assert model.engine.stats().paging is not None
        assert ask(model, SHORT, 10) == (reply[:10], "none", 0)
        beyond, _, cached = ask(model, SHORT, 11)
        assert beyond[:10] != reply[:10] and not cached
    # A file for which every text is beyond the original context.
    with load(changed(path, path.with_name("all.gguf"), **{"rope.scaling.original_context_length": 1})) as model:
        assert ask(model, SHORT, 11)[0] == beyond


def test_the_context(path: Path) -> None:
    for asked, context in ((0, 8192), (ORIGINAL, ORIGINAL), (LONGER, LONGER)):
        with luce.load(path, target_devices="cpu:0", max_ctx=asked) as model:
            assert model.context == context
    with pytest.raises(UsageError, match="max-ctx 131073: the model was trained for 131072 tokens"):
        luce.load(path, target_devices="cpu:0", max_ctx=131073)


def test_cached_prompts_are_of_one_set_of_divisors(path: Path) -> None:
    with load(path, chunk=0) as model:
        plain = [ask(model, ids, 4)[0] for ids in (PROMPT, PROMPT[:ORIGINAL])]
        model.engine.clear_cache()
        assert ask(model, PROMPT[:ORIGINAL], 1) == (plain[1][:1], "none", 0)
        # The first page of these is that of the prompt before.
        assert ask(model, PROMPT, 4) == (plain[0], "none", 0)
        assert ask(model, PROMPT, 4) == (plain[0], "ram", len(PROMPT))
        assert ask(model, PROMPT[: len(PROMPT) - 9], 4)[1:] == ("ram", 128)
        # The reply is read again behind the long prompt's first page.
        read = model.engine.stats().prompt_tokens
        assert ask(model, PROMPT[:ORIGINAL], 4) == (plain[1], "ram", ORIGINAL)
        assert model.engine.stats().prompt_tokens == read


def test_a_conversation_goes_on_behind_a_stretched_reply(path: Path, reply: list[int]) -> None:
    with load(path) as model:
        assert ask(model, SHORT)[0] == reply
        begun = [*SHORT, *reply]
        assert ask(model, [*begun, *PROMPT[:9]], 4)[1:] == ("ram", len(begun) - 1)


def test_stored_prompts_are_of_one_set_of_divisors(path: Path, tmp_path: Path) -> None:
    tiers = []
    fields: dict[str, Any] = {"kv_cache_dir": str(tmp_path), "kv_cache_min_tokens": 1}
    for context, prompt in (
        (LONGER, PROMPT[:ORIGINAL]),
        (ORIGINAL + 9, PROMPT[: ORIGINAL + 1]),
        (ORIGINAL, PROMPT[: ORIGINAL - 1]),
        (LONGER, PROMPT[:ORIGINAL]),
        (LONGER, PROMPT[: ORIGINAL + 1]),
    ):
        with load(path, max_ctx=context, **fields) as model:
            tiers.append(ask(model, prompt, 1)[1])
    assert tiers == ["none", "none", "none", "disk", "disk"]
