"""Separates the messages of a reply of several channels while it is generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from luce.models.channels import Channels
from luce.text.detokenizer import Detokenizer
from luce.text.marks import Marks
from luce.text.reasoning import Delta, Place, Splitter
from luce.text.tokenizer import Tokenizer

# Characters of a header at most: what is longer is the text of a message without one.
_LONGEST = 256
#: what may stand in front of the mark of the channel, and what may become that
_ADDRESS = re.compile(r"\s*(to=\S*\s*)?")
_ADDRESS_BEGUN = re.compile(r"\s*(t|to|to=\S*\s*)?")
_GAP = "\n\n"


class ChannelSplitter(Splitter):
    """The messages of the reasoning's channel are the reasoning, without white space around them; the bodies of all
    others are the content. Calls are content with their headers, for CallParser. A blank line stands between two
    messages of one kind. The parts do not depend on the division of the text into pieces.

    Text without a header is content. A header that its mark does not end is text of its message, but for the name of
    the channel.

    `marks`: those of the text; they have channels. `prompt`: the marked text from the prompt's last message on; empty:
    the reply goes on with a content. `calls`: the content goes to a CallParser, so it keeps its marks.
    """

    def __init__(self, marks: Marks, prompt: str, *, calls: bool = False) -> None:
        assert marks.channels is not None
        self._channels: Channels = marks.channels
        self._spelled: Callable[[str], str] = marks.spelled
        self._calls = calls
        channels = self._channels
        ends = "".join(filter(marks.is_mark, channels.ends))
        self._structure = re.compile(f"[{channels.start}{channels.channel}{channels.message}{ends}]")
        self._header_ends = re.compile(f"[{channels.start}{channels.message}{ends}]")
        self._recipient = re.compile(r"\bto=([^\s\ud800-\udfff]+)")
        named = "|".join(map(re.escape, (channels.reasoning, channels.final, channels.preamble)))
        self._named = re.compile(rf"\s*({named})\b\s*")
        self._state: Literal["role", "between", "header", "body"] = "body"
        self._reasons = False
        self._held = ""
        # White space at the end of the reasoning, and whether the message has text, and those of its kind before it.
        self._space = ""
        self._begun = False
        self._said = self._reasoned = False
        self._out: tuple[list[str], list[str]] = ([], [])
        if prompt:
            self._state = "between"
            self.push(prompt)
            self._space, self._said, self._reasoned = "", False, False

    @property
    def inside(self) -> bool:
        """As in Splitter."""
        return self._state == "body" and self._reasons

    @property
    def place(self) -> Place:
        """Where the next text stands."""
        return "header" if self._state != "body" else "reasoning" if self._reasons else "content"

    def push(self, text: str) -> Delta:
        """As in Splitter."""
        self._held += text
        return self._read(ended=False)

    def flush(self) -> Delta:
        """As in Splitter."""
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> Delta:
        readers = {"role": self._role, "between": self._between, "header": self._header, "body": self._body}
        while self._held and readers[self._state](ended):
            pass
        content, reasoning = map("".join, self._out)
        self._out = [], []
        return Delta(content if self._calls else self._spelled(content), self._spelled(reasoning))

    # --- the states: each takes what it can of the text that is held, and returns whether to go on

    def _role(self, ended: bool) -> bool:
        role = self._channels.role
        if not ended and role.startswith(self._held) and role != self._held:
            return False
        # Another's message is one too, with the whole of its header.
        self._state = "between" if self._held.startswith(role) else "header"
        self._held = self._held.removeprefix(role)
        return True

    def _between(self, ended: bool) -> bool:
        found = self._structure.search(self._held)
        text = self._held if found is None else self._held[: found.start()]
        if found is None and not ended and len(text) <= _LONGEST and _ADDRESS_BEGUN.fullmatch(text):
            return False
        if len(text) > _LONGEST or not _ADDRESS.fullmatch(text):
            self._begin(reasons=False)
        elif found is not None and found[0] in (self._channels.channel, self._channels.message):
            self._state = "header"
        else:
            if text.strip():
                self._begin(reasons=False)
                self._say(text)
            self._held = self._held[len(text) :]
            if found is not None:
                self._leave()
        return True

    def _header(self, ended: bool) -> bool:
        found = self._header_ends.search(self._held)
        if found is not None and found.start() <= _LONGEST:
            header, self._held = self._held[: found.start()], self._held[found.start() :]
        elif len(self._held) > _LONGEST or ended:
            header, self._held, found = self._held[:_LONGEST], self._held[_LONGEST:], None
        else:
            return False
        if found is None or found[0] != self._channels.message:
            self._unended(header)
            return True
        self._held = self._held[1:]
        if (call := self._call(header)) is not None:
            self._begin(reasons=False)
            self._say(call + found[0])
        else:
            name = self._named.match(header.rpartition(self._channels.channel)[2])
            self._begin(reasons=name is not None and name[1] == self._channels.reasoning)
        return True

    def _body(self, ended: bool) -> bool:
        found = self._structure.search(self._held)
        text = self._held if found is None else self._held[: found.start()]
        self._say(text)
        self._held = self._held[len(text) :]
        if found is None:
            return False
        if found[0] == self._channels.message:
            self._say(found[0])
            self._held = self._held[1:]
        else:
            self._leave()
        return True

    # --- messages

    def _leave(self) -> None:
        """Go on behind the end of a message, or at the mark that begins another."""
        self._space = ""
        mark, self._held = self._held[0], self._held[1:]
        if mark == self._channels.start:
            self._state = "role"
        elif mark == self._channels.channel:
            self._state, self._held = "header", mark + self._held
        else:
            self._state = "between"

    def _begin(self, *, reasons: bool) -> None:
        self._state, self._reasons, self._begun = "body", reasons, False

    def _call(self, header: str) -> str | None:
        """The header of a call from the recipient, or the channel in front of it, on; None: it has no recipient."""
        for found in self._recipient.finditer(header):
            if found[1] != self._channels.role:
                channel = header.rfind(self._channels.channel, 0, found.start())
                return f" {header[found.start() :]}" if channel < 0 else header[channel:]
        return None

    def _unended(self, header: str) -> None:
        """A header without the mark of the body: what stands behind the channel's name is the body."""
        before, mark, behind = header.rpartition(self._channels.channel)
        name = self._named.match(behind) if mark else None
        if name is None or self._call(header) is not None:
            self._begin(reasons=False)
            self._say(header.strip().removeprefix(self._channels.channel))
        else:
            self._begin(reasons=name[1] == self._channels.reasoning)
            self._say(before.strip())
            self._say(behind[name.end() :])

    def _say(self, text: str) -> None:
        content, reasoning = self._out
        if self._reasons:
            text = self._space + text if self._begun else text.lstrip()
            kept = text.rstrip()
            self._space = text[len(kept) :] if kept or self._begun else ""
            if kept:
                reasoning.append(kept if self._begun or not self._reasoned else _GAP + kept)
                self._begun = self._reasoned = True
        elif text:
            content.append(text if self._begun or not self._said else _GAP + text)
            self._begun = self._said = True


def channel_splitter(
    marks: Marks, tokenizer: Tokenizer, prompt: Sequence[int], *, calls: bool = False
) -> ChannelSplitter:
    """The splitter of a reply to a prompt. `calls` as in ChannelSplitter."""
    assert marks.channels is not None
    starts = [token for token, mark in marks.of_token.items() if mark == marks.channels.start]
    begin = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i] in starts), len(prompt))
    decoder = Detokenizer(tokenizer, continues=True)
    pieces = [marks.of_token.get(token) or decoder.push(token) for token in prompt[begin:]]
    return ChannelSplitter(marks, "".join(pieces), calls=calls)
