"""Log lines in their three forms."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from luce import log


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give pytest's own handlers back."""
    root, luce = logging.getLogger(), logging.getLogger("luce")
    before, levels = list(root.handlers), (root.level, luce.level)
    yield
    root.handlers[:] = before
    root.setLevel(levels[0])
    luce.setLevel(levels[1])


def lines(*, as_json: bool = False, level: str = "info") -> list[str]:
    stream = io.StringIO()
    writer = log.configure(level, as_json=as_json, stream=stream)
    logger = logging.getLogger("luce.test")
    token = log.request_id.set("req_1")
    log.event(logger, "request", route="/v1", status=200, seconds=0.12345, none=None, name='a "b"\nc')
    log.request_id.reset(token)
    logger.debug("hidden")
    logging.getLogger("elsewhere").info("hidden")
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("it failed")
    writer.stop()
    return stream.getvalue().splitlines()


def test_lines_for_a_terminal() -> None:
    first, second, *trace = lines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    assert re.fullmatch(
        stamp + r'info request route=/v1 status=200 seconds=0\.123 name="a \\"b\\"\\nc" id=req_1', first
    )
    assert re.fullmatch(stamp + "error it failed", second)
    assert all(re.match(stamp + "error ", line) for line in trace) and trace[-1].endswith("ValueError: bad")


def test_lines_as_json() -> None:
    first, second = (json.loads(line) for line in lines(as_json=True))
    assert first["event"] == "request" and first["status"] == 200 and first["id"] == "req_1" and "none" not in first
    assert second["level"] == "error" and "ValueError: bad" in second["exception"] and "id" not in second


def test_levels() -> None:
    assert len(lines(as_json=True, level="error")) == 1
    assert len(lines(as_json=True, level="debug")) == 3


def test_lines_for_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "journal", "w+", encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        writer = log.configure("info", stream=file)
        logging.getLogger("luce.test").info("hello")
        logging.getLogger("luce.test").error("two\nlines")
        writer.stop()
        file.seek(0)
        assert file.read() == "<6>hello\n<3>two\n<3>lines\n"


def test_nothing_gathers_once_the_writer_has_stopped() -> None:
    assert lines() and not logging.getLogger().handlers


def test_text_of_a_client_stays_on_one_line() -> None:
    for text in ("a\u2028b", "a\x85b", "a\x1b[2Jb", "a\nb"):
        stream = io.StringIO()
        writer = log.configure("info", stream=stream)
        log.event(logging.getLogger("luce.test"), "request", error=text)
        writer.stop()
        (line,) = stream.getvalue().splitlines()
        assert line.endswith("error=" + json.dumps(text))


def test_a_failure_that_is_its_own_cause_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    log.failure(logging.getLogger("luce.test"), "it failed", first)
    assert caplog.messages == ["it failed\nValueError\nKeyError"]


def test_a_failure_is_logged_with_what_it_interrupted(caplog: pytest.LogCaptureFixture) -> None:
    try:
        try:
            int("a-" + "prompt")
        except ValueError:
            {}["a-" + "key"]
    except KeyError as error:
        log.failure(logging.getLogger("luce.test"), "it failed", error)
    assert "ValueError" in caplog.text and "KeyError" in caplog.text and "a-prompt" not in caplog.text


def test_a_failure_is_logged_without_messages(caplog: pytest.LogCaptureFixture) -> None:
    try:
        try:
            int("a-" + "prompt")
        except ValueError as error:
            raise KeyError("a-" + "key") from error
    except KeyError as error:
        log.failure(logging.getLogger("luce.test"), "it failed", error)
    assert "it failed" in caplog.text and "KeyError" in caplog.text and "ValueError" in caplog.text
    assert "test_log.py" in caplog.text and "a-prompt" not in caplog.text and "a-key" not in caplog.text
