"""Every test here fails if Luce makes a blocking call on the event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    """Blocking calls that have Luce on their stack raise."""
    with blockbuster_ctx("luce") as guard:
        yield guard
