"""A conversation with a backend whose logits are compared between placements of the layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.support.drive import Driver
from tests.support.reference import Reference


def placement_results(driver: Driver, reference: Reference) -> NDArray[np.float32]:
    """Logits of a prompt in two steps, of rows beside another sequence, and after two restores."""
    prompt = reference.expected["prompt_long"]
    sequence, other, again = driver.start(), driver.start(), driver.start()
    driver.feed((sequence, prompt[:5]), wanted=False)
    parts = [driver.feed((sequence, part))[0] for part in (prompt[5:140], prompt[140:-2])]
    driver.feed((other, prompt[:9]))
    parts += [driver.feed((other, prompt[:1]), (sequence, token))[1] for token in prompt[-2:, None]]
    kept, saved = driver.keep(sequence), driver.save(sequence)
    parts.append(driver.feed((sequence, prompt[:1]))[0])
    for back in (lambda: driver.restore(again, saved), lambda: driver.resume(again, kept)):
        again.length = 0
        driver.feed((again, prompt[::-1]))
        back()
        parts.append(driver.feed((again, prompt[:1]))[0])
    return np.concatenate(parts)
