"""Where files are that outlive the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from luce.config.directories import hugging_face_cache

#: names of variables, and the values of each case
NAMES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/xdg"},
        {"HF_HOME": "~/models", "XDG_CACHE_HOME": "/xdg"},
        {"HF_HOME": "$PLACE/hf"},
        {"HUGGINGFACE_HUB_CACHE": "/legacy", "HF_HOME": "/hf"},
        {"HF_HUB_CACHE": "~/hub", "HUGGINGFACE_HUB_CACHE": "/legacy", "HF_HOME": "/hf"},
        {"HF_HUB_CACHE": "$PLACE"},
    ],
    ids=lambda variables: ",".join(variables) or "none",
)
def test_the_cache_of_the_hub_is_where_its_library_has_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", "PLACE": "/srv/place", **variables}.items():
        monkeypatch.setenv(name, value)
    # The library reads the environment when it is imported.
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    theirs = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ)
    assert str(hugging_face_cache()) == theirs.stdout.strip()
