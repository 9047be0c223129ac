"""The settings of daemons: values and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from luce.config.resolve import resolve
from luce.config.settings import FIELDS
from luce.errors import UsageError

GOOD = [
    ("target_shard_ipc_bin", "/opt/rocm-env", (("", Path("/opt/rocm-env")),)),
    ("target_shard_ipc_bin", "hip=/a,cuda=/b", (("hip", Path("/a")), ("cuda", Path("/b")))),
    ("shard_env", ["hip:A=1", "cuda:B="], ("hip:A=1", "cuda:B=")),
    ("shard_env", "hip:A=1,2,hip:B=x=y", ("hip:A=1,2", "hip:B=x=y")),
    ("isolate_shards", "true", True),
    ("shard_transport", "stream", "stream"),
    ("shard_activations", "bf16", "bf16"),
]
BAD = [
    ("target_shard_ipc_bin", "hip=/a,hip=/b"),
    ("target_shard_ipc_bin", "vulkan=/a"),
    ("target_shard_ipc_bin", "hip="),
    ("target_shard_ipc_bin", "hip=/a,/b"),
    ("shard_env", "A=1"),
    ("shard_env", "vulkan:A=1"),
    ("shard_env", "hip:1A=1"),
    ("shard_env", "hip:A"),
    ("shard_transport", "pigeon"),
    ("shard_activations", "f8"),
    ("shard_timeout", "0"),
    ("shard_start_timeout", "-1"),
]


@pytest.mark.parametrize(("name", "given", "expected"), GOOD)
def test_values(name: str, given: Any, expected: Any) -> None:
    assert getattr(resolve({"target_shard_ipc_bin": "/python", name: given}, env={}), name) == expected


@pytest.mark.parametrize(("name", "given"), BAD)
def test_refusals(name: str, given: str) -> None:
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")) as caught:
        resolve({name: given}, env={})
    assert caught.value.param == name


STARTED, DRAFTS, NETWORK = "--target-shard-ipc-bin", "--draft-ipc-bin", "a device at tcp://HOST:PORT/"
#: a setting, and the settings of which it requires one
NEEDS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("isolate_shards", True, (STARTED,)),
    ("shard_env", "cpu:A=1", (STARTED, DRAFTS)),
    ("shard_transport", "stream", (STARTED, DRAFTS)),
    ("shard_key_file", "/key", (NETWORK,)),
]
DAEMONS: list[tuple[dict[str, str], str]] = [
    ({"target_device": "cuda:0"}, ""),
    ({"target_devices": "cpu:0,cpu:1"}, ""),
    ({"target_shard_ipc_bin": "cpu=/python"}, STARTED),
    ({"draft": "x.gguf", "draft_ipc_bin": "/python"}, DRAFTS),
    ({"target_devices": "cpu:0,tcp://far:9/cpu:0"}, NETWORK),
    ({"target_device": "tcp://far:9/cpu:0"}, NETWORK),
    ({"draft": "x.gguf", "draft_device": "tcp://far:9/cpu:0"}, NETWORK),
    ({"prefill_drafter": "x.gguf", "prefill_drafter_device": "tcp://far:9/cpu:0"}, NETWORK),
]


@pytest.mark.parametrize(("name", "value", "needs"), NEEDS, ids=str)
@pytest.mark.parametrize(("daemons", "kind"), DAEMONS, ids=str)
def test_settings_of_daemons_need_one(
    name: str, value: Any, needs: tuple[str, ...], daemons: dict[str, str], kind: str
) -> None:
    for given in ({name: value, **daemons}, {**daemons, name: value}):
        if kind in needs:
            assert getattr(resolve(given, env={}), name) != FIELDS[name].default
            continue
        with pytest.raises(UsageError) as caught:
            resolve(given, env={})
        assert str(caught.value) == f"--{name.replace('_', '-')}: requires {' or '.join(needs)}"
        assert (caught.value.param, caught.value.exit_code) == (name, 2)


FAR = "tcp://far:9/cpu:0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {
                "shard_transport": "shared",
                "target_devices": f"cpu:0,cpu:1,{FAR}",
                "target_shard_ipc_bin": "cpu=/python",
            },
            f"--shard-transport shared: {FAR} is on another machine",
        ),
        (
            {"draft_ipc_bin": "/python", "draft": "x.gguf", "draft_device": FAR},
            f"--draft-ipc-bin: --draft-device {FAR} runs in a daemon already",
        ),
    ],
)
def test_settings_that_do_not_fit_network_devices_are_refused(given: dict[str, str], message: str) -> None:
    for some in (given, dict(reversed(given.items()))):
        with pytest.raises(UsageError) as caught:
            resolve(some, env={})
        assert str(caught.value) == message


def test_invalid_devices_cause_no_message_about_daemons() -> None:
    with pytest.raises(UsageError) as caught:
        resolve({"target_devices": "tcp://far/cpu:0", "shard_key_file": "/key", "isolate_shards": "yes"}, env={})
    assert [part.partition(":")[0] for part in str(caught.value).split("; ")] == [
        "--target-devices",
        "--isolate-shards",
    ]


#: integers of the environment
INTEGERS = {"0": 0, "  42": 42, "\t8": 8, "007": 7, "2147483647": 2147483647}
NO_INTEGERS = [
    "",
    " ",
    " -1",
    "-1",
    "+5",
    "12x",
    "5 ",
    "1_0",
    "1.0",
    "0x10",
    "\u0663",
    "2147483648",
    "99999999999999999999",
]


@pytest.mark.parametrize("text", [*INTEGERS, *NO_INTEGERS], ids=repr)
def test_integers(text: str) -> None:
    env = {"LUCE_MAX_CTX": text}
    if text in INTEGERS:
        assert resolve({}, env=env).max_ctx == INTEGERS[text]
        return
    with pytest.raises(UsageError) as caught:
        resolve({}, env=env)
    assert str(caught.value) == f"LUCE_MAX_CTX: expected an integer in 0..2147483647 (4k is 4096), got {text!r}"
