"""README's examples as a newcomer runs them: word for word, in a clone, in their order, with the real model."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from luce.cli.main import EXAMPLES
from luce.errors import LuceError
from luce.hub.lookup import resolve_model

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France?\n"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


INSTALL, DEVELOP, *OTHERS = blocks("README.md", "sh")
CURL = next(block for block in OTHERS if block.startswith("curl "))
SERVE = OTHERS[OTHERS.index(CURL) - 1]
ONCE = [block for block in OTHERS if block not in (SERVE, CURL)]
GIT = [line for block in blocks("docs/guide/clients.md", "sh") for line in block.splitlines() if "git " in line]


class Clone:
    """A clone of this repository, and an environment in which pip needs no network."""

    def __init__(self, folder: Path, packages: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.folder = folder
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "VIRTUAL_ENV"))}
        self._env |= {
            # The Python that runs the tests is the one for which the packages are installed.
            "PATH": f"{folder}/.venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": packages,
            # pip's variable for "no build isolation" counts the other way round.
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "LUCE_PORT": str(self._port),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def start(self, block: str) -> subprocess.Popen[str]:
        """A shell that runs a block; 8080 may be taken here, so another port stands for it."""
        command = ["bash", "-euo", "pipefail", "-c", block.replace(":8080/", f":{self._port}/")]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, block: str, stdin: str = "") -> str:
        """Standard output of a block that ends with success."""
        shell = self.start(block)
        out, err = shell.communicate(stdin)
        assert shell.returncode == 0, f"{block}\n{out}\n{err}"
        return out


def git(*arguments: str, config: Path) -> str:
    """Standard output of git, without the user's configuration."""
    env = os.environ | {"GIT_CONFIG_GLOBAL": str(config)}
    return subprocess.run(["git", *arguments], env=env, check=True, capture_output=True, text=True).stdout


def copy_changes(folder: Path, config: Path) -> None:
    """Bring what is not committed yet into the clone: the check before a commit is of the tree, not of its past."""
    listed = git("-C", str(ROOT), "ls-files", "-z", "--modified", "--others", "--exclude-standard", config=config)
    for name in filter(None, listed.split("\0")):
        (folder / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def link_packages(top: Path) -> str:
    """A search path for the packages that this Python sees, except for Luce, which must come from the clone."""
    folders = []
    for number, place in enumerate(place for place in sys.path if Path(place).name == "site-packages"):
        folders.append(top / str(number))
        folders[-1].mkdir(parents=True)
        for package in Path(place).iterdir():
            if "luce" not in package.name:
                (folders[-1] / package.name).symlink_to(package)
    return ":".join(map(str, folders))


@pytest.fixture(scope="module")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    try:
        resolve_model("smollm2", fetch=False)
    except LuceError as error:
        pytest.skip(f"{error} (luce pull smollm2 brings the file)")
    if not (ROOT / ".git").exists():
        pytest.skip("the sources are no git checkout")
    top = tmp_path_factory.mktemp("readme")
    config = top / "gitconfig"
    # In a container the checkout may belong to another user, which git refuses.
    config.write_text("[safe]\n\tdirectory = *\n")
    git("clone", "--quiet", str(ROOT), str(top / "luce"), config=config)
    copy_changes(top / "luce", config)
    return Clone(top / "luce", link_packages(top / "packages"))


@pytest.fixture(scope="module")
def first_chat(cloned: Clone) -> str:
    """What the first block prints: it makes the virtual environment in which all others run."""
    return cloned.run(INSTALL, stdin=QUESTION)


@pytest.fixture(scope="module")
def clone(cloned: Clone, first_chat: str) -> Clone:
    """The clone with Luce installed."""
    return cloned


def test_one_command_installs_luce_and_chats(first_chat: str) -> None:
    assert first_chat.endswith("\nThe capital of France is Paris.\n")


def test_luce_is_the_one_that_was_installed(clone: Clone) -> None:
    place = clone.run("cd / && python -c 'import luce; print(luce.__file__)'")
    assert Path(place).is_relative_to(clone.folder / ".venv")


@pytest.mark.parametrize("block", ONCE, ids=lambda block: block.strip().splitlines()[-1])
def test_a_block_succeeds(clone: Clone, block: str) -> None:
    assert clone.run(block)


@pytest.fixture
def server(clone: Clone) -> Iterator[None]:
    """What README starts before it asks with curl; the model is loaded."""
    shell = clone.start(f"exec {SERVE}")
    reader = None
    try:
        assert shell.stderr is not None
        seen = []
        for line in shell.stderr:
            seen.append(line)
            if " info ready " in line:
                break
        else:
            raise AssertionError("".join(seen))
        # The log must not fill its pipe while curl waits.
        reader = threading.Thread(target=shell.stderr.read)
        reader.start()
        yield
    finally:
        shell.terminate()
        shell.wait()
        if reader:
            reader.join()
        for stream in (shell.stdin, shell.stdout, shell.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.usefixtures("server")
def test_the_server_answers_curl(clone: Clone) -> None:
    assert '"content":"The capital of France is Paris."' in clone.run(CURL)


def test_the_python_example(clone: Clone) -> None:
    (example,) = blocks("README.md", "python")
    (clone.folder / "example.py").write_text(example)
    out = clone.run(".venv/bin/python example.py")
    assert "The capital of France is Paris." in out
    assert re.search(r"\[\d+(, \d+)+\] Hello, world \(\d+, 49152\)\n$", out)


def test_a_log_of_git_fits_into_the_context(clone: Clone) -> None:
    (line,) = GIT
    assert clone.run(line).strip()
    # The help pipes the same log.
    assert EXAMPLES["run"].partition(" | ")[0] == line.partition(" | ")[0]


def test_one_command_installs_for_development(clone: Clone) -> None:
    # All of tools/check would run this test again; that it starts shows that the command finds it.
    assert DEVELOP.rstrip().endswith("tools/check")
    assert "tools/check --nightly" in clone.run(DEVELOP.rstrip() + " --help")
    place = clone.run("cd / && python -c 'import luce; print(luce.__file__)'")
    assert Path(place).parent == clone.folder / "luce"
