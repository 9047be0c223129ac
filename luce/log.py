"""Log lines on stderr, one per event: for a terminal, for the journal (`<6>` in front, no time) or as JSON.

Logging never blocks its caller: records go through a queue to a thread that writes them.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import sys
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TextIO

from luce.config.environment import environment

#: id of the request that the current task or thread works for; every line of the log names it
request_id: ContextVar[str] = ContextVar("request_id", default="")

_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def event(logger: logging.Logger, name: str, /, level: int = logging.INFO, **fields: Any) -> None:
    """Log `name key=value ...`. Fields that are None are left out."""
    logger.log(level, name, extra={"fields": {key: value for key, value in fields.items() if value is not None}})


def failure(logger: logging.Logger, what: str, error: BaseException | None) -> None:
    """Log a bug: where it happened and the class of the exception, never its message, which may quote a prompt."""
    lines = [what]
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines += ["".join(traceback.format_tb(error.__traceback__)).rstrip(), type(error).__qualname__]
        error = error.__cause__ or error.__context__
    logger.error("%s", "\n".join(line for line in lines if line))


def split_priority(line: str) -> tuple[int, str]:
    """Level and text of a line with a priority such as `<6>` in front; a line without one is a warning."""
    if len(line) > 2 and line[0] == "<" and line[2] == ">":
        for level, priority in _PRIORITY.items():
            if line[1] == str(priority):
                return level, line[3:]
    return logging.WARNING, line


def configure(
    level: str, *, as_json: bool = False, journal: bool = False, stream: TextIO | None = None
) -> logging.handlers.QueueListener:
    """Send the log of Luce and of its libraries to `stream` (stderr). `stop()` of the result writes the queued records
    and ends the logging.

    `journal`: write priorities as for the journal, even if `stream` is not connected to it.
    """
    stream = sys.stderr if stream is None else stream
    writer = logging.StreamHandler(stream)
    writer.setFormatter(_JsonFormatter() if as_json else _LineFormatter(journal=journal or is_journal(stream)))
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    sender = _QueueSender(records)
    root = logging.getLogger()
    root.handlers[:] = [sender]
    root.setLevel(logging.WARNING)
    set_level(level)
    listener = _Listener(sender, records, writer)
    listener.start()
    return listener


def set_level(level: str) -> None:
    """The lowest level that Luce logs from now on."""
    logging.getLogger("luce").setLevel(level.upper())


class _Listener(logging.handlers.QueueListener):
    def __init__(
        self, sender: _QueueSender, records: queue.SimpleQueue[logging.LogRecord], writer: logging.Handler
    ) -> None:
        super().__init__(records, writer)
        self._sender = sender

    def stop(self) -> None:
        # Later records would stay in the queue for ever, with the objects that they refer to.
        logging.getLogger().removeHandler(self._sender)
        super().stop()


class _QueueSender(logging.handlers.QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # Here, not in the formatter: only the thread that logs knows its request.
        record.fields = _fields(record) | {"id": request_id.get()} if request_id.get() else _fields(record)
        return record


class _LineFormatter(logging.Formatter):
    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        words = [record.getMessage(), *(f"{key}={_formatted(value)}" for key, value in _fields(record).items())]
        text = " ".join(words)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._journal:
            lead = f"<{_PRIORITY.get(record.levelno, 6)}>"
        else:
            lead = f"{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S} {record.levelname.lower()} "
        return "\n".join(lead + line for line in text.splitlines())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return dict(fields)


def _formatted(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and text and not set(text) & {" ", '"', "="} else json.dumps(text)


def is_journal(stream: TextIO) -> bool:
    """Whether systemd has connected the stream to the journal (`JOURNAL_STREAM` is `device:inode`)."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
