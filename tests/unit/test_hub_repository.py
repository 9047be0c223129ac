"""Models of the Hugging Face hub, downloaded from a server on loopback by its own library, and what can go wrong."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download, scan_cache_dir

from luce.errors import LuceError, ModelError, UnreachableError, UsageError
from luce.hub import repository
from luce.hub.lookup import resolve_model
from luce.hub.partial import Source, receive
from luce.hub.reporting import quiet_library
from tests.support.hub_server import COMMIT, NEWER, Answer, HubServer, Told, sha256

REPO = "org/Some-Model-GGUF"
DATA = b"GGUF" + bytes(range(256)) * 200
PARTS = [f"q8/some-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]


@pytest.fixture(autouse=True)
def model(hub: HubServer) -> None:
    hub.repositories[REPO] = {
        "README.md": b"# a model",
        "some-Q4_K_M.gguf": DATA,
        "mmproj-some-F16.gguf": b"GGUFother",
        **{part: b"GGUF" + part.encode() * 100 for part in PARTS},
    }


def blobs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "hub").glob("models--*/blobs/*"))


def test_a_download_lands_in_the_cache_of_the_library(hub: HubServer, tmp_path: Path) -> None:
    told = Told()
    path = resolve_model(f"{REPO}:Q4_K_M", progress=told)
    assert path.read_bytes() == DATA
    assert told.steps == ["downloading some-Q4_K_M.gguf, 51.2 kB", "checking some-Q4_K_M.gguf"]
    assert (len(DATA), len(DATA)) in told.updates
    # The library itself takes it for its own download, without asking the hub.
    hub.close()
    found = hf_hub_download(REPO, "some-Q4_K_M.gguf", cache_dir=tmp_path / "hub", local_files_only=True)
    assert Path(found) == path
    (repo,) = scan_cache_dir(tmp_path / "hub").repos
    assert (repo.repo_id, repo.size_on_disk, {r.commit_hash for r in repo.revisions}) == (REPO, len(DATA), {COMMIT})
    assert repo.refs["main"].commit_hash == COMMIT


def test_what_the_library_has_downloaded_is_used(hub: HubServer, tmp_path: Path) -> None:
    theirs = hf_hub_download(REPO, "some-Q4_K_M.gguf", cache_dir=tmp_path / "hub", endpoint=hub.url)
    hub.close()
    assert resolve_model(f"hf.co/{REPO}:q4_k_m", fetch=False) == Path(theirs)


def test_the_second_time_asks_nobody(hub: HubServer) -> None:
    first = resolve_model(f"{REPO}:Q4_K_M")
    hub.close()
    assert resolve_model(f"{REPO}:Q4_K_M") == first
    assert resolve_model(REPO) == first


def test_the_parts_of_a_split_model(hub: HubServer) -> None:
    told = Told()
    path = resolve_model(f"{REPO}:Q8_0", progress=told)
    assert [path.with_name(Path(part).name).read_bytes() for part in PARTS] == [
        hub.repositories[REPO][part] for part in PARTS
    ]
    assert f"downloading {PARTS[1]} (2 of 3), {len(hub.repositories[REPO][PARTS[1]]) / 1000:.1f} kB" in told.steps
    total = sum(len(hub.repositories[REPO][part]) for part in PARTS)
    downloads = [update for update in told.updates if update[1] == total]
    assert downloads == sorted(downloads) and downloads[-1] == (total, total)


def test_a_token_goes_to_the_hub_alone(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve_model(f"{REPO}:Q4_K_M")
    keys = {
        request.host: request.headers.get("Authorization", request.headers.get("authorization"))
        for request in hub.requests
    }
    assert keys == {"hub": "Bearer hf_secret", "bytes": None}


def test_a_cut_connection_is_resumed(hub: HubServer) -> None:
    hub.cuts = [20_500, 10_000]
    assert resolve_model(f"{REPO}:Q4_K_M").read_bytes() == DATA
    ranges = [r.headers.get("Range", r.headers.get("range")) for r in hub.requests if r.host == "bytes"]
    assert ranges[0] is None and all(ranges[1:]) and len(ranges) == 3


def test_the_next_process_resumes(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.cuts = [20_500]
    # As if the process ended here: the download is not tried again.
    monkeypatch.setattr("time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(f"{REPO}:Q4_K_M")
    (partial,) = blobs(tmp_path)
    assert partial.name.endswith(".luce.incomplete") and 0 < partial.stat().st_size < len(DATA)
    there = partial.stat().st_size
    monkeypatch.undo()
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)
    told = Told()
    assert resolve_model(f"{REPO}:Q4_K_M", progress=told).read_bytes() == DATA
    assert told.updates[0] == (there, len(DATA))
    last = hub.requests[-1]
    assert last.headers.get("Range", last.headers.get("range")) == f"bytes={there}-"
    assert [path.name for path in blobs(tmp_path)] == [sha256(DATA)]


def interrupted(seconds: float) -> None:
    raise KeyboardInterrupt


def test_a_server_without_ranges(hub: HubServer) -> None:
    hub.cuts, hub.ranges = [20_500], False
    assert resolve_model(f"{REPO}:Q4_K_M").read_bytes() == DATA


def test_wrong_bytes_are_refused_and_go(hub: HubServer, tmp_path: Path) -> None:
    other = DATA[:-1] + b"?"
    hub.instead[sha256(DATA)] = other
    with pytest.raises(
        ModelError,
        match=rf"^some-Q4_K_M.gguf: the bytes have the SHA-256 {sha256(other)}, expected {sha256(DATA)}; nothing is ",
    ):
        resolve_model(f"{REPO}:Q4_K_M")
    assert blobs(tmp_path) == []
    del hub.instead[sha256(DATA)]
    assert resolve_model(f"{REPO}:Q4_K_M").read_bytes() == DATA


def test_wrong_bytes_of_another_size(hub: HubServer, tmp_path: Path) -> None:
    hub.instead[sha256(DATA)] = DATA + b"more"
    with pytest.raises(ModelError, match=r"some-Q4_K_M.gguf"):
        resolve_model(f"{REPO}:Q4_K_M")
    assert not (tmp_path / "hub" / f"models--{REPO.replace('/', '--')}" / "snapshots").exists()


def test_a_partial_file_of_wrong_bytes_is_found_out(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{sha256(DATA)}.luce.incomplete").write_bytes(b"x" * 1000)
    with pytest.raises(ModelError, match="nothing is kept"):
        resolve_model(f"{REPO}:Q4_K_M")
    assert resolve_model(f"{REPO}:Q4_K_M").read_bytes() == DATA


def test_a_partial_file_that_is_too_large_is_begun_anew(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{sha256(DATA)}.luce.incomplete").write_bytes(DATA + b"x")
    assert resolve_model(f"{REPO}:Q4_K_M").read_bytes() == DATA


def test_two_at_once_download_once(hub: HubServer) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(resolve_model(f"{REPO}:Q4_K_M"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == DATA for path in paths] == [True] * 3
    assert len(hub.paths("bytes")) == 1


def test_a_download_that_ends_while_another_one_looks(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other process renames the file when this one has looked at it, before it looks at its place."""
    target, partial = tmp_path / "file", tmp_path / "file.luce.incomplete"
    partial.write_bytes(DATA)
    real = os.fstat

    def ends(number: int) -> os.stat_result:
        found = real(number)
        if not target.exists():
            partial.rename(target)
        return found

    monkeypatch.setattr(os, "fstat", ends)
    receive(Source("file", f"{hub.url}/gone", digest=sha256(DATA)), target, partial, Told(), lambda count: None)
    assert target.read_bytes() == DATA and not partial.exists() and not hub.paths("bytes")


