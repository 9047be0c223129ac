"""`luce service` under a real systemd, which boots in namespaces: start, keys, reload, restart, watchdog, stop."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.booted_systemd import Machine, booted
from tests.support.daemons import within
from tests.support.service_manager import MODEL

LUCE = "/opt/luce/bin/luce"
ASKED = {"prompt": "Rivers run to the sea. " * 8, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
#: so that no kernels of the CPU are compiled, and short prompts are saved
SETTINGS = {"cpu_weights": '"float32"', "target_device": '"cpu:0"', "kv_cache_min_tokens": "16"}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A booted machine with Luce in /opt/luce and a model in /srv."""
    with booted(tmp_path_factory.mktemp("systemd")) as found:
        found.install_luce()
        shutil.copy(MODEL, found.root / "srv/model.gguf")
        yield found


def configure(machine: Machine, name: str, **changed: str) -> None:
    """Set settings in a TOML file of /etc/luce."""
    path = machine.root / "etc/luce" / name
    text = path.read_text()
    for key, value in {**SETTINGS, **changed}.items():
        text, count = re.subn(rf"^(# )?{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert count == 1, key
    path.write_text(text)


def show(machine: Machine, unit: str, name: str) -> str:
    """A property of a unit."""
    return machine.run("systemctl", "show", "--value", f"--property={name}", unit).strip()


def call(path: str, body: Any = None, *, key: str = "", port: int = 8080) -> tuple[int, Any]:
    """Status and JSON of a response, on a thread in the machine's network. Waits while the model is being loaded."""
    headers = {"Content-Type": "application/json"} | ({"x-api-key": key} if key else {})
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        status, text = response.status, response.read()
        connection.close()
        if status != 503:
            return status, json.loads(text)
        time.sleep(0.2)


def ask(machine: Machine, path: str, body: Any = None, *, key: str = "", port: int = 8080) -> tuple[int, Any]:
    """The same, from outside."""
    return machine.start_in_network(lambda: call(path, body, key=key, port=port)).result(180)


def ask_again(machine: Machine, key: str) -> Any:
    """The reply to ASKED, whose prompt is on the disk, once the directory is scanned: requests wait 5 s for that."""

    def listed() -> bool:
        status, found = ask(machine, "/v1/cache", key=key)
        return status == 200 and any(entry["tier"] == "disk" for entry in found["data"])

    assert within(60, listed)
    status, reply = ask(machine, "/v1/completions", ASKED, key=key)
    assert status == 200
    return reply


def streamed(body: dict[str, Any], key: str, begun: threading.Event) -> list[Any]:
    """The events of a streamed completion, on a thread in the machine's network. `begun` is set with the first one."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=120)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", "x-api-key": key}
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()
    events = []
    for line in response:
        if line.startswith(b"data: {"):
            events.append(json.loads(line.removeprefix(b"data: ")))
            begun.set()
    connection.close()
    return events


def log_of(machine: Machine, unit: str) -> str:
    """What a unit has logged."""
    return machine.run("journalctl", "-u", unit, "--no-pager", "-o", "cat")


@pytest.fixture(scope="module")
def key(machine: Machine) -> str:
    """The key of the machine's service, which is installed and runs."""
    said = machine.run(LUCE, "service", "install", "--model", "/srv/model.gguf", "--no-start")
    assert "not run: systemctl enable --now luce.socket luce.service" in said
    configure(machine, "luce.toml")
    # Type=notify: it returns when the service has said that it is ready.
    assert "run: systemctl enable --now luce.socket luce.service\n" in machine.run(LUCE, "service", "install")
    assert show(machine, "luce", "ActiveState") == "active"
    assert show(machine, "luce", "StatusText") == "serving model"
    return (machine.root / "etc/luce/api-keys").read_text().split(":")[1]


def test_a_user_of_its_own_and_keys_from_a_credential(machine: Machine, key: str) -> None:
    assert ask(machine, "/health")[0] == 200
    assert ask(machine, "/v1/models")[0] == 401
    assert ask(machine, "/v1/models", key=key)[0] == 200
    owner = (machine.root / "proc" / show(machine, "luce", "MainPID")).stat().st_uid
    assert owner and (machine.root / "var/cache/private/luce").stat().st_uid == owner


def test_a_reload_takes_keys_and_settings(machine: Machine, key: str) -> None:
    main = show(machine, "luce", "MainPID")
    keys = machine.root / "etc/luce/api-keys"
    for name in ("second", "third"):
        keys.write_text(f"{name}\nfirst:{key}:admin\n")
        configure(machine, "luce.toml", log_level='"debug"' if name == "third" else '"info"')
        machine.run("systemctl", "reload", "luce")
        assert within(30, lambda name=name: ask(machine, "/v1/models", key=name)[0] == 200)
    assert ask(machine, "/v1/models", key="second")[0] == 401
    assert "settings reloaded log_level=debug" in log_of(machine, "luce")
    assert show(machine, "luce", "MainPID") == main and show(machine, "luce", "ActiveState") == "active"
    # The copy ends with the service.
    machine.run("systemctl", "restart", "luce")
    assert ask(machine, "/v1/models", key="third")[0] == 200
    assert not (machine.root / "run/luce/api-keys").exists()


def test_an_old_prompt_comes_from_the_disk_after_a_restart(machine: Machine, key: str) -> None:
    status, reply = ask(machine, "/v1/completions", ASKED, key=key)
    assert status == 200
    machine.run("systemctl", "restart", "luce")
    again = ask_again(machine, key)
    assert again["choices"][0]["text"] == reply["choices"][0]["text"]
    assert again["choices"][0]["finish_details"]["cache"] == {"tier": "disk"}
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"]


def test_the_socket_is_held_while_the_service_is_stopped(machine: Machine, key: str) -> None:
    machine.run("systemctl", "stop", "luce.service")
    assert (show(machine, "luce", "Result"), show(machine, "luce", "ExecMainStatus")) == ("success", "0")
    # The connection starts the service, and is kept until it listens.
    status, _ = ask(machine, "/v1/completions", ASKED, key=key)
    assert status == 200 and show(machine, "luce", "ActiveState") == "active"


def test_running_replies_finish_and_new_ones_wait_for_the_next_start(machine: Machine, key: str) -> None:
    begun = threading.Event()
    running = machine.start_in_network(lambda: streamed({**ASKED, "max_tokens": 300}, key, begun))
    assert begun.wait(60)
    machine.run("systemctl", "restart", "--no-block", "luce")
    later = machine.start_in_network(lambda: call("/v1/completions", ASKED, key=key))
    *_, last, usage = running.result(120)
    assert last["choices"][0]["finish_details"]["cause"] == "length"
    assert usage["usage"]["completion_tokens"] == 300
    assert later.result(120)[0] == 200


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_a_process_that_is_killed_or_hangs_is_replaced(machine: Machine, key: str, signal: str) -> None:
    drop_in = machine.root / "run/systemd/system/luce.service.d/watchdog.conf"
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    drop_in.write_text("[Service]\nWatchdogSec=2\nRestartSec=100ms\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "luce")
    before = show(machine, "luce", "MainPID")
    if signal == "STOP":
        # Longer than the limit: the watchdog is fed.
        time.sleep(3)
    assert show(machine, "luce", "MainPID") == before
    machine.run("systemctl", "kill", f"--signal={signal}", "--kill-who=main", "luce")
    assert within(60, lambda: show(machine, "luce", "MainPID") not in ("0", before))
    assert ask_again(machine, key)["choices"][0]["finish_details"]["cache"] == {"tier": "disk"}
    assert ("Watchdog timeout" in log_of(machine, "luce")) or signal == "KILL"


def test_an_idle_service_ends_and_the_next_connection_starts_it(machine: Machine, key: str) -> None:
    configure(machine, "luce.toml", idle_exit="0.5")
    machine.run("systemctl", "restart", "luce")
    assert within(60, lambda: show(machine, "luce", "ActiveState") == "inactive")
    assert show(machine, "luce", "Result") == "success"
    configure(machine, "luce.toml", idle_exit="0")
    assert ask_again(machine, key)["choices"][0]["finish_details"]["cache"] == {"tier": "disk"}


def test_wrong_settings_do_not_restart_it(machine: Machine, key: str) -> None:
    path = machine.root / "etc/luce/luce.toml"
    right = path.read_text()
    path.write_text("max_ctxx = 1\n" + right)
    assert "failed" in machine.run("systemctl", "restart", "luce", check=False)
    assert show(machine, "luce", "ExecMainStatus") == "2" and show(machine, "luce", "NRestarts") == "0"
    path.write_text(right)
    machine.run("systemctl", "reset-failed", "luce.service", "luce.socket")
    machine.run("systemctl", "restart", "luce.socket", "luce.service")
    assert ask(machine, "/v1/models", key=key)[0] == 200


def test_a_second_service(machine: Machine, key: str) -> None:
    machine.run(LUCE, "service", "install", "small", "--model", "/srv/model.gguf", "--port", "8081", "--no-start")
    configure(machine, "small.toml")
    machine.run(LUCE, "service", "install", "small")
    assert show(machine, "luce@small", "ActiveState") == "active"
    assert ask(machine, "/v1/models", key=key, port=8081)[0] == 200
    machine.run("systemctl", "reload", "luce@small")
    assert (machine.root / "run/luce-small/api-keys").exists()
    machine.run(LUCE, "service", "uninstall", "small")
    assert show(machine, "luce@small", "ActiveState") == "inactive"
    assert show(machine, "luce", "ActiveState") == "active"


def test_uninstall(machine: Machine, key: str) -> None:
    said = machine.run(LUCE, "service", "uninstall")
    assert "run: systemctl disable --now luce.socket luce.service\n" in said
    assert show(machine, "luce", "LoadState") == "not-found"
    assert (machine.root / "etc/luce/luce.toml").exists()
    assert not list((machine.root / "etc/systemd/system").glob("*/luce*"))
