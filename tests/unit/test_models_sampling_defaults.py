"""Sampling values that a model file recommends: which ones count, and below which settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import pytest

import luce
from luce.config.resolve import resolve
from luce.config.settings import Config, sampling_default
from luce.gguf.reader import open_gguf
from luce.models.sampling_defaults import checked, file_sampling, with_sampling
from tests.support.gguf_files import write_recommending
from tests.support.reference import Reference

TINY = Reference("qwen3-a-F32").path


def recommending(path: Path, **values: Any) -> Path:
    """A file with these keys below general.sampling."""
    return write_recommending(path, **{f"sampling_{key}": value for key, value in values.items()})


def read(path: Path) -> dict[str, float]:
    with open_gguf(path) as file:
        return file_sampling(file.metadata)


def test_keys_of_the_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # gguf-py has the names of the keys, and stores float32.
    path = recommending(tmp_path / "a.gguf", temp=0.6, top_k=20, top_p=0.95, min_p=0.05, penalty_repeat=1.05)
    assert read(path) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }
    assert read(recommending(tmp_path / "b.gguf", top_k=-1, mirostat=0, xtc_probability=0.0)) == {"top_k": -1}
    assert caplog.messages == []
    assert read(TINY) == {}


def test_what_cannot_count_is_left_out_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = recommending(tmp_path / "a.gguf", temp=9.0, top_p=float("nan"), top_k=7, mirostat=2, sequence="temperature")
    with caplog.at_level(logging.WARNING):
        assert read(path) == {"top_k": 7}
    lines = "\n".join(caplog.messages)
    assert f"{path}: general.sampling.temp is left out: expected a number in [0, 2], got 9.0" in lines
    assert "general.sampling.top_p is left out" in lines
    assert f"{path}: Luce has no setting for general.sampling.sequence, general.sampling.mirostat" in lines


@pytest.mark.parametrize("value", [True, "1", None, [1.0]])
def test_values_that_are_no_numbers(value: object, caplog: pytest.LogCaptureFixture) -> None:
    assert checked("temperature", value, "here") is None
    assert caplog.messages == [f"here is left out: expected a number, got {value!r}"]


def test_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    said = resolve({"temperature": 0.7}, env={"LUCE_TOP_K": "0"})
    config = with_sampling(said, {"temperature": 1.0, "top_k": 20, "top_p": 0.8})
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    assert [sampling_default(config, name) for name in names] == [0.7, 0, 0.8, 0.0, 1.0, 0.0]
    assert [sampling_default(Config(), name) for name in names] == [0.7, 40, 0.95, 0.0, 1.0, 0.0]


def test_a_model_has_those_of_its_file(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(TINY)
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_sampling_temp(0.0)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    common: dict[str, Any] = {"max_ctx": 64, "kv_cache_dir": "off", "target_device": "cpu:0"}
    prompt = [5, 6, 7]
    with luce.load(path, **common) as model:
        replies = [[t.id for t in model.generate(prompt, max_tokens=6, ignore_eos=True)] for _ in range(2)]
        assert replies[0] == replies[1]
        assert replies[0] == [t.id for t in model.generate(prompt, max_tokens=6, ignore_eos=True, temperature=0)]
        assert model.config.temperature == 0
    with luce.load(path, **common, temperature=2.0) as model:
        assert model.config.temperature == 2
