"""Errors of a body that became a chat request name the fields of the body, not those of the chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from luce.errors import RequestError


@contextmanager
def renamed(field: Callable[[str], str]) -> Iterator[None]:
    """RequestErrors of the block name `field` of their field instead."""
    try:
        yield
    except RequestError as error:
        param = error.param
        if param is not None and (name := field(param)) != param:
            message = str(error)
            error.args = (name + message.removeprefix(param) if message.startswith(param) else message,)
            error.param = name
        raise
