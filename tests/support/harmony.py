"""gpt-oss's channels over a vocabulary of single bytes with harmony's special tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from luce.gguf.reader import open_gguf
from luce.models.channels import Channels
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import Dialect
from luce.text.chat import ChatFormat
from luce.text.marks import Marks
from luce.text.template import ChatTemplate
from luce.text.tokenizer import Tokenizer
from tests.support.scripted_backend import Script, after
from tests.support.tool_templates import TEMPLATES, byte_tokenizer
from tests.support.vocabulary import DIRECTORY


@functools.cache
def dialect() -> Dialect:
    """The dialect of the family's reference file."""
    with open_gguf(DIRECTORY / "gptoss-a-F32.gguf") as file:
        return read_spec(Source(str(file.paths[0]), file.metadata, file.tensors)).dialect


def channels() -> Channels:
    """The family's channels."""
    found = dialect().channels
    assert found is not None
    return found


@functools.cache
def tokenizer() -> Tokenizer:
    """The vocabulary."""
    return byte_tokenizer("harmony")


@functools.cache
def marks() -> Marks:
    """The family's marks in it."""
    return Marks(dialect().calls, tokenizer(), channels())


@functools.cache
def chat() -> ChatFormat:
    """The format of conversations, one for all tests, as each has a child process."""
    return ChatFormat(ChatTemplate(TEMPLATES["harmony"], bos="", eos="<|return|>"), tokenizer(), dialect())


def saying(*turns: tuple[str, str]) -> Script:
    """A script that says a text, and ends, behind a message that ends with another: (end of the message, reply)."""
    encode = functools.partial(tokenizer().encode, specials=True)
    scripts = [after(encode(f"{end}<|end|><|start|>assistant"), encode(reply)) for end, reply in turns]

    def script(history: Sequence[int]) -> int | None:
        return next((token for found in reversed(scripts) if (token := found(history)) is not None), None)

    return script
