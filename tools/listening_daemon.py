"""Daemons that listen on loopback, and their keys, for tests and tools."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def listener(
    path: Path,
    key: Path,
    port: int = 0,
    draft: Path | None = None,
    python: Path = Path(sys.executable),
    prefill_drafter: Path | None = None,
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A `luce shard` that listens with a model, or its drafts too, and its port."""
    command = [str(python), "-P", "-m", "luce", "shard", str(path), "--listen", f"127.0.0.1:{port}"]
    command += [] if draft is None else ["--draft", str(draft)]
    command += [] if prefill_drafter is None else ["--prefill-drafter", str(prefill_drafter)]
    process = subprocess.Popen([*command, "--key-file", str(key)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        with process.stdout:
            yield int(process.stdout.readline().rpartition(":")[2]), process
    finally:
        process.kill()
        process.wait()


def make_key_file(path: Path) -> Path:
    """A new key file for network daemons, with the key and the certificate beside it. Needs openssl."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    key, certificate = path.with_suffix(".key"), path.with_suffix(".crt")
    command += ["-subj", "/CN=luce", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(key.read_text() + certificate.read_text())
    path.chmod(0o600)
    return path
