"""Opens the chat format of a model."""

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
from luce.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def start_template(opened: contextlib.ExitStack) -> TemplateChild | None:
    """The process of a template, before its file is read: its interpreter takes 0.1 s to start. `opened` ends it.

    None if it cannot be started, which open_chat raises if there is a template.
    """
    with contextlib.suppress(OSError):
        child = TemplateChild()
        opened.callback(child.end)
        return child
    return None


def open_chat(
    opened: contextlib.ExitStack,
    file: GGUFFile,
    spec: ModelSpec,
    config: Config,
    tokenizer: Tokenizer,
    child: TemplateChild | None,
) -> ChatFormat:
    """The chat format of --chat-template or of the file; `opened` closes the template. `child`: of start_template.

    Raises UsageError for the flag's template, an unknown --tool-format or a --reasoning that the template cannot do,
    ModelError for the file's template.
    """
    source, origin, error = _template(file, config)
    template: ChatTemplate | None = None
    if source is not None:
        bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
        template = ChatTemplate(source, bos=bos, eos=eos, origin=origin, error=error, child=child)
        opened.callback(template.close)
    elif child is not None:
        child.end()
    try:
        chat = ChatFormat(template, tokenizer, spec.dialect, config.tool_format)
    except ValueError as problem:
        raise UsageError(f"{flag('tool_format')} {config.tool_format}: {problem}", param="tool_format") from None
    check_default(config.reasoning, chat)
    if (mismatch := call_mismatch(chat)) is not None:
        _log.warning("tool calls in the format %s (from %s): %s", chat.calls.format, chat.calls_why, mismatch)
    return chat


def _template(file: GGUFFile, config: Config) -> tuple[str | None, str, type[LuceError]]:
    """The source of the template, what an error names, and the error's class."""
    if config.chat_template is None:
        source: str | None = file.metadata.string("tokenizer.chat_template", default=None)
        return source, f"{file.paths[0]}: tokenizer.chat_template", ModelError
    origin = f"--chat-template {config.chat_template}"
    try:
        return config.chat_template.read_text(encoding="utf-8"), origin, UsageError
    except OSError as problem:
        raise UsageError(f"{origin}: {problem.strerror}", param="chat_template") from None
    except UnicodeDecodeError as problem:
        raise UsageError(f"{origin}: {problem}", param="chat_template") from None
