"""LongRoPE: a context beyond the original one has the long divisors, at every position, on every placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import luce
from luce.errors import UsageError
from tests.support.changed import changed
from tests.support.reference import Reference, errors
from tests.support.warm import WARM

REFERENCE = Reference("phi3-a-F32")
ORIGINAL, LONGER = 64, 512
PROMPT = REFERENCE.expected["prompt_long"].tolist()
#: devices, and settings that put them into daemons
PLACEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two devices": ("cpu:0,cpu:1", {}),
    "three devices": ("cpu:0,cpu:1,cpu:2", {}),
    "a device and a daemon": ("cpu:0,cpu:1", {"target_shard_ipc_bin": WARM}),
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


@pytest.mark.oracle
def test_logits_equal_transformers_below_and_beyond_the_original_context(path: Path) -> None:
    network = oracle(path)
    import torch

    for context, prompt in ((ORIGINAL, PROMPT[:ORIGINAL]), (LONGER, PROMPT)):
        with torch.no_grad():
            expected = network(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
        with luce.load(path, target_devices="cpu:0", max_ctx=context, chunk=50) as model:
            assert errors(model.logits(prompt), expected).max() < 1e-8


def test_placements_give_the_same_bits(path: Path) -> None:
    found = []
    for devices, settings in (("cpu:0", {}), *PLACEMENTS.values()):
        with luce.load(path, target_devices=devices, max_ctx=LONGER, **settings) as model:
            found.append(model.logits(PROMPT))
    assert all((each == found[0]).all() for each in found)
    with luce.load(REFERENCE.path, target_devices="cpu:0", max_ctx=LONGER) as model:
        assert errors(model.logits(PROMPT), found[0]).max() > 1e-3


def test_a_longer_context_is_asked_for(path: Path) -> None:
    with luce.load(path, target_devices="cpu:0") as model:
        assert model.context == ORIGINAL
    with pytest.raises(UsageError, match="max-ctx 131073: the model was trained for 131072 tokens"):
        luce.load(path, target_devices="cpu:0", max_ctx=131073)


def test_cached_prompts_are_of_one_set_of_divisors(path: Path, tmp_path: Path) -> None:
    prompt = PROMPT[:ORIGINAL]
    tiers = []
    for context in (LONGER, ORIGINAL + 1, ORIGINAL, ORIGINAL):
        fields: dict[str, Any] = {"kv_cache_dir": str(tmp_path), "kv_cache_min_tokens": 1}
        with luce.load(path, target_devices="cpu:0", max_ctx=context, **fields) as model:
            generation = model.generate(prompt[: ORIGINAL - 8], max_tokens=2, temperature=0, ignore_eos=True)
            list(generation)
            assert generation.finish is not None
            tiers.append(generation.finish.timings.cache_tier)
    assert tiers == ["none", "disk", "none", "disk"]
