"""What a body becomes for the engine: session keys, sampling defaults, stop strings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from luce.api import Model
from luce.config.sampling import SAMPLERS
from luce.config.settings import FIELDS, Config
from luce.errors import RequestError
from luce.server.prepare import Job, chat_job, completion_job
from tests.support.scripted_model import ScriptedModel

CONFIG = Config(temperature=0.3, top_k=7, top_p=0.8, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.4)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """A model with settings that differ from every default."""
    scripted = ScriptedModel(CONFIG)
    yield cast(Model, scripted)
    scripted.close()


def chat(model: Model, headers: dict[str, str] | None = None, **fields: Any) -> Job:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_job(json.dumps(body).encode(), headers or {}, model)


@pytest.mark.parametrize("name", ["x-session-id", "x-session-affinity", "session-id", "thread-id"])
def test_a_header_names_the_session(model: Model, name: str) -> None:
    assert chat(model, {name: "s1"}, user="u").session == "s1"


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": "s"},
        {"extra_body": {"session_id": "s"}},
        {"prompt_cache_key": "s"},
        {"metadata": {"user_id": "s"}},
        {"user": "s"},
        {"session_id": "s", "user": "other"},
    ],
)
def test_a_field_names_the_session(model: Model, fields: dict[str, Any]) -> None:
    assert chat(model, **fields).session == "s"


def test_sessions_are_bounded_and_may_be_missing(model: Model) -> None:
    assert chat(model).session == "" and len(chat(model, user="x" * 9999).session) == 256


def test_settings_are_the_defaults_of_sampling(model: Model) -> None:
    params = chat(model).params
    names = [name for name, sampler in SAMPLERS.items() if sampler.setting is not None]
    for name in names:
        assert getattr(params, name) == getattr(CONFIG, name) != SAMPLERS[name].setting
    assert names == [name for name, field in FIELDS.items() if field.metadata["group"] == "sampling"]
    assert params.max_tokens is None and params.seed is None and params.logprobs is None
    assert completion_job(b'{"prompt":"a"}', {}, model).params.max_tokens == 16


def test_the_request_wins(model: Model) -> None:
    given = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "frequency_penalty": -2, "presence_penalty": 2}
    params = chat(model, **given, rep_pen=1.5, rep_window=0, seed=-5, logprobs=True).params
    for name, value in given.items():
        assert getattr(params, name) == value
    assert (params.repetition_penalty, params.repeat_last_n, params.seed, params.logprobs) == (1.5, 0, -5, 0)


def test_stop_strings(model: Model) -> None:
    assert chat(model, stop="a").stops == ("a",) and chat(model, stop=["a", "b"]).stops == ("a", "b")
    assert chat(model).stops == chat(model, stop=[]).stops == ()


@pytest.mark.parametrize(
    ("scope", "max_cached_tokens"),
    [
        *((name, 0) for name in ("off", "none", "disabled", "OFF")),
        *((name, None) for name in ("full", "full-prefix", "auto", "Auto:30", "auto:1000000", None)),
        *(("1000", 1000), (1000, 1000), (1, 1), ("1000000", 1000000)),
    ],
)
def test_scopes_limit_the_cached_prompt(model: Model, scope: Any, max_cached_tokens: int | None) -> None:
    assert chat(model, prefix_cache={"scope": scope, "window": 5}).max_cached_tokens == max_cached_tokens
    assert (
        completion_job(
            json.dumps({"prompt": "a", "prefix_cache": {"scope": scope}}).encode(), {}, model
        ).max_cached_tokens
        == max_cached_tokens
    )
    assert chat(model).max_cached_tokens is chat(model, prefix_cache={}).max_cached_tokens is None


@pytest.mark.parametrize(
    "scope", ["core", "task", "", "auto:", "auto:0", "auto:1000001", "full:3", ":5", "0", 0, -1, "1e3", "٣", True, 2.0]
)
def test_invalid_scopes_are_refused(model: Model, scope: Any) -> None:
    with pytest.raises(RequestError, match=r"prefix_cache\.scope") as raised:
        chat(model, prefix_cache={"scope": scope})
    assert (raised.value.param, raised.value.status) == ("prefix_cache.scope", 400)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"window": 0}, "prefix_cache.window"),
        ({"scope": "off", "window": 1000001}, "prefix_cache.window"),
        ({"ttl_s": 60}, "prefix_cache.ttl_s"),
        ({"pin": True}, "prefix_cache.pin"),
        ({"scop": "off"}, "prefix_cache"),
        ("off", "prefix_cache"),
    ],
)
def test_unsupported_cache_options_are_refused(model: Model, given: Any, named: str) -> None:
    with pytest.raises(RequestError) as raised:
        chat(model, prefix_cache=given)
    assert (raised.value.param, raised.value.status) == (named, 400)
