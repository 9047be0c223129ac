"""The TOML file of `luce ray`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from luce.errors import UsageError
from luce.ray.cluster_config import parse_config, read_config

PYTHON = {"cpu": "/opt/luce/bin/python", "cuda": "/opt/cuda/bin/python", "hip": "/opt/hip/bin/python"}


def test_a_file_and_its_bundles(tmp_path: Path) -> None:
    path = tmp_path / "ray.toml"
    path.write_text(
        'model = "x.gguf"\n[luce_python]\ncuda = "/a"\nhip = "/b"\n[head]\naddress = "10.0.0.1"\n'
        '[replica]\ndevices = ["cuda", "cuda"]\nshards = ["hip"]\nmost = 4\nflags = ["--max-ctx", "8k"]\n'
    )
    config = read_config(path)
    assert (config.model, config.head.address, config.replica.most) == ("x.gguf", "10.0.0.1", 4)
    assert config.replica.flags == ("--max-ctx", "8k")
    assert config.bundles == [{"luce_cuda": 2}, {"luce_hip": 1}]
    assert config.strategy == "PACK"
    assert (
        parse_config({"model": "x", "luce_python": PYTHON, "replica": {"one_machine": True}}).strategy == "STRICT_PACK"
    )


@pytest.mark.parametrize(
    "content, says",
    [
        ({}, "model: missing"),
        ({"model": 3}, "model: expected a text"),
        ({"model": "x", "modle": "y"}, "modle: unknown; did you mean model?"),
        ({"model": "x", "head": {"prot": 1}}, "head.prot: unknown; did you mean port?"),
        ({"model": "x", "head": 3}, "head: expected a table"),
        ({"model": "x", "head": {"port": True}}, "head.port: expected a whole number"),
        ({"model": "x", "head": {"port": 70000}}, "head.port: expected a port"),
        ({"model": "x", "head": {"timeout": -1}}, "head.timeout: expected a number"),
        ({"model": "x", "head": {"object_store_mib": 10}}, "head.object_store_mib"),
        ({"model": "x", "replica": {"flags": "--a"}}, "replica.flags: expected a list"),
        ({"model": "x", "replica": {"flags": ["--port=3"]}}, "--port=3 is set by"),
        ({"model": "x", "replica": {"one_machine": 1}}, "replica.one_machine: expected true or false"),
        ({"model": "x", "replica": {"devices": []}}, "replica.devices: expected at least one"),
        ({"model": "x", "replica": {"devices": ["tpu"]}}, "replica.devices: tpu is no kind"),
        ({"model": "x", "replica": {"devices": ["cuda", "hip"]}}, "devices of one kind"),
        ({"model": "x", "luce_python": {"cpu": ""}}, "luce_python: expected a table"),
        ({"model": "x", "luce_python": {"npu": "/p"}}, "luce_python: npu is no kind"),
        ({"model": "x", "luce_python": {}}, "luce_python.cpu: missing"),
        ({"model": "x", "replica": {"parallel": 0}}, "replica.parallel"),
        ({"model": "x", "replica": {"least": 3, "most": 2}}, "replica.least"),
        ({"model": "x", "name": "a-b"}, "name: expected letters"),
        ({"model": "x", "routing": "random"}, "routing: expected"),
    ],
)
def test_what_is_wrong_is_named(content: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_config({"luce_python": PYTHON, **content})
    assert says in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ray.toml"
    with pytest.raises(UsageError, match=r"ray\.toml: No such file"):
        read_config(path)
    path.write_text("model = ")
    with pytest.raises(UsageError, match=r"ray\.toml: "):
        read_config(path)
    path.write_text('name = "a"')
    with pytest.raises(UsageError, match=r"ray\.toml: model: missing"):
        read_config(path)
