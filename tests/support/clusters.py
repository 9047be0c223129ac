"""Clusters for tests: directories of their own, keys, coordinators and hosts in this process."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from luce.cluster.cluster_files import ClusterFiles
from luce.cluster.coordinator import Coordinator
from luce.cluster.identity import JOIN_PROTOCOL, Identity, new_key_pair, read_identity
from luce.cluster.join_token import decode_token
from luce.cluster.member import MemberHost, join
from luce.cluster.member_weights import Storage, Verify
from luce.errors import LuceError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.remote.daemon import Locate
from luce.remote.messages import Load
from tests.support.reference import Reference

MODEL = Reference("qwen3-a-F32").path


def load_of(path: Path, layers: tuple[int, int]) -> Load:
    """A message that loads layers of a model on one device."""
    with open_gguf(path) as file:
        identity = fingerprint(file)
    sizes = {"pages": (1,), "slots": 1, "verify_rows": 0, "unpack_bytes": (0,), "rows": 1, "arena": 0}
    rest = {"kv": ("f16", "f16"), "captured": (), "rank_pages": False, "peer": False, "shared": False}
    return Load(path="", fingerprint=identity, layers=(layers,), **sizes, **rest)  # type: ignore[arg-type]


def needs_keys() -> None:
    """Skips a test where no keys can be made."""
    pytest.importorskip("cryptography", reason="makes keys, as the extra cluster does")


def identity(path: Path) -> Identity:
    """A new key and its certificate."""
    needs_keys()
    path.write_bytes(new_key_pair())
    path.chmod(0o600)
    return read_identity(path)


@contextlib.contextmanager
def coordinator(name: str = "home", port: int = 0, **more: Any) -> Iterator[Coordinator]:
    """A coordinator that listens on the loopback interface; `more`: of the constructor."""
    needs_keys()
    with contextlib.closing(Coordinator(name, f"127.0.0.1:{port}", **more)) as made:
        yield made


@contextlib.contextmanager
def impostor(folder: Path) -> Iterator[tuple[str, list[bytes]]]:
    """A port with a key of its own that lets one host join: its address, and what it has heard behind the block."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity(folder / "impostor").path)
    context.set_alpn_protocols([JOIN_PROTOCOL])
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            with context.wrap_socket(plain, server_side=True) as sock:
                heard.append(sock.recv(1))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", heard
        thread.join()


def port_of(made: Coordinator) -> int:
    """The port on which a coordinator listens."""
    return int(made.addresses[0].rpartition(":")[2])


@dataclass
class Host:
    """A member in a thread. Its daemon looks for the first layer of MODEL, and sends back what it receives."""

    files: ClusterFiles
    folder: Path
    devices: tuple[str, ...] = ("cpu:0",)
    #: why it has ended
    error: LuceError | None = None
    served: list[Path] = field(default_factory=list)
    layers: tuple[int, int] = (0, 1)
    #: shares of the layers that were there meanwhile, and why they were not
    shares: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    #: how many placements it had served whenever it was told to free their weights
    released: list[int] = field(default_factory=list)
    limit: int = 0
    verify: Verify = "never"
    #: seconds that it waits to be dismissed when it leaves
    patience: float = 0.5
    thread: threading.Thread | None = None
    host: MemberHost | None = None

    def start(self) -> Host:
        """Stay connected until the coordinator dismisses it."""
        host = self.host = MemberHost(
            self.files,
            self.devices,
            Storage([self.folder], self.limit, self.verify),
            self._echo,
            self.patience,
            lambda: self.served and self.released.append(len(self.served)),
        )

        def run() -> None:
            try:
                host.run()
            except LuceError as error:
                self.error = error

        self.thread = threading.Thread(target=run, name="test-member", daemon=True)
        self.thread.start()
        return self

    def stop(self) -> None:
        """Leave the cluster, if it is still there."""
        if self.host is not None:
            self.host.leave()
            assert self.end() is self.error

    def end(self) -> LuceError | None:
        """Wait for its end; the reason."""
        assert self.thread is not None
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.error

    def _echo(self, requests: socket.socket, _: socket.socket, locate: Locate, on_loaded: Callable[[], None]) -> None:
        try:
            self.served.append(locate(load_of(MODEL, self.layers), self.shares.append))
        except LuceError as error:
            self.problems.append(str(error))
            return
        on_loaded()
        requests.settimeout(60)
        with contextlib.suppress(OSError):
            while data := requests.recv(1):
                requests.sendall(data)


def joined(made: Coordinator, patch: pytest.MonkeyPatch, folder: Path, name: str = "box") -> Host:
    """A host that has joined a coordinator, with directories and a key of its own, and the name `name`."""
    with patch.context() as own:
        own.setenv("XDG_DATA_HOME", str(folder / name))
        files = ClusterFiles(made.files.name)
    join(decode_token(made.new_token(60)), files, name)
    models = folder / name / "models"
    models.mkdir(exist_ok=True)
    return Host(files, models)
