"""`luce serve` with several real models: tables, a directory, switches under load, and prefixes that come back."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from luce.cli.main import main
from tests.support.daemons import within

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests" / "reference"
NAMES = {"qwen": "qwen3-a-F32.gguf", "gemma": "gemma3-a-F32.gguf", "olmo": "olmo2-a-F32.gguf"}


class Served:
    """A running server."""

    def __init__(self, *arguments: str, cache: Path) -> None:
        env = os.environ | {"CACHE_DIRECTORY": str(cache), "LUCE_KV_CACHE_DIR": "auto", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "luce", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.lines: list[str] = []
        self.url = ""
        ready = threading.Event()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append(line)
                if found := re.search(r"listening url=(\S+)", line):
                    self.url = found[1]
                if " models " in line or "ready" in line:
                    ready.set()
            ready.set()

        self._reader = threading.Thread(target=read)
        self._reader.start()
        assert ready.wait(120)

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read().decode()}") from None

    def complete(self, model: str, prompt: list[int] | str, tokens: int = 8) -> Any:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.ask("/v1/completions", body)

    def memory(self) -> int:
        """Resident bytes of the process."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self._reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "luce.toml"
    common = 'target_device = "cpu:0"\nmax_loaded_models = 1\nkv_cache_min_tokens = 64\nload_wait = 100\n'
    path.write_text(common + "".join(f'[models.{n}]\nmodel = "{REFERENCE / f}"\n' for n, f in NAMES.items()))
    return path


@pytest.fixture
def served(tables: Path, tmp_path: Path) -> Iterator[Served]:
    server = Served("--config", str(tables), cache=tmp_path / "cache")
    yield server
    server.close()
    assert server.process.returncode == 0, "".join(server.lines)


def alone(name: str, prompt: list[int], folder: Path) -> str:
    """The reply of a model that is served alone."""
    server = Served(str(REFERENCE / NAMES[name]), "--devices", "cpu:0", cache=folder)
    try:
        return str(server.complete(name, prompt)["choices"][0]["text"])
    finally:
        server.close()


def test_each_model_answers_as_if_alone(served: Served, tmp_path: Path) -> None:
    prompt = [5, 9, 3, 7, 11]
    for name in ("gemma", "qwen", "gemma"):
        reply = served.complete(name, prompt)
        assert (reply["model"], reply["choices"][0]["text"]) == (name, alone(name, prompt, tmp_path / name))
    listed = {entry["id"]: entry["loaded"] for entry in served.ask("/v1/models")["data"]}
    assert listed == {"qwen": False, "gemma": True, "olmo": False}


def test_a_prefix_comes_back_with_its_model(served: Served) -> None:
    prompt = [3 + n % 50 for n in range(300)]
    first = served.complete("qwen", prompt)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    served.complete("gemma", [5, 6])
    again = served.complete("qwen", [*prompt, 9])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
    assert served.complete("qwen", prompt)["choices"][0]["text"] == first["choices"][0]["text"]


def switches(served: Served, count: int) -> list[int]:
    """Requests of 8 clients until the server has changed its model `count` times; resident bytes in between."""
    prompt = [3 + n % 50 for n in range(200)]
    expected = {name: served.complete(name, prompt)["choices"][0]["text"] for name in NAMES}
    sizes: list[int] = []
    stop = threading.Event()

    def loads() -> int:
        return sum(" loaded " in line for line in served.lines)

    def client(number: int) -> int:
        done = 0
        while not stop.is_set():
            name = list(NAMES)[(number + done) % 3]
            reply = served.complete(name, prompt)
            # From the cache, also where the model has just come back.
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
            assert (reply["model"], reply["choices"][0]["text"]) == (name, expected[name])
            done += 1
            if loads() > count:
                stop.set()
        return done

    def measure() -> None:
        while not stop.wait(1):
            sizes.append(served.memory())

    with ThreadPoolExecutor(9) as threads:
        measured = threads.submit(measure)
        clients = [threads.submit(client, number) for number in range(8)]
        try:
            done = [future.result() for future in clients]
        finally:
            stop.set()
        measured.result()
    assert all(done)
    return sizes


def test_switches_under_load(served: Served) -> None:
    switches(served, 12)


@pytest.mark.slow
def test_a_hundred_switches_keep_the_memory(served: Served) -> None:
    sizes = switches(served, 100)
    half = len(sizes) // 2
    # What allocators keep settles within the first half.
    assert max(sizes[half:]) < max(sizes[:half]) + (64 << 20)


def test_a_directory_of_models(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "sub").mkdir(parents=True)
    shutil.copy(REFERENCE / NAMES["qwen"], folder / "first.gguf")
    shutil.copy(REFERENCE / NAMES["gemma"], folder / "sub" / "second one.gguf")
    server = Served("--models-dir", str(folder), "--devices", "cpu:0", cache=tmp_path / "cache")
    try:
        assert [entry["id"] for entry in server.ask("/v1/models")["data"]] == ["first", "sub/second-one"]
        assert server.complete("sub/second-one", [5, 6])["model"] == "sub/second-one"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "luce: MODEL: missing; give a model, --models-dir, or tables [models.NAME]\n"),
        (("--models-dir", "{empty}"), "luce: --models-dir {empty}: holds no GGUF file\n"),
        (("--models-dir", "{empty}/nowhere"), "luce: --models-dir {empty}/nowhere: not a directory\n"),
        (("--models-dir", "{twice}"), "luce: --models-dir {twice}: not a directory\n"),
        (("--config", "{twice}"), "luce: two models have the name x\n"),
    ],
)
def test_wrong_starts(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    twice = tmp_path / "twice.toml"
    twice.write_text('[models.x]\nmodel = "a.gguf"\n[models.y]\nmodel = "b.gguf"\nalias = ["x"]\n')
    paths = {"empty": tmp_path / "empty", "twice": twice}
    assert main(["serve", *(argument.format(**paths) for argument in arguments)]) == 2
    assert capsys.readouterr().err == message.format(**paths)


def test_a_reload_changes_models_and_the_log_level(served: Served, tables: Path) -> None:
    def reloads(word: str) -> int:
        return sum(word in line for line in served.lines)

    first = served.complete("qwen", [5, 6])["choices"][0]["text"]
    text = tables.read_text()
    tables.write_text(
        'log_level = "debug"\n' + text.replace("[models.olmo]", "[models.renamed]").replace("load_wait = 100", "")
    )
    served.process.send_signal(signal.SIGHUP)
    assert within(30, lambda: reloads("settings reloaded log_level=debug models=3") == 1), served.lines
    assert [entry["id"] for entry in served.ask("/v1/models")["data"]] == ["qwen", "gemma", "renamed"]
    # The model that is as before is still loaded.
    assert served.complete("qwen", [5, 6])["choices"][0]["text"] == first
    assert reloads(" loaded model=qwen") == 1
    assert served.complete("renamed", [5, 6])["model"] == "renamed"
    tables.write_text("max_ctxx = 1\n")
    served.process.send_signal(signal.SIGHUP)
    assert within(30, lambda: reloads("settings not reloaded: ") == 1), served.lines
    assert served.complete("gemma", [5, 6])["model"] == "gemma"
