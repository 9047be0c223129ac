"""A chat template: Jinja source from a model file or from the user, rendered by a child process with hard limits."""

from __future__ import annotations

import datetime
import logging
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from luce.errors import LuceError, ModelError, RequestError, UnavailableError
from luce.text.collector import COLLECTOR_OFF
from luce.text.template_child import HungError, TemplateChild
from luce.text.template_message import pack, unpack

_log = logging.getLogger(__name__)

_SECONDS = 10.0
#: time beyond the limit of a render in which the process reads a request or writes a response
_PATIENCE = 5.0
#: time beyond it after which `down` tells
_EXCESS = 1.0


class _ChildError(Exception):
    """The child reports an error, or has ended; the text is for the user."""


class _DownError(Exception):
    """There is no child that answers; the text is for the user."""


class ChatTemplate:
    """Renders conversations. Thread-safe: renders wait for each other.

    One child process per template (why a process: luce/text/template_process.py) starts here, ends with `close`, with
    this object or with this process, and is replaced if it has ended. A render takes at most `seconds`, its result has
    at most 2**20 characters and 8 for each byte of the variables as JSON. A child that neither reads nor writes for
    `seconds` and `patience` is replaced too, and the conversation goes to the new one.

    Raises `error`, which names `origin`, if the syntax of the source is invalid, LuceError if no child can be started.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        origin: str = "tokenizer.chat_template",
        error: type[LuceError] = ModelError,
        seconds: float = _SECONDS,
        patience: float = _PATIENCE,
        child: TemplateChild | None = None,
    ) -> None:
        """`child`: one that has been asked nothing yet, instead of a new one."""
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos, "unk_token": "", "pad_token": ""}
        self._seconds = seconds
        self._patience = patience
        self._lock = threading.Lock()
        self._child: TemplateChild | None = None
        self._failure = ""
        try:
            self._start(child)
        except _ChildError as problem:
            raise error(f"{origin}: {problem}") from None
        except _DownError as problem:
            raise LuceError(f"{origin}: {problem}") from None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The child that renders. There is none after a failed restart."""
        assert self._child is not None
        return self._child.process

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation. Blocks; `kwargs` are further variables, all JSON values.

        Raises RequestError if the template refuses the conversation, fails, or exceeds a limit, UnavailableError if no
        child answers.
        """
        variables = {
            "documents": None,
            **kwargs,
            **self._tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        request = {"variables": variables, "now": datetime.datetime.now().isoformat(), "seconds": self._seconds}
        try:
            with COLLECTOR_OFF:
                line = pack(request)
        except (TypeError, ValueError, RecursionError) as problem:
            raise RequestError(f"chat template: a variable is not a JSON value: {problem}") from None
        try:
            with self._lock:
                return self._render(line)
        except _ChildError as problem:
            raise RequestError(f"chat template: {problem}") from None
        except _DownError as problem:
            raise UnavailableError(f"chat template: {problem}", code="template_down") from None

    def down(self) -> str:
        """Why no conversation can be rendered now: the child hangs or cannot be started. Empty otherwise."""
        child = self._child
        if child is None:
            return f"chat template: {self._failure}"
        # A child that renders for longer ends itself.
        hangs = child.silence() > self._seconds + _EXCESS
        return f"chat template: its process has not answered for {child.silence():.0f} s" if hangs else ""

    def close(self) -> None:
        """End the child. Idempotent; a later render starts a new one."""
        if self._child is not None:
            self._child.end()

    def _render(self, line: bytes) -> str:
        if self._child is None or self._child.process.poll() is not None:
            self._start()
        try:
            return self._ask(line)
        except HungError:
            # Not the template's doing, whose time has a limit: the process was stopped, or its memory is on a disk.
            _log.warning("chat template: its process does not answer; it is started anew")
            self._start()
        try:
            return self._ask(line)
        except HungError:
            self._start()
            raise _DownError("its process does not answer") from None

    def _start(self, child: TemplateChild | None = None) -> None:
        """Another child in the place of the last one, a new one if None. Raises _ChildError and _DownError."""
        self.close()
        self._child = None
        try:
            self._child = TemplateChild() if child is None else child
            self._ask(pack({"source": self.source, "seconds": self._seconds}))
        except _ChildError:
            self.close()
            raise
        except (OSError, HungError) as problem:
            self.close()
            self._child = None
            self._failure = "its process does not answer"
            if isinstance(problem, OSError):
                self._failure = f"its process cannot be started: {problem.strerror}: {problem.filename}"
            raise _DownError(self._failure) from None

    def _ask(self, line: bytes) -> str:
        assert self._child is not None
        child = self._child
        try:
            response = child.ask(line, self._seconds + self._patience)
        except BaseException:
            # Interrupted between request and response: the next request must not get this response.
            child.end()
            raise
        if not response.endswith(b"\n"):
            child.end()
            status = child.process.returncode
            if status == -signal.SIGALRM:
                raise _ChildError(f"took longer than {self._seconds:g} s")
            raise _ChildError(f"its process ended with status {status}")
        with COLLECTOR_OFF:
            message = unpack(response)
        if "error" in message:
            raise _ChildError(message["error"])
        return str(message["text"])
