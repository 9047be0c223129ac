"""A conversation as data: its messages, undo, and its files (JSON to load again, Markdown to read).

Saved conversations are in the user's state directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from luce.config.directories import user_state_directory
from luce.decoders import json_decoder
from luce.errors import UsageError


class Message(msgspec.Struct, omit_defaults=True):
    """One message."""

    role: Literal["user", "assistant"]
    content: str
    #: the user ended this reply before the model did
    stopped: bool = False
    #: what the model wrote before a reply, if it marks its reasoning
    reasoning: str = ""

    def for_template(self) -> dict[str, str]:
        """The message for a chat template, which decides what becomes of the reasoning."""
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.content, **reasoning}


class Conversation(msgspec.Struct):
    """A system message, if any, and the messages after it."""

    system: str | None = None
    messages: list[Message] = []

    def for_template(self) -> list[dict[str, str]]:
        """The messages for a chat template."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + [message.for_template() for message in self.messages]

    def add(
        self, role: Literal["user", "assistant"], content: str, *, stopped: bool = False, reasoning: str = ""
    ) -> None:
        """Append a message."""
        self.messages.append(Message(role, content, stopped, reasoning))

    def drop_reply(self) -> None:
        """Remove the last message if it is a reply."""
        if self.messages and self.messages[-1].role == "assistant":
            self.messages.pop()

    def drop_turn(self) -> str | None:
        """Remove the last user message and its reply. Returns the text of that message, None if there is none."""
        self.drop_reply()
        return self.messages.pop().content if self.messages else None

    def markdown(self) -> str:
        """The conversation as Markdown."""
        parts = [] if self.system is None else [f"## system\n\n{self.system}\n"]
        for message in self.messages:
            mark = " (stopped)" if message.stopped else ""
            parts.append(f"## {message.role}{mark}\n\n{message.content}\n")
        return "\n".join(parts)

    def json(self) -> bytes:
        """The conversation as JSON, for `read`."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"


def read(path: Path) -> Conversation:
    """A conversation from its JSON file. Raises UsageError naming the file."""
    try:
        return json_decoder(Conversation).decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: {error}") from None


def _chats() -> Path:
    return user_state_directory() / "chats"


def last() -> Path:
    """The file of the last conversation, for `luce chat --continue`."""
    return user_state_directory() / "last-chat.json"


def saved_names() -> list[str]:
    """The names of saved conversations."""
    return sorted(path.stem for path in _chats().glob("*.json"))


def saved_chats() -> list[tuple[str, float, Conversation | str]]:
    """The saved conversations, the latest first: name, time of change (seconds since 1970), and the conversation or
    why it cannot be read."""
    found: list[tuple[str, float, Conversation | str]] = []
    for name in saved_names():
        path = _chats() / f"{name}.json"
        try:
            found.append((name, path.stat().st_mtime, read(path)))
        except OSError:  # removed meanwhile
            continue
        except UsageError as error:
            found.append((name, path.stat().st_mtime, str(error)))
    return sorted(found, key=lambda row: -row[1])


def saved(name: str, command: str) -> Path:
    """The file of a saved conversation. Raises UsageError naming the command."""
    if not name or "/" in name or name.startswith("."):
        raise UsageError(f"{command}: expected a name without slashes, got {name!r}")
    return _chats() / f"{name}.json"
