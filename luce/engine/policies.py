"""The policy that --kvflash-policy names."""

from __future__ import annotations

from luce.config import Config
from luce.engine.residency import Age, Policy


def open_policy(config: Config) -> Policy:
    """It is closed with the pager that gets it."""
    assert config.kvflash_policy == Age.name
    return Age()
