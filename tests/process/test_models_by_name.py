"""Models by name as processes use them: the environment of huggingface_hub, downloads that are killed, replies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import within
from tests.support.hub_server import COMMIT, Answer, HubServer, environment
from tools.terminal import interruptible

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "reference" / "qwen3-a-F32.gguf"
#: more than the pieces of 10 MiB in which the library writes
BIG = b"GGUF" + os.urandom(25 << 20)
RUN = ("run", "org/tiny", "hi", "-n", "5", "-o", "temperature=0", "--devices", "cpu:0")


@pytest.fixture
def served() -> Iterator[HubServer]:
    server = HubServer()
    server.repositories = {"org/tiny": {"tiny-F32.gguf": MODEL.read_bytes()}, "org/big": {"big-Q8_0.gguf": BIG}}
    yield server
    server.close()


def start(server: HubServer, folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= environment(server, folder) | variables
    return subprocess.Popen(
        [sys.executable, "-m", "luce", *arguments],
        cwd=ROOT,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=interruptible,
    )


def luce(server: HubServer, folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    process = start(server, folder, *arguments, **variables)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_a_name_answers_as_the_file_does(served: HubServer, tmp_path: Path) -> None:
    status, out, err = luce(served, tmp_path, *RUN)
    assert (status, err.splitlines()[:2]) == (
        0,
        ["luce: looking for org/tiny", "luce: downloading tiny-F32.gguf, 1.7 MB"],
    )
    plain = luce(served, tmp_path, RUN[0], str(MODEL), *RUN[2:])
    assert plain == (0, out, "") and out
    served.close()
    assert luce(served, tmp_path, *RUN) == plain
    assert luce(served, tmp_path, *RUN, HF_HUB_OFFLINE="1") == plain


def test_a_server_of_a_name(served: HubServer, tmp_path: Path) -> None:
    process = start(served, tmp_path, "serve", "org/tiny", "--port", "0", "--devices", "cpu:0", "--alias", "tiny")
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r"listening url=(\S+)", line)))
        before = []
        for line in lines:
            before.append(line)
            if "ready" in line:
                break
        assert any("downloading tiny-F32.gguf" in line for line in before), before
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            assert json.load(response)["data"][0]["id"] == "tiny"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_download_whose_process_ends_is_resumed(served: HubServer, tmp_path: Path, number: signal.Signals) -> None:
    served.cuts, served.hangs = [21 << 20], True
    process = start(served, tmp_path, "pull", "org/big")
    blobs = tmp_path / "hub" / "models--org--big" / "blobs"
    within(60, lambda: any(path.stat().st_size == 20 << 20 for path in blobs.glob("*.luce.incomplete")))
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGKILL)
    listed = luce(served, tmp_path, "models")[1]
    assert "1 downloads did not end (21.0 MB)" in listed
    status, out, err = luce(served, tmp_path, "pull", "org/big")
    assert status == 0 and Path(out.rstrip("\n")).read_bytes() == BIG, err
    last = {name.lower(): value for name, value in served.requests[-1].headers.items()}
    assert last["range"] == f"bytes={20 << 20}-"


def test_the_hub_learns_nothing_of_the_machine(served: HubServer, tmp_path: Path) -> None:
    assert luce(served, tmp_path, "pull", "org/tiny", AI_AGENT="some")[0] == 0
    assert [path.partition("?")[0] for path in served.paths("hub")] == [
        "/api/models/org/tiny/revision/main",
        f"/org/tiny/resolve/{COMMIT}/tiny-F32.gguf",
    ]
    agents = {{name.lower(): value for name, value in r.headers.items()}["user-agent"] for r in served.requests}
    (agent,) = agents
    assert re.fullmatch(r"luce/[\d.]+; hf_hub/[\d.]+; python/[\d.]+", agent), agent


def test_a_token_from_its_file(served: HubServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_mine\n")
    assert luce(served, tmp_path, "pull", "org/tiny", HF_TOKEN_PATH=str(token))[0] == 0
    keys = {
        (request.host, {name.lower(): value for name, value in request.headers.items()}.get("authorization"))
        for request in served.requests
    }
    assert keys == {("hub", "Bearer hf_mine"), ("bytes", None)}


def test_a_gated_repository(served: HubServer, tmp_path: Path) -> None:
    served.answers.append(Answer("/resolve/", 401, {"X-Error-Code": "GatedRepo"}))
    status, out, err = luce(served, tmp_path, "pull", "org/tiny")
    assert (status, out) == (3, "")
    assert err.splitlines()[-1] == (
        f"luce: model 'org/tiny': org/tiny is gated: accept its conditions at {served.url}/org/tiny, and log in with "
        "`hf auth login`, or set HF_TOKEN"
    )


def test_no_network(served: HubServer, tmp_path: Path) -> None:
    served.close()
    status, out, err = luce(served, tmp_path, *RUN)
    assert (status, out) == (7, "")
    assert err.splitlines()[-1].endswith("; is there a network?") and "Traceback" not in err
    status, out, err = luce(served, tmp_path, *RUN, HF_HUB_OFFLINE="1")
    assert (status, out, err.splitlines()[-1]) == (
        7,
        "",
        "luce: model 'org/tiny': HF_HUB_OFFLINE is set, so nothing is downloaded",
    )
