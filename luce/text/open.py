"""Opens the text side of a model: the tokenizer of its file, and its chat format."""

from __future__ import annotations

import contextlib
import logging

from luce.config.settings import Config, flag
from luce.errors import LuceError, ModelError, UsageError
from luce.gguf.reader import GGUFFile
from luce.models.spec import ModelSpec
from luce.text.call_check import call_mismatch
from luce.text.chat import ChatFormat
from luce.text.effort import check_default
from luce.text.template import ChatTemplate
from luce.text.template_child import TemplateChild
from luce.text.vocabulary import KeptVocabularies, Vocabulary

_log = logging.getLogger(__name__)


def open_text(
    opened: contextlib.ExitStack,
    file: GGUFFile,
    spec: ModelSpec,
    config: Config,
    kept: KeptVocabularies | None = None,
) -> tuple[Vocabulary, ChatFormat]:
    """The vocabulary of a file, and the chat format of --chat-template or of the file; `opened` closes the template.

    Raises UsageError for the flag's template, an unknown --tool-format or a --reasoning that the template cannot do,
    ModelError for the file's template, and the errors of Vocabulary.read.
    """
    source, origin, error = _template(file, config)
    child = None
    if source is not None:
        # Its interpreter starts while this one reads the vocabulary: 0.1 s. What prevents it is raised below.
        with contextlib.suppress(OSError):
            child = TemplateChild()
            opened.callback(child.end)
    vocabulary = Vocabulary.read(file, spec) if kept is None else kept.read(file, spec)
    tokenizer = vocabulary.tokenizer
    template: ChatTemplate | None = None
    if source is not None:
        bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
        template = ChatTemplate(source, bos=bos, eos=eos, origin=origin, error=error, child=child)
        opened.callback(template.close)
    try:
        chat = ChatFormat(template, tokenizer, spec.dialect, config.tool_format)
    except ValueError as problem:
        raise UsageError(f"{flag('tool_format')} {config.tool_format}: {problem}", param="tool_format") from None
    check_default(config.reasoning, chat)
    if (mismatch := call_mismatch(chat)) is not None:
        _log.warning("tool calls in the format %s (from %s): %s", chat.calls.format, chat.calls_why, mismatch)
    return vocabulary, chat


def _template(file: GGUFFile, config: Config) -> tuple[str | None, str, type[LuceError]]:
    """The source of the template, what an error names, and the error's class."""
    if config.chat_template is None:
        source: str | None = file.metadata.string("tokenizer.chat_template", default=None)
        return source, f"{file.paths[0]}: tokenizer.chat_template", ModelError
    origin = f"--chat-template {config.chat_template}"
    try:
        return config.chat_template.read_text(encoding="utf-8"), origin, UsageError
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{origin}: {problem}", param="chat_template") from None
