"""The standard streams of the process, which may be closed, full or without a reader.

A failed write on standard output ends the verb, whatever catches OSError on the way: with exit status 1 after one line,
or with 141 in silence if the reader has gone, as after SIGPIPE. Standard error is where failures are told: its own are
not.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


class OutputError(Exception):
    """Standard output cannot be written. Not a LuceError: a conversation goes on after those."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}")
        #: whether the reader of a pipe has gone, which is no failure of this program
        self.silent = isinstance(error, BrokenPipeError)
        self.exit_code = 141 if self.silent else 1


class _Stream(io.TextIOWrapper):
    """A text stream to a descriptor that takes no more text after the first failure, which it keeps.

    Its layers below are Python's own: one that is interrupted between a write and its result writes twice.
    """

    def __init__(self, descriptor: int, like: TextIO | None) -> None:
        """`like`: the stream whose encoding and buffering Python has chosen for the descriptor."""
        super().__init__(
            io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False)),
            encoding=getattr(like, "encoding", "utf-8"),
            errors=getattr(like, "errors", "backslashreplace"),
            # With PYTHONUNBUFFERED, Python's own streams write through instead.
            line_buffering=descriptor == 2
            or getattr(like, "line_buffering", False)
            or getattr(like, "write_through", False),
        )
        self._told = descriptor == 1
        self.failed: OSError | None = None

    def write(self, text: str, /) -> int:
        """Write, or drop the text after a failure. Raises OutputError on standard output."""
        with self._guarded():
            if self.failed is None:
                super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, unless a write has failed. Raises OutputError on standard output."""
        with self._guarded():
            if self.failed is None:
                super().flush()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = error
            if self._told:
                raise OutputError(error) from None


def _fill(descriptor: int) -> None:
    """Open the null device as a descriptor that is closed: a file that is opened later must not get its number."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


@contextlib.contextmanager
def checked(*, needed: bool) -> Iterator[Callable[[], None]]:
    """Guard the standard streams for the block. Yields a function that writes what is buffered on standard output, and
    raises OutputError if that or an earlier write has failed. A closed one has failed from the start if it is `needed`.

    Streams that the caller has put in the place of the process's own stay as they are.
    """
    before = sys.stdin, sys.stdout, sys.stderr
    for descriptor, stream in enumerate(before):
        if stream is None:
            _fill(descriptor)
    output: _Stream | None = None
    if before[0] is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if before[1] is sys.__stdout__:
        output = sys.stdout = _Stream(1, before[1])
        if before[1] is None and needed:
            output.failed = OSError(errno.EBADF, os.strerror(errno.EBADF))
    if before[2] is sys.__stderr__:
        sys.stderr = _Stream(2, before[2])

    def check() -> None:
        sys.stdout.flush()
        # A library may have caught the failure.
        if output is not None and output.failed is not None:
            raise OutputError(output.failed)

    try:
        yield check
    finally:
        with contextlib.suppress(OutputError):
            sys.stdout.flush()
        sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = before
