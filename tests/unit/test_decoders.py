"""Decoders of msgspec types."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import luce
from luce.decoders import json_decoder

TYPED = re.compile(r"(json|msgpack)\.decode\(.*\btype=")


def test_decoders_are_built_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time crash the process: a structure is seen by one thread while the other fills it in."""
    inside, most = list[int](), list[int]()
    real = msgspec.json.Decoder

    def build(kind: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return real(kind)

    kinds = [msgspec.defstruct(f"Kind{number}", [("a", int)]) for number in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(msgspec.json, "Decoder", build)
        threads = [threading.Thread(target=json_decoder, args=(kind,)) for kind in (*kinds, *kinds)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1] * 4


def test_no_other_call_builds_what_msgspec_knows_of_a_type() -> None:
    sources = Path(luce.__file__).parent.rglob("*.py")
    assert [str(path) for path in sources if TYPED.search(path.read_text())] == []
