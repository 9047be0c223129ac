"""Files behind URLs that are not the hub's."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.errors import LuceError, ModelError, UnreachableError
from luce.hub.lookup import resolve_model
from tests.support.hub_server import Answer, HubServer, Told

DATA = b"GGUF" + bytes(range(256)) * 200


@pytest.fixture
def url(hub: HubServer) -> str:
    hub.files["/models/x.gguf"] = DATA
    return f"{hub.bytes_url}/models/x.gguf"


def test_a_download(hub: HubServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    told = Told()
    path = resolve_model(url, progress=told)
    assert path.read_bytes() == DATA
    assert path.name == "x.gguf" and path.parent.parent == tmp_path / "luce" / "models"
    assert told.steps == ["downloading x.gguf, 51.2 kB"]
    assert told.updates[-1] == (len(DATA), len(DATA))
    # No token for strangers.
    assert all("authorization" not in {name.lower() for name in request.headers} for request in hub.requests)
    hub.close()
    assert resolve_model(url) == path


def test_the_same_name_at_two_places(hub: HubServer, url: str) -> None:
    first = resolve_model(url)
    assert resolve_model(f"{url}?2").parent != first.parent


def broken(hub: HubServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that breaks off, as if its process ended."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    hub.cuts = [20_500]
    with monkeypatch.context() as patch:
        patch.setattr("time.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(url)


def test_resumed(hub: HubServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(hub, url, monkeypatch)
    told = Told()
    assert resolve_model(url, progress=told).read_bytes() == DATA
    assert 0 < told.updates[0][0] < len(DATA)
    last = {name.lower(): value for name, value in hub.requests[-1].headers.items()}
    assert last["range"] == f"bytes={told.updates[0][0]}-" and last["if-range"].startswith('"')


def test_another_version_is_not_continued(hub: HubServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(hub, url, monkeypatch)
    newer = b"GGUF" + DATA
    hub.files["/models/x.gguf"], hub.etags["/models/x.gguf"] = newer, '"2"'
    assert resolve_model(url).read_bytes() == newer


def test_a_version_that_changes_behind_the_first_answer(
    hub: HubServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(hub, url, monkeypatch)
    newer = b"GGUF" + DATA
    head = Answer("/models/", 200, {"ETag": '"models/x.gguf"', "Content-Length": str(len(DATA))})
    hub.answers.append(head)
    hub.files["/models/x.gguf"], hub.etags["/models/x.gguf"] = newer, '"2"'
    assert resolve_model(url).read_bytes() == newer


def test_without_a_version_nothing_is_continued(hub: HubServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.etags["/models/x.gguf"] = 'W/"weak"'
    broken(hub, url, monkeypatch)
    hub.files["/models/x.gguf"] = newer = b"GGUF" + DATA
    assert resolve_model(url).read_bytes() == newer


def test_not_a_model(hub: HubServer, url: str, tmp_path: Path) -> None:
    hub.files["/models/x.gguf"] = b"<html>login</html>"
    with pytest.raises(ModelError, match=r"is not a GGUF file \(it starts with b'<htm'\)$"):
        resolve_model(url)
    assert list((tmp_path / "luce").rglob("*.gguf")) == []


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (404, ModelError, "the server answers 404 Not Found$"),
        (500, UnreachableError, "answers 500 Internal Server Error$"),
        (599, UnreachableError, "answers 599$"),
    ],
)
def test_refused(hub: HubServer, url: str, status: int, kind: type[LuceError], message: str) -> None:
    hub.answers.append(Answer("/models/", status))
    with pytest.raises(kind, match=rf"^model '{url}': .*{message}"):
        resolve_model(url)


def test_a_server_without_head(hub: HubServer, url: str) -> None:
    hub.answers.append(Answer("/models/", 405))
    assert resolve_model(url).read_bytes() == DATA


def test_all_bytes_are_there_by_now(hub: HubServer, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(hub, url, monkeypatch)
    (partial,) = (tmp_path / "luce" / "models").rglob("*.luce.incomplete")
    partial.write_bytes(DATA)
    told = Told()
    assert resolve_model(url, progress=told).read_bytes() == DATA
    assert told.updates == [(len(DATA), len(DATA))]
    # One answer that broke off; nothing was asked for again.
    assert len(hub.paths("bytes")) == 1


def test_no_network(hub: HubServer, url: str) -> None:
    hub.close()
    with pytest.raises(UnreachableError, match=r"refused.*; is there a network\?$"):
        resolve_model(url)
