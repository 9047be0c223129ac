"""No setting is dropped silently: the code that a verb runs reads each setting of the verb, also on a split."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import luce
from luce import assembly
from luce.backend.kvflash_size import KVFlashRequest
from luce.backend.layersplit import LayerSplitBackend
from luce.cli.main import VERBS
from luce.config.resolve import resolve
from luce.config.settings import FIELDS, flag
from luce.errors import ModelError, UsageError
from luce.kvcache import cache_ram
from luce.ops.kvtype import KVTypes
from luce.runtime.device import Device, Memory
from tests.support.layering import FLOW
from tests.support.reference import Reference

PACKAGE = Path(luce.__file__).parent
#: the groups of settings of each verb that has any
GROUPS = {
    verb: module.SETTINGS
    for verb in VERBS
    if hasattr(module := importlib.import_module(f"luce.cli.{verb}"), "SETTINGS")
}
#: the code that opens a model, and all packages below it
BELOW = ("config", "models/model_card.py", *FLOW[FLOW.index("assembly") :])
#: the code that places a model without loading it
PLANNED = ("assembly", "kvcache/policies.py", "draft", "backend", "remote", "ipc", "runtime")
#: the packages and files that a verb's settings can reach; all start from a Config
REACHED = {
    "serve": ("cli/serve.py", "cli/served_cluster.py", "server", "log.py", *BELOW),
    "chat": ("cli/chat.py", *BELOW),
    "run": ("cli/run.py", *BELOW),
    "inspect": ("cli/inspect.py", "cli/plan.py", *PLANNED),
    "plan": ("cli/plan.py", "cli/predicted_plan.py", *PLANNED),
    "bench": ("cli/bench.py", "assembly", "kvcache/policies.py", "backend", "remote", "ipc", "runtime"),
    "cache": ("cli/cache.py", "config"),
}


def files(part: str) -> list[Path]:
    path = PACKAGE / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


@cache
def read_settings(path: Path) -> frozenset[str]:
    """Attributes that a module reads of something called config."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name.lstrip("_") == "config":
                found.add(node.attr)
    return frozenset(found)


@pytest.mark.parametrize("verb", GROUPS)
def test_the_code_of_a_verb_reads_each_of_its_flags(verb: str) -> None:
    read: frozenset[str] = frozenset().union(*(read_settings(path) for part in REACHED[verb] for path in files(part)))
    # Sampling values are read by the names of SAMPLERS: test_server_prepare holds that each reaches a request.
    groups = set(GROUPS[verb]) - {"sampling"}
    taken = {name for name, field in FIELDS.items() if field.metadata["group"] in groups}
    assert [flag(name) for name in taken - read] == []


def test_every_setting_belongs_to_a_verb() -> None:
    groups = set().union(*GROUPS.values())
    assert {field.metadata["group"] for field in FIELDS.values()} == groups


@pytest.mark.parametrize("wrong", ["localhost:3000", "http://localhost:3000/", "https://a.example, example.com", ""])
def test_an_origin_that_no_browser_sends_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"^--cors-origin: expected \* or origins such as https://example.com:8443, "):
        resolve({"cors_origin": [wrong]}, env={})
    for right in ("*", "null", "http://localhost:3000,app://obsidian.md"):
        assert resolve({"cors_origin": [right]}, env={}).cors_origin == tuple(right.split(","))


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1"])
def test_a_cache_directory_without_a_cache_is_refused(devices: str) -> None:
    given = {"target_devices": devices, "kv_cache_dir": "/srv/kept", "cache_ram": "0"}
    with pytest.raises(
        UsageError, match=r"^--kv-cache-dir /srv/kept: --cache-ram 0 turns the prefix cache off$"
    ) as caught:
        resolve(given, env={})
    assert (caught.value.param, caught.value.exit_code) == ("kv_cache_dir", 2)
    for directory in ("auto", "off"):
        assert resolve({**given, "kv_cache_dir": directory}, env={}).kv_cache_dir == directory


