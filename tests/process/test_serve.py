"""`python -m luce serve` as a process: notifications of systemd, signals, and exit statuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luce.kvcache.disk.manifest import LAYOUT
from tests.support.daemons import within
from tests.support.key_files import write_keys
from tests.support.service_manager import MODEL, Child, StartServer, service_manager

CHAT = "/v1/chat/completions"
ENDLESS = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers as systemd does; kills those that still run."""
    with service_manager(tmp_path) as start:
        yield start


def await_token(response: http.client.HTTPResponse) -> None:
    """Read a stream up to its first token: the sequence runs then, it does not wait."""
    for _ in range(4):  # the opening chunk, the first token, and the empty lines behind them
        response.readline()


def last_event(response: http.client.HTTPResponse) -> tuple[dict[str, Any], int]:
    """The last event of a stream before [DONE], and the number of events."""
    events = [event for event in response.read().decode().split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    return json.loads(events[-2][6:]), len(events)


def test_a_life_under_systemd(serve: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "one\n")
    child = serve("--api-key-file", str(keys), WATCHDOG_USEC="400000")
    states = child.notified("READY=1")
    assert any("EXTEND_TIMEOUT_USEC=" in state for state in states[:-1])
    assert not any("WATCHDOG=1" in state for state in states)
    child.notified("WATCHDOG=1")
    child.notified("WATCHDOG=1")
    assert child.request("/health").status == 200
    assert child.request("/v1/models").status == 401

    body = {**ENDLESS, "stream": False, "max_tokens": 5}
    response = child.request(CHAT, body, key="one")
    reply = json.loads(response.read())
    assert response.status == 200 and reply["usage"]["completion_tokens"] == 5

    keys.write_text("two\n")
    child.send(signal.SIGHUP)
    assert "MONOTONIC_USEC=" in child.notified("RELOADING=1")[-1]
    child.notified("READY=1")
    assert child.request("/v1/models", key="one").status == 401
    assert child.request("/v1/models", key="two").status == 200
    keys.write_text("")
    child.send(signal.SIGHUP)
    child.notified("RELOADING=1")
    child.notified("READY=1")
    assert child.request("/v1/models", key="two").status == 200

    child.send(signal.SIGTERM)
    child.notified("STOPPING=1")
    assert child.wait() == 0, child.log
    assert re.search(r"request id=req_\w+ |request route=/v1/chat/completions status=200", child.log)
    assert "stream=0 prompt=" in child.log and "out=5" in child.log and "Traceback" not in child.log
    assert "API keys not reloaded" in child.log and "two" not in child.log


def test_sigterm_lets_running_requests_finish(serve: Any) -> None:
    child = serve("--parallel", "1", "--drain-seconds", "60")
    child.notified("READY=1")
    running = child.request(CHAT, {**ENDLESS, "max_tokens": 400})
    assert running.status == 200
    await_token(running)
    waiting = child.request(CHAT, {**ENDLESS, "max_tokens": 5})  # a stream's head comes while it is queued
    child.send(signal.SIGTERM)
    child.notified("STOPPING=1")
    error, _ = last_event(waiting)
    assert error["error"]["code"] == "draining"
    with contextlib.suppress(ConnectionError):  # once the running one has ended nobody listens any more
        late = child.request(CHAT, {**ENDLESS, "stream": False})
        assert late.status == 503 and late.getheader("Retry-After")
        assert json.loads(late.read())["error"]["code"] == "draining"
    end, _ = last_event(running)
    assert end["choices"][0]["finish_details"]["cause"] == "length"
    assert end["choices"][0]["finish_details"]["content_tokens"] == 400
    assert child.wait() == 0 and "Traceback" not in child.log, child.log


def test_requests_beyond_the_drain_time_end_with_their_text(serve: Any) -> None:
    child = serve("--drain-seconds", "0.2")
    child.notified("READY=1")
    running = child.request(CHAT, ENDLESS)
    await_token(running)
    child.send(signal.SIGTERM)
    end, _ = last_event(running)
    assert end["choices"][0]["finish_reason"] == "length"
    assert end["choices"][0]["finish_details"]["cause"] == "shutdown"
    assert child.wait() == 0 and "Traceback" not in child.log, child.log


def test_an_idle_server_ends(serve: Any) -> None:
    child = serve("--idle-exit", "0.2")
    child.notified("READY=1")
    child.notified("STOPPING=1")
    assert child.wait() == 0 and "idle seconds=0.200" in child.log, child.log


def test_a_stop_may_take_its_time(serve: Any) -> None:
    child = serve("--kv-cache-flush-timeout", "7")
    child.notified("READY=1")
    running = child.request(CHAT, {**ENDLESS, "max_tokens": 400})
    await_token(running)
    child.send(signal.SIGTERM)
    child.notified("STOPPING=1")
    draining, *_, saving = child.notified("STOPPING=1")
    assert draining.splitlines() == ["STATUS=draining 1 requests", "EXTEND_TIMEOUT_USEC=60000000"]
    assert saving.splitlines() == ["STOPPING=1", "STATUS=saving", "EXTEND_TIMEOUT_USEC=37000000"]
    assert last_event(running)[0]["choices"][0]["finish_details"]["cause"] == "length"
    assert child.wait() == 0, child.log


def test_keys_of_a_credential_and_of_its_renewal(serve: Any, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    child = serve(credentials={"api-keys": "one\n"}, RUNTIME_DIRECTORY=str(runtime))
    child.notified("READY=1")
    assert [child.request("/v1/models", key=key).status for key in ("", "one", "two")] == [401, 200, 401]
    write_keys(runtime / "api-keys", "two\n")
    child.send(signal.SIGHUP)
    child.notified("RELOADING=1")
    child.notified("READY=1")
    assert [child.request("/v1/models", key=key).status for key in ("", "one", "two")] == [401, 401, 200]


def test_a_reload_reads_model_cards(serve: Any, tmp_path: Path) -> None:
    cards = tmp_path / "cards"
    cards.mkdir()
    card = {"name": "Tiny", "source": "https://example.com", "verified_at": "2026-01-31"}
    tiny = cards / "qwen3-a.json"
    child = serve("--model-cards", str(cards), "--top-k", "7")
    child.notified("READY=1")

    def reload(written: Any) -> tuple[str, float, int]:
        tiny.write_text(json.dumps(written))
        child.send(signal.SIGHUP)
        child.notified("RELOADING=1")
        child.notified("READY=1")
        found = json.loads(child.request("/props").read())
        used = found["default_generation_settings"]
        return found["budget_envelope"]["model_card_source"], used["temperature"], used["top_k"]

    assert reload(card | {"sampling": {"temperature": 0.25, "top_k": 3}}) == ("user: qwen3-a.json", 0.25, 7)
    # A card that cannot be read changes nothing, and ends nothing.
    assert reload(card | {"sampling": {"warmth": 1}}) == ("user: qwen3-a.json", 0.25, 7)
    assert reload(card | {"sampling": {"temperature": 0.5}}) == ("user: qwen3-a.json", 0.5, 7)
    child.send(signal.SIGTERM)
    assert child.wait() == 0 and "Traceback" not in child.log, child.log
    assert child.log.count("model card model=") == 2
    assert f"settings not reloaded: --model-cards: {tiny}: sampling has an unknown key `warmth`" in child.log


def test_a_second_signal_does_not_wait(serve: Any) -> None:
    child = serve("--drain-seconds", "3600", "--max-ctx", "4096")
    child.notified("READY=1")
    running = child.request(CHAT, ENDLESS)
    await_token(running)
    child.send(signal.SIGTERM)
    child.notified("STOPPING=1")
    child.send(signal.SIGINT)
    assert child.wait() == 0 and "Traceback" not in child.log, child.log
    with contextlib.suppress(http.client.IncompleteRead):
        assert b'"cause":"context"' not in running.read()


def test_it_answers_and_can_be_stopped_while_loading(serve: Any, tmp_path: Path) -> None:
    # Opening a pipe without a writer never returns.
    pipe = tmp_path / "template"
    os.mkfifo(pipe)
    child = serve("--chat-template", str(pipe))
    response = child.request("/health")
    assert response.status == 503 and json.loads(response.read())["status"] == "loading"
    assert child.request(CHAT, ENDLESS).status == 503
    child.send(signal.SIGTERM)
    assert child.wait() == 0 and "Traceback" not in child.log, child.log


def test_every_host_answers(serve: Any) -> None:
    child = serve("--host", "127.0.0.2", "--host", "127.0.0.1")
    child.notified("READY=1")
    for host in ("127.0.0.1", "127.0.0.2"):
        connection = http.client.HTTPConnection(host, child.port, timeout=30)
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        assert response.status == 200 and response.read()
        connection.close()


def test_a_socket_from_the_manager(serve: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        child = serve(inherit=sock)
        child.notified("READY=1")
        assert child.port == sock.getsockname()[1] and child.request("/health").status == 200
        child.send(signal.SIGINT)
        assert child.wait() == 0, child.log


def test_a_fresh_server_has_generated_and_missed_nothing(cached_server: Any) -> None:
    child = cached_server()
    metrics = child.request("/metrics").read().decode()
    for name in ("generated_tokens_total", "steps_total", "prefix_cache_misses_total"):
        assert f"luce_{name} 0.0" in metrics, name
    assert 'luce_prompt_tokens_total{source="computed"} 0.0' in metrics
    reply = ask(child, CHAT, {**ASKED[CHAT], **GREEDY})
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_split_is_reported(serve: Any) -> None:
    child = serve("--target-devices", "cpu:1", "--target-layer-split", "1,2", "--max-ctx", "128")
    child.notified("READY=1")
    props = json.loads(child.request("/props").read())
    shards = props["runtime"]["target_sharding"]
    assert [shard["device"] for shard in shards] == ["cpu:0", "cpu:1"]
    assert (props["model_path"], props["model"]["arch"]) == (str(MODEL), "qwen3")
    child.send(signal.SIGTERM)
    assert child.wait() == 0, child.log
    assert f"loading model={MODEL} devices=cpu:0,cpu:1" in child.log
    for shard in shards:
        first, last = shard["layers"]
        line = (
            f"shard device={shard['device']} layers={first}..{last} weights={shard['weights']} state={shard['state']}"
        )
        assert f"{line} activation_bytes_per_token={shard['activation_bytes_per_token']}" in child.log


def test_exit_statuses(serve: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            (serve(model=broken), 3, str(broken)),
            (serve("--max-ctx", "many"), 2, "--max-ctx"),
            (serve("--api-key-file", str(tmp_path / "none")), 2, "--api-key-file"),
            (serve("--port", str(port)), 5, f"--port {port}"),
            (serve("--target-device", "cpu:1"), 2, "--target-device cpu:1 and --target-devices cpu:0"),
            (serve("--target-devices", "hip:99"), 2, "--target-devices hip:99"),
        ]
        for child, status, named in cases:
            assert child.wait() == status, child.log
            assert child.lines[-1].startswith("luce: ") and named in child.lines[-1]
            assert "Traceback" not in child.log


def ask(child: Child, path: str, body: Any = None) -> Any:
    """The JSON of a reply that must succeed."""
    response = child.request(path, body)
    text = response.read()
    assert response.status == 200, text
    return json.loads(text)


@pytest.fixture
def cached_server(serve: Any, tmp_path: Path) -> Any:
    """Starts servers with one cache directory."""

    def start(*flags: str) -> Child:
        child: Child = serve("--kv-cache-dir", str(tmp_path / "cache"), "--kv-cache-min-tokens", "2", *flags)
        child.notified("READY=1")
        return child

    return start


ASKED: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me of rivers. " * 8}]},
    "/v1/completions": {"prompt": "Rivers run to the sea. " * 8},
}
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


def test_a_directory_serves_one_server_after_another(cached_server: Any, tmp_path: Path) -> None:
    child = cached_server()
    replies = {path: ask(child, path, {**body, **GREEDY}) for path, body in ASKED.items()}
    child.send(signal.SIGTERM)
    assert child.wait() == 0, child.log

    child = cached_server()
    prompts = []
    for path, body in ASKED.items():
        whole, prompt = replies[path]["choices"][0], replies[path]["usage"]["prompt_tokens"]
        stream = child.request(path, {**body, **GREEDY, "stream": True, "stream_options": {"include_usage": True}})
        events = [json.loads(line[6:]) for line in stream.read().decode().split("\n\n") if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        assert [id for choice in choices for id in choice.get("token_ids", [])] == whole["token_ids"]
        assert choices[-1]["finish_details"]["cache"] == {"tier": "disk"}
        again = ask(child, path, {**body, **GREEDY})
        assert again["choices"][0]["token_ids"] == whole["token_ids"]
        assert again["choices"][0]["finish_details"]["cache"] == {"tier": "ram"}
        for last in (events[-1], again):
            assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": prompt}
            assert (last["timings"]["cache_n"], last["timings"]["prompt_n"]) == (prompt, 0)
        prompts.append(prompt)
    metrics = child.request("/metrics").read().decode()
    assert 'luce_prefix_cache_hits_total{tier="disk"} 2.0' in metrics
    assert f'luce_prompt_tokens_total{{source="disk"}} {sum(prompts)}.0' in metrics
    listing = ask(child, "/v1/cache")
    found = {entry["tokens"] for entry in listing["data"] if entry["tier"] == "disk" and entry["age"] >= 0}
    assert found >= set(prompts) and listing["tiers"]["disk"]["hits"] == 2

    other = cached_server("--cache-type-k", "q8_0", "--cache-type-v", "q8_0")
    reply = ask(other, CHAT, {**ASKED[CHAT], **GREEDY})
    assert reply["choices"][0]["finish_details"]["cache"] == {"tier": "none"}
    (unused,) = ask(other, "/v1/cache")["tiers"]["disk"]["unused"]
    assert "--cache-type-k is q8_0 here and" in unused["reason"] and unused["reason"] in other.log

    # Two servers use it now; each removes only snapshots of its own settings.
    connection = http.client.HTTPConnection("127.0.0.1", child.port, timeout=60)
    connection.request("DELETE", "/v1/cache")
    assert json.loads(connection.getresponse().read())["removed"] >= len(found)
    connection.close()
    assert within(60, lambda: not ask(child, "/v1/cache")["data"])
    assert ask(child, CHAT, {**ASKED[CHAT], **GREEDY})["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert [entry for entry in ask(other, "/v1/cache")["data"] if entry["tier"] == "disk"]
    for server in (child, other):
        assert "moved to trash" not in server.log and "Traceback" not in server.log


def test_a_server_killed_while_it_saves_gives_the_same_replies_after_a_restart(
    cached_server: Any, tmp_path: Path
) -> None:
    expected: dict[str, Any] = {}
    for start in range(3):
        child = cached_server()
        for path, body in ASKED.items():
            # Each time another prompt that begins alike.
            for more in range(start + 1):
                asking = json.loads(json.dumps(body).replace('. "', f'. {more * 30 * "x "}"'))
                ids = ask(child, path, {**asking, **GREEDY})["choices"][0]["token_ids"]
                assert expected.setdefault(path + str(more), ids) == ids
        writing = os.listdir(tmp_path / "cache" / LAYOUT / "tmp")
        assert all(name.startswith(f"{child.process.pid}-") for name in writing)
        child.send(signal.SIGKILL)
        child.wait()
        assert "moved to trash" not in child.log and "Traceback" not in child.log
    assert list((tmp_path / "cache" / LAYOUT).glob("*/*/manifest.json"))


def test_a_fatal_signal_is_in_the_log(serve: Any) -> None:
    child = serve("--max-ctx", "64")
    child.notified("READY=1")
    child.process.send_signal(signal.SIGBUS)
    child.wait()
    # Python's dump of a thread that ends meanwhile can itself be a SIGSEGV.
    assert child.process.returncode in (-signal.SIGBUS, -signal.SIGSEGV)
    # Two writes: a line of the log can come between.
    assert "Fatal Python error: " in child.log and "Bus error\n" in child.log
