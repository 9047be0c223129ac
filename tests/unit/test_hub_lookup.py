"""Names to files: what is downloaded without a quant, and what the log says."""

from __future__ import annotations

import logging

import pytest

from luce.errors import NotDownloadedError, UsageError
from luce.hub.lookup import resolve_model
from luce.hub.variants import DeviceMemory
from tests.support.hub_server import HubServer, Told

REPO = "org/some-GGUF"


@pytest.fixture(autouse=True)
def model(hub: HubServer) -> None:
    sizes = {"Q4_K_M": 50_000, "Q2_K": 30_000, "Q8_0": 90_000}
    hub.repositories[REPO] = {f"some-{quant}.gguf": b"GGUF" + b"x" * size for quant, size in sizes.items()}


def test_the_default_fits_the_devices_and_says_why(hub: HubServer) -> None:
    told = Told()
    path = resolve_model(REPO, progress=told, memory=lambda: DeviceMemory(8 << 30, "cuda:0, cuda:1"))
    assert path.name == "some-Q4_K_M.gguf"
    assert told.notes == [f"{REPO}: takes Q4_K_M (50.0 kB): fits cuda:0, cuda:1 with 8.6 GB"]


def test_no_default_fits(hub: HubServer) -> None:
    with pytest.raises(UsageError, match=r"the smallest file, Q2_K, has 30.0 kB and does not fit cpu:0 with 1.0 GB"):
        resolve_model(REPO, memory=lambda: DeviceMemory(10**9, "cpu:0"))
    assert hub.paths("bytes") == []


def test_memory_is_asked_for_a_choice_only(hub: HubServer) -> None:
    def memory() -> DeviceMemory:
        raise AssertionError("opens devices")

    assert resolve_model(f"{REPO}:Q2_K", memory=memory).name == "some-Q2_K.gguf"
    hub.repositories["org/one"] = {"one.gguf": b"GGUFone"}
    told = Told()
    assert resolve_model("org/one", memory=memory, progress=told).read_bytes() == b"GGUFone"
    assert told.notes == []


def test_without_a_quant_what_is_here_is_used(hub: HubServer) -> None:
    first = resolve_model(f"{REPO}:Q2_K")
    hub.close()
    assert resolve_model(REPO) == first


def test_a_quant_that_is_not_there(hub: HubServer) -> None:
    with pytest.raises(UsageError, match=r"the repository has no Q5_K_M; it has Q2_K \(30.0 kB\), Q4_K_M"):
        resolve_model(f"{REPO}:Q5_K_M")


def test_fetch_false_asks_nobody(hub: HubServer) -> None:
    for name in (REPO, f"{REPO}:Q4_K_M", f"{hub.url.replace('127.0.0.1', 'localhost')}/x.gguf"):
        with pytest.raises(NotDownloadedError, match="has not been downloaded yet"):
            resolve_model(name, fetch=False)
    assert hub.requests == []


def test_the_log_has_the_steps(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "luce.hub"):
        resolve_model(f"{REPO}:Q4_K_M")
    texts = [record.getMessage() for record in caplog.records if record.name == "luce.hub"]
    assert texts[0] == "downloading some-Q4_K_M.gguf, 50.0 kB"
    assert "50 % of 50.0 kB" in texts and texts.count("100 % of 50.0 kB") == 2