DEPENDENT = {
    "kv_cache_budget": "100MiB",
    "kv_cache_min_tokens": "5",
    "kv_cache_placement": "exact",
    "kv_cache_flush_timeout": "5",
    "cache_interval": "128",
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_settings_of_a_cache_that_is_off_are_refused(name: str) -> None:
    value = DEPENDENT[name]
    off = {"cache_ram": "0", "kv_cache_dir": "off"}
    for switch in off:
        if (switch, name) == ("kv_cache_dir", "cache_interval"):
            continue
        for given in ({switch: off[switch], name: value}, {name: value, switch: off[switch]}):
            with pytest.raises(UsageError, match=rf"^{flag(name)} \S+: .*{flag(switch)} {off[switch]}") as caught:
                resolve(given, env={})
            assert (caught.value.param, caught.value.exit_code) == (name, 2)
        # Turning the cache off wins over settings of weaker origins, and defaults may be repeated.
        variables = {f"LUCE_{name.upper()}": value}
        assert getattr(resolve({switch: off[switch]}, env=variables), name) == FIELDS[name].default
        resolve({switch: off[switch], name: str(FIELDS[name].default)}, env={})
    with pytest.raises(UsageError, match=rf"^{flag(name)} \S+: LUCE_CACHE_RAM 0 turns the prefix cache off$"):
        resolve({name: value}, env={"LUCE_CACHE_RAM": "0"})
    assert getattr(resolve({name: value}, env={}), name) != FIELDS[name].default


def test_a_cache_path_that_is_not_a_directory_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(
            UsageError, match=rf"^--kv-cache-dir {tmp_path / name}: {tmp_path}/file is not a directory$"
        ):
            luce.load(tmp_path / "none.gguf", kv_cache_dir=str(tmp_path / name))


def test_more_memory_than_the_machine_has_is_refused_before_the_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(total: int, **settings: Any) -> None:
        monkeypatch.setattr(cache_ram, "host_memory", lambda: Memory(1, total << 20))
        luce.load("/none.gguf", **settings)

    with pytest.raises(UsageError, match=r"^--cache-ram 8192: this machine has 8191 MiB of memory$"):
        load(8191, cache_ram="8GiB")
    network = {"target_devices": "cpu:0,tcp://far:9/cpu:0", "shard_key_file": "/none"}
    # All of it, the default, and more than this machine has for daemons of other machines.
    for total, settings in ((8192, {"cache_ram": "8GiB"}), (1000, {}), (8191, {"cache_ram": "8GiB", **network})):
        with pytest.raises(ModelError, match="No such file"):
            load(total, **settings)


@pytest.mark.parametrize("name", ["kv_cache_dir", "draft", "kvflash_drafter", "chat_template", "shard_key_file"])
def test_home_directories_of_unknown_users_are_refused(name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^{flag(name)}: expected a path; there is no user ~nobody-at-all, got '~nob"
    ):
        resolve({name: "~nobody-at-all/x"}, env={})
    assert FIELDS[name].metadata["parse"]("~/x")


#: the user's value, and the backend's argument with its value
GIVEN: dict[str, tuple[Any, str, Any]] = {
    "target_device": ("cpu:5", "devices", ["cpu:5"]),
    "target_devices": ("cpu:2,cpu:1", "devices", ["cpu:2", "cpu:1"]),
    "target_layer_split": ("1,3", "layer_split", (1.0, 3.0)),
    "peer_access": ("false", "peer", False),
    "max_ctx": ("99", "context", 99),
    "parallel": ("3", "slots", 3),
    "chunk": ("77", "chunk", 77),
    "cache_type_k": ("bf16", "kv", KVTypes("bf16", "auto")),
    "cache_type_v": ("q8_0", "kv", KVTypes("auto", "q8_0")),
    "prompt_weights": ("packed", "unpack", False),
    "prompt_precision": ("int8", "prompt_precision", "int8"),
    "kvflash": ("auto:512", "kvflash", KVFlashRequest(512, auto=True)),
    "experts_on": ("0-0", "experts", {0}),
}


def test_the_table_of_options_is_complete() -> None:
    groups = ("placement", "peer copies", "engine", "KVFlash")
    assert set(GIVEN) == {name for name, f in FIELDS.items() if f.metadata["group"] in groups}


@pytest.mark.parametrize("name", GIVEN)
def test_the_backend_gets_the_user_s_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Watched(LayerSplitBackend):
        def __init__(self, file: Any, spec: Any, devices: Any, options: Any, **more: Any) -> None:
            seen.update(vars(options), devices=[str(device.name) for device in devices])
            super().__init__(file, spec, devices, options, **more)

    monkeypatch.setattr(assembly, "LayerSplitBackend", Watched)
    monkeypatch.setattr(Device, "int8_gemm", True)
    value, option, expected = GIVEN[name]
    split = {} if name == "target_device" else {"target_devices": "cpu:0,cpu:1"}
    file = "olmoe-a-F32" if name == "experts_on" else "qwen3-a-F32"
    with luce.load(Reference(file).path, **{"max_ctx": 64, **split, name: value}) as model:
        assert (seen[option].layers if name == "experts_on" else seen[option]) == expected
        assert [shard["device"] for shard in model.placement] == seen["devices"]


@pytest.mark.parametrize(("name", "known"), [("LUCE_MAX_CTXX", "; did you mean LUCE_MAX_CTX?"), ("LUCE_ZZZZZZ", "")])
def test_variables_that_mean_nothing_are_refused(name: str, known: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name}: no such setting{re.escape(known)}"):
        resolve({}, env={name: "1", "LUCE_MAX_CTX": "64"})
    assert resolve({}, env={"LUCE_MAX_CTX": "64", "PATH": "x"}).max_ctx == 64


def test_an_unknown_key_is_told_what_it_may_mean(tmp_path: Path) -> None:
    path = tmp_path / "luce.toml"
    path.write_text("max_ctxx = 5")
    with pytest.raises(UsageError, match=r"max_ctxx: no such setting; did you mean max_ctx\?$"):
        resolve({"config": path}, env={})


@pytest.mark.parametrize(("text", "tokens"), [("4k", 4096), ("4K", 4096), ("1m", 1 << 20), ("4096", 4096)])
def test_numbers_of_tokens_have_suffixes(text: str, tokens: int, tmp_path: Path) -> None:
    path = tmp_path / "luce.toml"
    path.write_text(f'max_ctx = "{text}"')
    assert resolve({"max_ctx": text}, env={}).max_ctx == tokens
    assert resolve({}, env={"LUCE_MAX_CTX": text}).max_ctx == tokens
    assert resolve({"config": path}, env={}).max_ctx == tokens
    assert resolve({"kvflash": f"auto:{text}"}, env={}).kvflash == f"auto:{tokens}"


@pytest.mark.parametrize("text", ["4kk", "k", "-4k", "4 k", "4.5k", "4G", "2048m"])
def test_numbers_of_tokens_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--max-ctx: expected an integer in 0..2147483647 "):
        resolve({"max_ctx": text}, env={})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("low=1,high=2k", (("low", 1), ("high", 2048))),
        ("x-high=7", (("xhigh", 7),)),
        ("max=9, low=1", (("low", 1), ("max", 9))),
        ("low=1,low=2", (("low", 2),)),
    ],
)
def test_efforts_have_budgets(text: str, found: tuple[tuple[str, int], ...], tmp_path: Path) -> None:
    assert resolve({"effort": text}, env={}).effort == found
    file = tmp_path / "luce.toml"
    file.write_text("effort = " + str(text.split(",")))
    assert resolve({"config": file}, env={}).effort == found


@pytest.mark.parametrize("text", ["", "low", "none=3", "huge=3", "low=", "low=-1", "low=3,high=2", "low=1,,"])
def test_efforts_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--effort: "):
        resolve({"effort": text}, env={})
