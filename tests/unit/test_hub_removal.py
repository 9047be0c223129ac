"""Removing models: what goes, what stays, and what is not Luce's to remove."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir

from luce.errors import UsageError
from luce.hub.installed import installed
from luce.hub.lookup import resolve_model
from luce.hub.removal import incomplete, remove, to_remove
from tests.support.hub_server import NEWER, HubServer

REPO = "org/some-GGUF"


@pytest.fixture(autouse=True)
def model(hub: HubServer) -> None:
    hub.repositories[REPO] = {
        "some-Q4_K_M.gguf": b"GGUFfour",
        "some-Q8_0.gguf": b"GGUFeight",
        **{f"big-F16-0000{n}-of-00002.gguf": b"GGUF" + bytes(n) for n in (1, 2)},
    }


def names() -> list[str]:
    return [model.name for model in installed()]


@pytest.mark.parametrize("name", [f"{REPO}:Q4_K_M", f"hf.co/{REPO}:q4_k_m", f"{REPO}:some-Q4_K_M.gguf"])
def test_one_quant_of_a_repository(name: str, tmp_path: Path) -> None:
    gone, kept = resolve_model(f"{REPO}:Q4_K_M"), resolve_model(f"{REPO}:Q8_0")
    blob = gone.resolve()
    remove(to_remove(name))
    assert not gone.is_symlink() and not blob.exists()
    assert kept.read_bytes() == b"GGUFeight" and names() == [f"{REPO}:Q8_0"]
    assert scan_cache_dir(tmp_path / "hub").warnings == []


def test_all_parts_and_all_commits(hub: HubServer, tmp_path: Path) -> None:
    resolve_model(f"{REPO}:F16")
    hub.commit = NEWER
    hub.repositories[REPO]["big-F16-00002-of-00002.gguf"] = b"GGUFnewer"
    resolve_model(f"{REPO}:F16", newest=True)
    assert len(list((tmp_path / "hub").glob("*/blobs/*"))) == 3
    remove(to_remove(str(resolve_model(f"{REPO}:F16"))))
    # The last model of a repository takes the folder with it.
    assert list((tmp_path / "hub").glob("models--*")) == []
    assert names() == []


def test_a_model_behind_a_url(hub: HubServer, tmp_path: Path) -> None:
    hub.files["/x.gguf"] = b"GGUFurl"
    url = f"{hub.bytes_url}/x.gguf"
    resolve_model(url)
    remove(to_remove(url))
    assert list((tmp_path / "luce" / "models").iterdir()) == []


def test_an_alias(tmp_path: Path) -> None:
    path = tmp_path / "luce" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    remove(to_remove("smollm2"))
    assert not path.exists() and path.parent.exists()


def test_what_is_not_one_model(tmp_path: Path) -> None:
    resolve_model(f"{REPO}:Q4_K_M")
    resolve_model(f"{REPO}:Q8_0")
    with pytest.raises(UsageError, match=rf"^luce rm {REPO}: these are several: {REPO}:Q4_K_M, {REPO}:Q8_0$"):
        to_remove(REPO)
    own = tmp_path / "own.gguf"
    own.touch()
    for name in ("org/other", "other", str(own), f"{REPO}:F16"):
        with pytest.raises(
            UsageError, match=rf"^luce rm {name}: not a model that Luce holds; `luce models` lists them$"
        ):
            to_remove(name)
    assert own.exists()


def test_models_of_other_programs_stay(tmp_path: Path) -> None:
    path = tmp_path / "home" / ".lmstudio" / "models" / "pub" / "m-GGUF" / "m-Q4_0.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    for name in ("pub/m-GGUF:Q4_0", str(path)):
        with pytest.raises(UsageError, match=r": LM Studio holds it, and Luce only reads its files: remove it there$"):
            to_remove(name)


def test_what_broken_downloads_leave(hub: HubServer, tmp_path: Path) -> None:
    left = tmp_path / "hub" / "models--a--b" / "blobs" / "12.luce.incomplete"
    running = tmp_path / "luce" / "models" / "host-1" / "x.gguf.1.luce.incomplete"
    theirs = tmp_path / "hub" / "models--a--b" / "blobs" / "34.incomplete"
    for path in (left, running, theirs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with open(running, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert list(incomplete()) == [left]
    assert list(incomplete()) == [left, running]
