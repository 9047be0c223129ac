"""Daemons of a server whose interpreter has no packages: they lie in other directories, as of Nix or `pip --target`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy
import pytest

import luce
from luce.ipc.child import search_path
from tests.support.daemons import HERE
from tests.support.reference import Reference

REFERENCE = Reference("gemma4-e-Q4_0")
PROMPT = REFERENCE.expected["prompt_17"].tolist()
ROOT = Path(luce.__file__).parents[1]
#: where the libraries are that Luce needs
LIBRARIES = str(Path(numpy.__file__).parents[1])
#: what a server does in another interpreter: replies with layers in a daemon, and renders a template
SERVER = f"""
import sys
sys.path[:0] = sys.argv[1:]
import luce
from luce.text.template import ChatTemplate
devices = {{"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": sys.executable, "shard_start_timeout": 60}}
with luce.load({str(REFERENCE.path)!r}, max_ctx=256, **devices) as model:
    reply = model.generate({PROMPT}, max_tokens=4, temperature=0, ignore_eos=True)
    print(luce.__file__, [token.id for token in reply])
template = ChatTemplate("{{{{ messages[0].content }}}}")
print(template.render([{{"content": "rendered"}}]))
template.close()
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    assert subprocess.run([python, "-c", "import numpy"], cwd=folder, capture_output=True).returncode == 1
    return python


@pytest.fixture(scope="module", params=["installed", "sources"])
def copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a copy of Luce, as it is installed or as in a clone."""
    folder: Path = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "luce", folder / "luce", ignore=ignored)
    kernels = next(path for path in (ROOT / "luce" / "kernels", ROOT / "kernels") if path.is_dir())
    target = folder / "luce" / "kernels" if request.param == "installed" else folder / "kernels"
    shutil.copytree(kernels, target, ignore=ignored, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("way", ["PYTHONPATH", "sys.path"])
def test_a_server_from_directories_starts_daemons(bare: Path, copy: Path, way: str, tmp_path: Path) -> None:
    directories = [str(copy), LIBRARIES]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if way == "PYTHONPATH":
        variables["PYTHONPATH"] = os.pathsep.join(directories)
    arguments = [] if way == "PYTHONPATH" else directories
    ran = subprocess.run(
        [bare, "-P", "-c", SERVER, *arguments], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    reply, rendered = ran.stdout.splitlines()
    assert reply == f"{copy / 'luce' / '__init__.py'} {REFERENCE.expected['greedy_17'][:4].tolist()}"
    assert rendered == "rendered"


def test_another_interpreter_keeps_its_packages(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Ours may be of another version of Python, or of another vendor's GPUs.
    sources = [str(ROOT)] if (ROOT / "kernels").is_dir() else []
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert search_path(bare).split(os.pathsep) == (sources or [""])
    monkeypatch.setenv("PYTHONPATH", f"/one{os.pathsep}/other")
    assert search_path(bare).split(os.pathsep) == [*sources, "/one", "/other"]
    # A link to this interpreter elsewhere is an environment of its own.
    (tmp_path / "python").symlink_to(sys.executable)
    assert search_path(tmp_path / "python") == search_path(bare) != search_path(HERE)


def test_what_lies_in_the_current_directory_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/other", f"{tmp_path}/."])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert search_path(HERE).split(os.pathsep) == ["/other", str(ROOT)]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert search_path(HERE).split(os.pathsep) == [str(tmp_path), "/other", str(ROOT)]
    # `python -m luce` in a clone.
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), "/other"])
    assert search_path(HERE).split(os.pathsep) == [str(ROOT), "/other"]
