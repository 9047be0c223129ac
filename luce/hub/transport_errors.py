"""Errors of downloads that do not depend on what the server is, as Luce's: one line each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from luce.errors import ModelError, UnreachableError


@contextlib.contextmanager
def transport_errors(model: str, server: str, directory: Path) -> Iterator[None]:
    """Turn errors of huggingface_hub, of its HTTP client and of the disk into those of Luce.

    model: whose download fails; server: where it comes from; directory: where it goes. An answer with an error status
    stays as it is: its meaning depends on the server.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.HfHubHTTPError:
        raise
    except errors.OfflineModeIsEnabled:
        raise UnreachableError(f"model {model!r}: HF_HUB_OFFLINE is set, so nothing is downloaded") from None
    except errors.HTTPError as error:
        # What has arrived is kept.
        raise UnreachableError(f"model {model!r}: {server}: {one_line(error)}; is there a network?") from error
    except OSError as error:
        text = one_line(error) if error.errno is None else f"{error.filename or directory}: {error.strerror}"
        raise ModelError(f"model {model!r}: {text}") from error


def status_text(status: int) -> str:
    """An HTTP status with its phrase, where it has one."""
    known = status in HTTPStatus.__members__.values()
    return f"{status} {HTTPStatus(status).phrase}" if known else str(status)


def one_line(error: BaseException) -> str:
    """The text of a library's error in one line, or its class if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__
