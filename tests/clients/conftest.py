"""Every test here fails if Luce makes a blocking call on the event loop. Also the openai client of both versions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from tests.support.client_programs import Library, library


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    """Blocking calls that have Luce on their stack raise."""
    with blockbuster_ctx("luce") as guard:
        yield guard


@pytest.fixture(scope="module", params=["openai2", "openai3"])
def threaded(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The openai client without asyncio, in a process of its own: version 2, and this environment's version 3."""
    if request.param == "openai2":
        with library("openai2", "openai 2") as found:
            yield found
    else:
        with contextlib.closing(Library(sys.executable)) as found:
            yield found
