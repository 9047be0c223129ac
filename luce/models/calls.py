"""How a model writes tool calls, as data: the parser of replies and the grammar of constrained replies are made of it.

A reply that calls tools is, with `()` around what may repeat:

    content lead section[0] (call[0] name[0] NAME name[1] ARGUMENTS call[1]) section[1]

with `between` between two calls, and id[0] ID id[1] behind the name in dialects whose models write ids. A text, or a
part of one, that is the name of a special token of the vocabulary is that token; all else is bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Json:
    """The arguments are one JSON object. With `fields` a call is one object too: `{"name": NAME, "arguments": {...}}`;
    `Calls.name` and `Calls.id` are empty then."""

    #: keys of the name and of the arguments, in the order in which models write them
    fields: tuple[str, str] | None = None
    #: key of the id that the model writes behind the arguments
    id: str | None = None
    #: key of the call's number in the conversation, from 0, a string that the model writes in front of the name.
    #: Clients do not see it: templates count the calls themselves
    number: str | None = None


@dataclass(frozen=True)
class Tagged:
    """Each parameter stands between tags, `key[0] KEY key[1] value[0] VALUE value[1]`: strings as they are, everything
    else as JSON.

    A string ends at value[1]. If that is text, not a special token, it must be followed by what can come next: another
    key[0], or the text behind the last parameter, `Calls.call[1]`.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    #: attribute between key[1] and value[0] that says whether VALUE is a string; %s is true or false
    typed: str | None = None


@dataclass(frozen=True)
class Bare:
    """A JSON object with bare keys and without white space: `{key:VALUE,key:VALUE}`, objects inside it alike."""

    #: the delimiter on both sides of a string, in place of the quotation mark. Nothing in a string is escaped
    quote: str


@dataclass(frozen=True)
class Keywords:
    """The arguments are Python's keyword arguments, `NAME=VALUE, NAME=VALUE`. VALUE is a literal of Python; JSON's is
    read too. A name that is no identifier stands in a dictionary: `**{"NAME": VALUE}`."""


@dataclass(frozen=True)
class Calls:
    """The format of a model's tool calls."""

    #: what `--tool-format` names it
    format: str
    #: text that begins the first call of a reply; parsers and grammars wait for it
    trigger: str
    arguments: Json | Tagged | Bare | Keywords
    #: around all calls of a reply
    section: tuple[str, str] = ("", "")
    #: around one call
    call: tuple[str, str] = ("", "")
    #: between two calls
    between: str = ""
    #: between content and the first call
    lead: str = ""
    #: around the function's name; an empty second text: the name ends where the arguments begin
    name: tuple[str, str] = ("", "")
    #: around the id that the model writes between name and arguments
    id: tuple[str, str] | None = None
    #: further texts that end the name in a reply; what stands between them and name[1] belongs to no part of the call
    name_ends: tuple[str, ...] = ()
    #: a reply may hold several calls
    parallel: bool = True
    #: the trigger begins a call only where the content begins
    at_start: bool = False
    #: texts of tokens that end a reply once it has a call
    ends: tuple[str, ...] = ()
    #: texts of further special tokens that may stand inside calls, and nowhere else
    inside: tuple[str, ...] = ()
    #: how the template wants tool results: as messages of their own, or as `tool_responses` of the calls' message
    results: Literal["messages", "responses"] = "messages"
    #: characters of the ids of calls that the template takes, letters and digits; 0: any id
    id_length: int = 0
    #: other spellings that parsers read
    accepts: tuple[Calls, ...] = ()
    #: of a spelling in `accepts`: a grammar of calls allows it too
    written: bool = False
    #: each call is a message of its own in a reply of channels (luce/models/channels.py)
    message: bool = False
    #: texts that every chat template of this dialect holds; empty: no template is recognised by its text
    template: tuple[str, ...] = ()
