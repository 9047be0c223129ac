"""Programs and libraries of others, driven without a terminal and without files of the user.

They are on the PATH, or in the directory that LUCE_TEST_CLIENTS names and tools/install_clients fills: npm's packages
in `node_modules`, Python's in virtual environments beside it. A test is skipped where its client is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from luce.server import answer
from luce.server.state import Server
from tests.support.http_server import Running

Json = dict[str, Any]

_WORKER = Path(__file__).with_name("client_worker.py")
#: longest run of a program
_SECONDS = 240
#: where virtual environments and npm have their programs
NODE = "node_modules/.bin"


def find(name: str, place: str = NODE) -> str | None:
    """The path of a program, None if it is not installed. `place`: its directory below LUCE_TEST_CLIENTS."""
    prefix = os.environ.get("LUCE_TEST_CLIENTS")
    places = [] if prefix is None else [f"{prefix}/{place}"]
    return shutil.which(name, path=os.pathsep.join([*places, os.environ.get("PATH", "")]))


def need(name: str, place: str = NODE) -> str:
    """The path of a program. Skips the test if it is not installed."""
    found = find(name, place)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


class Ended(NamedTuple):
    """What a run of a program has left."""

    status: int
    output: str
    errors: str

    @property
    def json(self) -> Any:
        """The standard output of a program that prints JSON, which must have succeeded."""
        assert self.status == 0, self
        return json.loads(self.output)


class Program:
    """A program with a home and a working directory of its own, and with the variables `variables`."""

    def __init__(self, path: str, directory: Path, **variables: str) -> None:
        self._path = path
        self.work, self.home = directory / "work", directory / "home"
        for made in (self.work, self.home):
            made.mkdir(parents=True, exist_ok=True)
        # Programs that find no cache or temporary directory of their own look in the user's.
        kept = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(self.home)}
        self.variables = {**kept, **variables}

    async def connect(self, client: str, here: Running, *flags: str) -> Ended:
        """`luce connect CLIENT --write` into the program's home, which must succeed."""
        luce = Program(sys.executable, self.home.parent)
        ended = await luce.run("-m", "luce", "connect", client, "--server", here.url, "--write", *flags)
        assert ended.status == 0, ended
        return ended

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        """A run that goes on."""
        return await asyncio.create_subprocess_exec(
            self._path,
            *arguments,
            cwd=self.work,
            env=self.variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str) -> Ended:
        """A whole run."""
        process = await self.start(*arguments)
        try:
            output, errors = await asyncio.wait_for(process.communicate(), _SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Ended(process.returncode, output.decode(), errors.decode())


async def node(script: Path, here: Running, directory: Path, *arguments: str) -> Any:
    """The JSON that a script for Node prints, with the packages of the npm prefix. Skips where they are missing."""
    prefix = os.environ.get("LUCE_TEST_CLIENTS")
    if prefix is None or not Path(prefix, "node_modules").is_dir():
        pytest.skip("the npm packages are not installed")
    # Modules are looked up from the script's own directory.
    here_packages = directory / "node_modules"
    if not here_packages.exists():
        here_packages.symlink_to(Path(prefix, "node_modules").resolve())
    copy = Path(shutil.copy(script, directory))
    return (await Program(need("node"), directory).run(str(copy), here.url, *arguments)).json


class Library:
    """Runs functions with libraries of a virtual environment, in one process for all of them."""

    def __init__(self, python: str, **variables: str) -> None:
        self._process = subprocess.Popen(
            [python, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONWARNINGS": "ignore", **variables},
        )

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function with JSON values as arguments and as result. It stands for itself: it imports what
        it needs. What it raises fails the test."""
        return await asyncio.to_thread(self._call, function, arguments)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        work = {
            "source": textwrap.dedent(inspect.getsource(function)),
            "name": function.__name__,
            "arguments": arguments,
        }
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextlib.contextmanager
def library(environment: str, module: str, **variables: str) -> Iterator[Library]:
    """The libraries of a virtual environment below LUCE_TEST_CLIENTS. Skips where it is missing."""
    prefix = os.environ.get("LUCE_TEST_CLIENTS")
    python = Path(prefix or "/", environment, "bin/python")
    if prefix is None or not python.exists():
        pytest.skip(f"{module} is not installed")
    made = Library(str(python), **variables)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def recorded() -> Iterator[list[bytes]]:
    """The bodies of requests that the application reads in this time."""
    bodies: list[bytes] = []
    read_body = answer.read_body

    async def recording(request: web.Request, server: Server) -> bytes:
        body = await read_body(request, server)
        bodies.append(body)
        return body

    answer.read_body = recording
    try:
        yield bodies
    finally:
        answer.read_body = read_body
