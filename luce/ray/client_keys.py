"""The clients' API keys at an ingress: it has nothing computed for a request without one. A replica refuses it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from luce.config.settings import Config
from luce.errors import AuthError, UsageError
from luce.server.auth import Keys

_log = logging.getLogger("ray.serve")


class ClientKeys:
    """The keys of a file as it is now, since an update of the replicas leaves the ingresses. `file`: "" where clients
    need no key. Raises UsageError."""

    def __init__(self, file: str) -> None:
        self._file = Path(file) if file else None
        self._seen = self._stamp()
        self._keys = Keys(Config(api_key_file=self._file))

    def may_ask(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers has a key, or needs none."""
        if self._file is None:
            return True
        if (stamp := self._stamp()) != self._seen:
            # Noted before the file is read: what changes meanwhile is read again.
            self._seen = stamp
            try:
                self._keys.reload()
            except UsageError as error:
                _log.warning("the keys stay as they were: %s", error)
        try:
            self._keys.check(headers)
        except AuthError:
            return False
        return True

    def _stamp(self) -> tuple[int, ...]:
        """What tells one state of the file from another; nothing without a file."""
        try:
            found = os.stat(self._file or "")
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns
