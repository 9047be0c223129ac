"""What a download tells whoever waits for it."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from typing import Protocol

_log = logging.getLogger("luce.hub")
_URL = re.compile(r"https?://([^/\s]+)\S*")


class Progress(Protocol):
    """Whoever waits. luce.cli.progress.Wait is one."""

    def step(self, text: str) -> None:
        """What happens now."""

    def note(self, text: str) -> None:
        """Something to know, also when the wait is over."""

    def update(self, done: float, total: float) -> None:
        """`done` of `total` bytes of this step; a total of 0 is not known."""


class LoggedProgress:
    """Logs steps and notes, and each tenth of the bytes."""

    def __init__(self) -> None:
        self._tenth = 0

    def step(self, text: str) -> None:
        """As Progress.step."""
        self._tenth = 0
        _log.info("%s", text)

    def note(self, text: str) -> None:
        """As Progress.note."""
        _log.info("%s", text)

    def update(self, done: float, total: float) -> None:
        """As Progress.update."""
        tenth = int(10 * done / total) if total else 0
        if tenth > self._tenth:
            self._tenth = tenth
            _log.info("%d %% of %s", 10 * tenth, size_text(int(total)))


def size_text(size: int) -> str:
    """A size for people, in units of 1000 bytes, as file managers and the hub show it: "16.5 GB"."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.95:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if unit != "B" else f"{size} B"


class _Retries(logging.Handler):
    """Notes what huggingface_hub warns of: waits and retries. Its URLs carry signatures; their host says enough."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note(_URL.sub(r"\1", " ".join(record.getMessage().split())))


class _Library:
    """What huggingface_hub has of its own while no download of Luce runs. Downloads on several threads overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._own: tuple[list[logging.Handler], bool] = ([], False)

    def enter(self, handler: logging.Handler) -> None:
        from huggingface_hub import constants

        library = logging.getLogger("huggingface_hub")
        with self._lock:
            if not self._users:
                self._own = library.handlers[:], constants.HF_HUB_DISABLE_TELEMETRY
                library.handlers[:], constants.HF_HUB_DISABLE_TELEMETRY = [], True
            self._users += 1
            library.addHandler(handler)

    def leave(self, handler: logging.Handler) -> None:
        from huggingface_hub import constants

        library = logging.getLogger("huggingface_hub")
        with self._lock:
            self._users -= 1
            library.removeHandler(handler)
            if not self._users:
                library.handlers[:], constants.HF_HUB_DISABLE_TELEMETRY = self._own


_library = _Library()


@contextlib.contextmanager
def quiet_library(progress: Progress) -> Iterator[None]:
    """Meanwhile warnings of huggingface_hub go to `progress` instead of standard error, which may show a bar, and the
    library tells nobody which other packages are installed and from where it is called."""
    handler = _Retries(progress)
    _library.enter(handler)
    try:
        yield
    finally:
        _library.leave(handler)
