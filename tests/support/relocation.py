"""Replies of a model that moves to other devices meanwhile."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import luce
from luce.api import Model
from luce.assembly import relocate
from tests.support.reference import Reference


def load(reference: Reference, **settings: Any) -> Model:
    fields = {"kv_cache_dir": "off", "cpu_weights": "float32", **settings}
    return luce.load(reference.path, max_ctx=512, **fields)


def moving(model: Model, prompt: list[int], tokens: int, moves: dict[int, dict[str, Any]]) -> list[int]:
    """The tokens of a greedy reply. Behind each number of tokens the model moves to the devices of these settings."""
    ids, errors = list[int](), list[Exception]()
    threads = []
    for token in model.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
        ids.append(token.id)
        if (settings := moves.get(len(ids))) is not None:
            config = dataclasses.replace(model.config, **settings)

            def move(config: Any = config) -> None:
                try:
                    model.engine.relocate(lambda: relocate(model, config))
                except Exception as error:
                    errors.append(error)

            threads.append(threading.Thread(target=move))
            threads[-1].start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return ids
