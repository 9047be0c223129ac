"""A scorer of texts in a daemon, on the daemon's side. luce.compress.remote is the server's side."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luce.compress.messages import CancelScore, LoadScorer, Release, Request, Score, Scored, ScorerLoaded
from luce.compress.scorer import LONGEST, TextScorer, segment_tokens
from luce.errors import BackendError, ModelError, RequestError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.remote.messages import Done
from luce.remote.service import Loader, Service, Work
from luce.runtime.device import Device

#: most tokens of a text, and most rows that pass a layer together
_MOST_TOKENS, _MOST_ROWS = 1 << 24, 1 << 16


def scorer_loader(path: Path | None = None) -> Loader:
    """Loads scorers into a daemon. `path`: the small model's file, if it differs from the server's."""

    def load(message: LoadScorer, devices: Sequence[Device], opened: contextlib.ExitStack) -> Service:
        return ScorerSession(message, devices[0], path, opened)

    return Loader(LoadScorer, Request, load)


class ScorerSession(Service):
    """A scorer for one server. It works on a thread of its own, so that the session can receive a CancelScore.

    Checks everything in a message before it uses it.
    """

    holds = "a scorer"

    def __init__(self, load: LoadScorer, device: Device, path: Path | None, opened: contextlib.ExitStack) -> None:
        super().__init__()
        self.handlers = {Score: self.score, CancelScore: self.cancel, Release: self.release}
        reading = load.reading
        known = 0 <= reading.alpha <= 1 and min(reading.layers, reading.scored) >= 0
        if not known or not 0 < load.longest <= LONGEST or not 0 < reading.rows <= _MOST_ROWS:
            raise BackendError("the limits of the scorer are not valid")
        self._file = opened.enter_context(open_gguf(path or Path(load.path)))
        if fingerprint(self._file) != load.fingerprint:
            raise ModelError(f"{self._file.paths[0]}: the daemon's file is not the server's: their contents differ")
        self._spec = read_spec(Source(str(self._file.paths[0]), self._file.metadata, self._file.tensors))
        self._limits = load
        self._device = device
        self._scorer: TextScorer | None = None
        self._cancelled = threading.Event()
        self._running: Future[NDArray[np.float64]] | None = None
        self._thread = ThreadPoolExecutor(1, "luce-scorer")
        opened.callback(self._close)
        self._thread.submit(self._loaded).result()

    def loaded(self) -> ScorerLoaded:
        return ScorerLoaded(segment_tokens(self._file, self._spec, self._limits.longest))

    def score(self, message: Score) -> Work:
        """Begin to score a text."""
        tokens, vocab = message.tokens, self._spec.vocab
        valid = tokens.ndim == 1 and 0 < len(tokens) <= _MOST_TOKENS and message.segment > 0
        if not valid or not ((tokens >= 0) & (tokens < vocab)).all():
            raise BackendError("the text of the message is not valid")
        # Responses keep the order of the requests, so nothing else runs that could be cancelled.
        self._settle_thread()
        self._cancelled.clear()

        def run() -> NDArray[np.float64]:
            return self._loaded()(tokens, segment=message.segment, rotated=message.rotated, check=self._check)

        running = self._running = self._thread.submit(run)
        return Work(_Ended(running), lambda: Scored(running.result()), threaded=True)

    def cancel(self, message: CancelScore) -> None:
        """End the text that is scored."""
        self._cancelled.set()

    def release(self, message: Release) -> Done:
        """Release the weights."""
        self._settle_thread()
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            scorer.close()
        return Done()

    def abandon(self) -> None:
        self._cancelled.set()

    def _loaded(self) -> TextScorer:
        if self._scorer is None:
            limits = self._limits
            self._scorer = TextScorer(
                self._file, self._spec, self._device, reading=limits.reading, longest=limits.longest
            )
        return self._scorer

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise RequestError("the server has cancelled the request", code="cancelled")

    def _settle_thread(self) -> None:
        """Wait until no text is scored."""
        if self._running is not None:
            wait([self._running])

    def _close(self) -> None:
        self._cancelled.set()
        self._thread.shutdown()
        self.release(Release())


class _Ended:
    """The end of a thread's work."""

    def __init__(self, work: Future[NDArray[np.float64]]) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        wait([self._work])