def test_a_file_beyond_plain_http_comes_through_the_library(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(repository, "MOST_OVER_HTTP", 1000)
    other = b"X" * len(DATA)
    hub.instead[sha256(DATA)] = other
    with pytest.raises(ModelError, match=rf"SHA-256 {sha256(other)}, expected"):
        resolve_model(f"{REPO}:Q4_K_M")
    assert blobs(tmp_path) == []
    hub.instead.clear()
    told = Told()
    assert resolve_model(f"{REPO}:Q4_K_M", progress=told).read_bytes() == DATA
    assert told.updates[0][0] < told.updates[-1][0] == len(DATA)


def test_no_space(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 51_000, 51_000))
    with pytest.raises(
        ModelError,
        match=rf"^model '{REPO}:Q4_K_M': 51.2 kB are to be downloaded, and {tmp_path} has 51.0 kB free; HF_HUB_CACHE ",
    ):
        resolve_model(f"{REPO}:Q4_K_M")
    assert hub.paths("bytes") == []


GATED = Answer("/resolve/", 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted."})


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (GATED, ModelError, r"is gated: accept its conditions at http://\S+/org/Some-Model-GGUF, and log in with"),
        (Answer("/api/", 401), ModelError, r"asks for a token, or refuses the one that it got \(401\); log in with"),
        (Answer("/resolve/", 403), ModelError, r"refuses this account the repository \(403\)"),
        (
            Answer("/api/", 404, {"X-Error-Code": "RepoNotFound"}),
            ModelError,
            r"neither a file here nor a repository of the hub; if org/Some-Model-GGUF is",
        ),
        (Answer("/api/", 429), UnreachableError, r"limits how much one may ask for \(429\); try again"),
        (Answer("/api/", 503), UnreachableError, r"answers 503 Service Unavailable; try again later$"),
        (Answer("/resolve/", 404, {"X-Error-Code": "EntryNotFound"}), ModelError, r"answers 404 Not Found"),
    ],
    ids=["gated", "401", "403", "no repository", "429", "503", "no file"],
)
def test_what_the_hub_refuses(hub: HubServer, answer: Answer, kind: type[LuceError], message: str) -> None:
    hub.answers.append(answer)
    with pytest.raises(kind, match=message) as caught:
        resolve_model(f"{REPO}:Q4_K_M")
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"model '{REPO}:Q4_K_M': ")


def test_a_limit_during_the_download_is_waited_for(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    hub.answers.append(Answer("/resolve/", 429, {"Retry-After": "7"}))
    told = Told()
    assert resolve_model(f"{REPO}:Q4_K_M", progress=told).read_bytes() == DATA
    assert waited == [8.0]
    assert len(told.notes) == 2 and "8.0s" in told.notes[1]
    assert "http" not in told.notes[0].partition(" ")[2].replace("HTTP", "")


def test_the_library_is_as_before_behind_overlapping_downloads() -> None:
    library = logging.getLogger("huggingface_hub")
    before = library.handlers[:], constants.HF_HUB_DISABLE_TELEMETRY
    first, second = quiet_library(Told()), quiet_library(told := Told())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    library.warning("waits for https://cdn.example/x?signature=secret\nnow")
    assert told.notes == ["waits for cdn.example now"] and constants.HF_HUB_DISABLE_TELEMETRY
    second.__exit__(None, None, None)
    assert (library.handlers[:], constants.HF_HUB_DISABLE_TELEMETRY) == before and before[0]


def test_no_revision(hub: HubServer) -> None:
    with pytest.raises(ModelError, match=r"org/Some-Model-GGUF has no revision v2$"):
        resolve_model(f"{hub.url}/{REPO}/blob/v2/some-Q4_K_M.gguf")


def test_no_network(hub: HubServer) -> None:
    hub.close()
    with pytest.raises(UnreachableError, match=rf"^model '{REPO}': {hub.url}: .*refused.*; is there a network\?$"):
        resolve_model(REPO)


def test_offline_mode(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnreachableError, match=r"HF_HUB_OFFLINE is set, so nothing is downloaded$"):
        resolve_model(REPO)
    assert hub.requests == []


def test_a_name_that_the_hub_does_not_allow(hub: HubServer) -> None:
    with pytest.raises(UsageError, match=r"^model 'a--b/c\.\.d': "):
        resolve_model("a--b/c..d")


def test_no_models_in_a_repository(hub: HubServer) -> None:
    hub.repositories["org/empty"] = {"README.md": b"", "mmproj-a-F16.gguf": b"GGUF"}
    with pytest.raises(ModelError, match=r"org/empty has no GGUF file$"):
        resolve_model("org/empty")


def test_a_small_file_has_the_digest_of_git(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.hub_server.large", lambda name: False)
    assert resolve_model(f"{REPO}:Q4_K_M").read_bytes() == DATA
    assert hub.paths("bytes") == []


def test_names_that_leave_the_folder_are_left_out(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/evil"] = {"../../../evil-Q4_K_M.gguf": DATA, "/evil-Q8_0.gguf": DATA}
    with pytest.raises(ModelError, match="has no GGUF file"):
        resolve_model("org/evil")
    assert list(tmp_path.rglob("*evil*")) == []


def test_a_digest_that_is_a_path_is_left_out(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.hub_server.sha256", lambda data: "../../../evil")
    with pytest.raises(ModelError, match="has no GGUF file"):
        resolve_model(REPO)


def test_a_commit_that_is_a_path_is_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.commit = "../../evil"
    with pytest.raises(ModelError, match="the hub names no commit"):
        resolve_model(REPO)


def test_pull_takes_the_newest_commit(hub: HubServer) -> None:
    first = resolve_model(f"{REPO}:Q4_K_M")
    hub.commit = NEWER
    hub.repositories[REPO]["some-Q4_K_M.gguf"] = DATA + b"newer"
    assert resolve_model(f"{REPO}:Q4_K_M") == first
    second = resolve_model(f"{REPO}:Q4_K_M", newest=True)
    assert second.read_bytes() == DATA + b"newer"
    assert resolve_model(f"{REPO}:Q4_K_M") == second
    hub.close()
    told = Told()
    assert resolve_model(f"{REPO}:Q4_K_M", newest=True, progress=told) == second
    assert told.notes[0].endswith("is there a network?; the file that is here is used")


def test_bytes_that_a_newer_commit_shares_are_kept(hub: HubServer) -> None:
    resolve_model(f"{REPO}:Q4_K_M")
    hub.commit = NEWER
    path = resolve_model(f"{REPO}:Q4_K_M", newest=True)
    assert NEWER in path.parts and path.read_bytes() == DATA
    assert len(hub.paths("bytes")) == 1
