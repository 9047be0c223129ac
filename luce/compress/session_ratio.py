"""The keep ratio of each conversation, from how much of the scores its earlier prompts kept.

Lucebox moves it by the acceptance rate of drafting, which says how well a drafter agrees with the target, and not
whether the kept tokens were enough. Here it moves by the share of the small model's scores that they have, of what the
largest ratio would give them. Not of all scores: that depends on how far a model's attention spreads, and was 0.3 to
0.5 with the tiny one, whatever was kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

#: of a conversation's first prompt, and the least and the largest ratio
FIRST, LEAST, MOST = 0.1, 0.025, 0.2
#: conversations; the least recently used ones go first
MOST_SESSIONS = 1024
#: weight of the earlier prompts' mean share beside a new one
_OLDER = 0.7
#: above these mean shares, descending, or below those, ascending, the ratio changes by so much
_ABOVE = ((0.9, -0.01), (0.85, -0.005))
_BELOW = ((0.7, 0.01), (0.75, 0.005))


class SessionRatios:
    """Keep ratios by session. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: ratio and mean share
        self._sessions: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def ratio(self, session: str) -> float:
        """The keep ratio of a session's next prompt."""
        with self._lock:
            known = self._sessions.get(session)
            if known is None:
                return FIRST
            self._sessions.move_to_end(session)
            return known[0]

    def observe(self, session: str, reached: float) -> None:
        """Note CompressedPrompt.reached of a prompt."""
        with self._lock:
            ratio, mean = self._sessions.get(session, (FIRST, reached))
            mean = _OLDER * mean + (1 - _OLDER) * reached
            # Steps are exact in thousandths, so that ratios, which are parts of keys, come again.
            ratio = round(min(MOST, max(LEAST, ratio + _change(mean))), 3)
            self._sessions[session] = ratio, mean
            self._sessions.move_to_end(session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)


def _change(mean: float) -> float:
    above = next((change for limit, change in _ABOVE if mean > limit), 0.0)
    return above or next((change for limit, change in _BELOW if mean < limit), 0.0)
