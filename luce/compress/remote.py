"""A scorer of texts in a daemon, as the server sees it: texts go to the daemon, scores come back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.compress.messages import CancelScore, LoadScorer, Release, Score, Scored, ScorerLoaded
from luce.compress.scorer import LONGEST, Retokenize, in_own_vocabulary, no_check
from luce.errors import LuceError, ShardLostError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import GGUFFile
from luce.ipc.channel import Channel, ChannelError, ChannelTimeoutError, ProtocolError
from luce.ipc.lifecycle import Failed, error_of
from luce.remote.device import RemoteDevice
from luce.remote.messages import Done
from luce.runtime.step import Int32
from luce.shard.layerwise import Reading

#: seconds that a text may take for each token, beside the timeout of all requests
_PER_TOKEN = 0.1
#: seconds between two calls of `check` while the daemon works
_CHECKED = 0.05
#: how often a text is sent: once more if the daemon dies meanwhile
_ATTEMPTS = 2


class RemoteScorer:
    """See luce.compress.scorer.Scorer. Loads the file on a device of a daemon, and waits for it. Thread-safe.

    `retokenize`, `reading`, `longest`: as for TextScorer. `close` releases the daemon's weights; the daemon ends
    with its device. If the daemon dies while it scores a text, the text is sent again, once, to the daemon that
    follows. Raises LuceError if the daemon cannot load the file.
    """

    def __init__(
        self,
        device: RemoteDevice,
        file: GGUFFile,
        retokenize: Retokenize | None = None,
        *,
        reading: Reading,
        longest: int = LONGEST,
    ) -> None:
        self._daemon = device.daemon
        self._retokenize = retokenize
        self._lock = threading.Lock()
        self._requests = 0
        self._closed = False
        load = LoadScorer(str(file.paths[0].resolve()), fingerprint(file), reading, longest)
        self._daemon.begin_load(load, ScorerLoaded)
        self._daemon.wait_loaded(ScorerLoaded)

    def __call__(
        self,
        tokens: Int32,
        *,
        segment: int = LONGEST,
        rotated: bool = False,
        check: Callable[[], None] = no_check,
    ) -> NDArray[np.float64]:
        def scores(own: Int32) -> NDArray[np.float64]:
            return self._scores(Score(np.ascontiguousarray(own, np.int32), segment, rotated), check)

        return in_own_vocabulary(self._retokenize, tokens, scores)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # A daemon that is gone has no weights.
            with contextlib.suppress(LuceError):
                sent = self._send(self._daemon.ready_channel(), Release())
                self._answer(sent, self._daemon.timeouts.request, no_check)

    def _scores(self, message: Score, check: Callable[[], None]) -> NDArray[np.float64]:
        count = len(message.tokens)
        if not count:
            return np.zeros(0)
        seconds = self._daemon.timeouts.request + _PER_TOKEN * count
        with self._lock:
            for attempt in range(_ATTEMPTS):
                generation = self._daemon.generation
                try:
                    sent = self._send(self._daemon.channel(generation), message)
                    response = self._answer(sent, seconds, check)
                except ShardLostError:
                    if attempt + 1 == _ATTEMPTS:
                        raise
                    continue
                if not isinstance(response, Scored) or response.scores.shape != (count,):
                    raise self._lost(sent.channel, ProtocolError(f"it sent no scores of {count} tokens"))
                if not (response.scores >= 0).all():
                    raise self._lost(sent.channel, ProtocolError("it sent a score that is no number"))
                return response.scores
        raise AssertionError("an attempt returns or raises")

    def _send(self, channel: Channel[msgspec.Struct], message: msgspec.Struct) -> _Sent:
        self._requests += 1
        try:
            channel.send(self._requests, message, timeout=self._daemon.timeouts.request)
        except ChannelError as error:
            raise self._lost(channel, error) from None
        return _Sent(channel, self._requests)

    def _answer(self, sent: _Sent, seconds: float, check: Callable[[], None]) -> msgspec.Struct:
        """The response to a request. An exception of `check` cancels the request first.

        Raises ShardLostError if the daemon is lost, and the error that it reports.
        """
        end = time.monotonic() + seconds
        try:
            while not sent.channel.ready(_CHECKED):
                check()
                if time.monotonic() > end:
                    break
        except ChannelError as error:
            raise self._lost(sent.channel, error) from None
        except BaseException:
            self._send(sent.channel, CancelScore())
            self._receive(sent, seconds)
            raise
        response = self._receive(sent, max(_CHECKED, end - time.monotonic()))
        if isinstance(response, Failed):
            raise error_of(response, self._daemon.name)
        return response

    def _receive(self, sent: _Sent, seconds: float) -> Scored | Done | Failed:
        try:
            number, response = sent.channel.receive(timeout=seconds)
            if number != sent.number:
                raise ProtocolError(f"it responded to request {number} instead of {sent.number}")
            if not isinstance(response, Scored | Done | Failed):
                raise ProtocolError(f"it sent {type(response).__name__} instead of scores")
        except ChannelTimeoutError as error:
            raise self._lost(sent.channel, ChannelTimeoutError(f"{error} within {seconds:.4g} s")) from None
        except ChannelError as error:
            raise self._lost(sent.channel, error) from None
        return response

    def _lost(self, channel: Channel[msgspec.Struct], why: ChannelError) -> ShardLostError:
        return self._daemon.lost(channel, why)


class _Sent(NamedTuple):
    """A request without its response."""

    channel: Channel[msgspec.Struct]
    number: int
