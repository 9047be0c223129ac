"""A chat template: Jinja source from a model file or from the user, rendered by a child process with hard limits."""

from __future__ import annotations

import datetime
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from luce.config.environment import environment
from luce.errors import LuceError, ModelError, RequestError

_SECONDS = 10.0
# The child sees this interpreter's modules and nothing of the environment, which may hold keys.
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from luce.text import template_process; template_process.main()"
# Last on its path: a hook may find an editable install, which is not on the path then.
_LUCE = str(Path(__file__).parents[2])


class _ChildError(Exception):
    """The child reports an error, or has ended; the text is for the user."""


class ChatTemplate:
    """Renders conversations. Thread-safe: renders wait for each other.

    One child process per template (why a process: luce/text/template_process.py) starts here, ends with `close` or
    with this object, and is replaced if it was stopped. A render takes at most `seconds`, its result has at most
    2**20 characters and 8 for each byte of the variables as JSON.

    Raises `error`, which names `origin`, if the syntax of the source is invalid.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        unk: str = "",
        pad: str = "",
        origin: str = "tokenizer.chat_template",
        error: type[LuceError] = ModelError,
        seconds: float = _SECONDS,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos, "unk_token": unk, "pad_token": pad}
        self._seconds = seconds
        self._lock = threading.Lock()
        try:
            self._start()
        except _ChildError as problem:
            raise error(f"{origin}: {problem}") from None

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

        Raises RequestError if the template refuses the conversation, fails, or exceeds a limit.
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
            line = json.dumps(request)
        except (TypeError, ValueError, RecursionError) as problem:
            raise RequestError(f"chat template: a variable is not a JSON value: {problem}") from None
        try:
            with self._lock:
                if self.process.poll() is not None:
                    self._end()
                    self._start()
                return self._ask(line)
        except _ChildError as problem:
            raise RequestError(f"chat template: {problem}") from None

    def close(self) -> None:
        """End the child. Idempotent; a later render starts a new one."""
        self._end()

    def _start(self) -> None:
        library_path = environment("LD_LIBRARY_PATH")
        #: the child that renders
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, *sys.path, _LUCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"LD_LIBRARY_PATH": library_path} if library_path else {},
            start_new_session=True,  # Ctrl+C at the terminal must not reach the child
        )
        self._end = weakref.finalize(self, _end, self.process)
        try:
            self._ask(json.dumps({"source": self.source, "seconds": self._seconds}))
        except _ChildError:
            self._end()
            raise

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
            response = self.process.stdout.readline()
        except BrokenPipeError:
            response = b""
        except BaseException:
            # Interrupted between request and response: the next request must not get this response.
            self._end()
            raise
        if not response.endswith(b"\n"):
            self._end()
            if self.process.returncode == -signal.SIGALRM:
                raise _ChildError(f"took longer than {self._seconds:g} s")
            raise _ChildError(f"its process ended with status {self.process.returncode}")
        message = json.loads(response)
        if "error" in message:
            raise _ChildError(message["error"])
        return str(message["text"])


def _end(child: subprocess.Popen[bytes]) -> None:
    # Not waiting first: a child that renders would not end. A child without a request loses nothing.
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # closing flushes what the child did not read
            pipe.close()
