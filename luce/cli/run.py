"""`luce run MODEL PROMPT`: one prompt, one reply on standard output, everything else on standard error."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import Any

from rich.console import Console

from luce.api import Model
from luce.assembly import open_model
from luce.cli import options, progress
from luce.cli.arguments import LOADED, add_json, add_model, add_reply, add_settings, settings
from luce.cli.plain_writer import PlainThoughts, PlainWriter, ThoughtWriter
from luce.cli.pull import fetch
from luce.cli.repl.attachments import path_of, schema_format
from luce.cli.repl.model_replier import ModelReply, check_format, reasoning_request, template_variables
from luce.cli.repl.replier import Request, Thinking
from luce.config.environment import environment
from luce.config.settings import Config
from luce.errors import UsageError
from luce.text.reasoning import Delta

#: groups of the settings that this verb takes
SETTINGS = (*LOADED, "sampling", "reasoning")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, PROMPT, the request's values and the flags of the settings."""
    add_model(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the prompt; text from standard input is added to it"
    )
    parser.add_argument("-s", "--system", metavar="TEXT", help="system message")
    add_reply(parser)
    parser.add_argument("--schema", metavar="FILE", help="JSON schema that the reply follows")
    parser.set_defaults(behind_flags="prompt")
    parser.add_argument(
        "--think",
        metavar="VALUE",
        default="",
        help="as in luce chat: on, off, low, ..., a budget, show or hide",
    )
    add_json(parser)
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Generate the reply. The exit status is 130 if Ctrl-C ended it."""
    config, sampling, thinking = _checked(arguments)
    prompt = _prompt(arguments)
    path = fetch(arguments.model, config)
    with progress.shown(f"loading {path.name}") as wait:
        model = open_model(path, config, wait.share)
    # What the reply leaves is collected; the model stays until the process ends, and is not looked at again and again.
    gc.freeze()
    with model:
        return _reply(model, prompt, arguments, Request(sampling, thinking.think), fold=not thinking.shown)


def _checked(arguments: argparse.Namespace) -> tuple[Config, dict[str, Any], Thinking]:
    """The Config, the keywords of Model.generate, and --think. Raises one UsageError that holds every problem."""
    problems: list[UsageError] = []
    config, sampling, thinking = Config(), {}, Thinking()
    try:
        config = settings(arguments)
    except UsageError as error:
        problems.append(error)
    if arguments.schema is not None:
        try:
            sampling["response_format"] = schema_format(path_of(arguments.schema, "--schema"), "--schema")
        except UsageError as error:
            problems.append(error)
    try:
        sampling |= options.parse_flags(arguments)
    except UsageError as error:
        problems.append(error)
    if arguments.think:
        try:
            thinking = thinking.changed(arguments.think, "--think")
        except UsageError as error:
            problems.append(error)
    options.raise_together(problems)
    return config, sampling, thinking


def _prompt(arguments: argparse.Namespace) -> str:
    parts = [arguments.prompt] if arguments.prompt is not None else []
    if not sys.stdin.isatty():
        piped = sys.stdin.read()
        if piped.strip():
            parts.append(piped)
    if not parts:
        raise UsageError("PROMPT: missing; give a prompt or pipe one in", param="prompt")
    return "\n\n".join(parts)


def _reply(model: Model, prompt: str, arguments: argparse.Namespace, asked: Request, *, fold: bool) -> int:
    """Print the reply. A model without a chat template continues the prompt unchanged."""
    template = model.chat.template
    reasoning = reasoning_request(model, asked.think, "--think")
    check_format(model, asked.sampling.get("response_format"), f"--schema {arguments.schema}")
    with progress.shown("reading the prompt", unit="tokens") as wait:
        ids: str | list[int] = prompt
        splitter, messages = None, []
        if template is None and arguments.system:
            raise UsageError("--system: the model file has no chat template; leave it out, or set --chat-template")
        if template is not None:
            messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
            variables = template_variables(model.chat, reasoning)
            messages = [*messages, {"role": "user", "content": prompt}]
            ids = model.chat.prompt(messages, **variables)
            splitter = model.chat.splitter(ids)
        generation = model.generate(
            ids,
            messages=messages,
            reasoning_budget=model.envelope.budget(reasoning),
            split=splitter is not None,
            on_progress=wait.update,
            **asked.sampling,
        )
        reply = ModelReply(generation, splitter, prompt=None if isinstance(ids, str) else len(ids))
        if arguments.json:
            rest = _print_tokens(reply, wait)
        else:
            _print_text(reply, wait, _thought_writer(fold=fold))
            return 0
    finish = generation.finish
    assert finish is not None
    timings = finish.timings
    end = {
        "event": "end",
        "reason": finish.reason.value,
        "text": rest.content,
        "reasoning": rest.reasoning,
        "seed": finish.seed,
        "prompt_tokens": timings.prompt_tokens,
        "predicted_tokens": timings.predicted_tokens,
        "prompt_seconds": timings.prompt,
        "predicted_seconds": timings.predicted,
    }
    print(json.dumps(end))
    return 0


def _print_tokens(reply: ModelReply, wait: progress.Wait) -> Delta:
    """Print one JSON object per token. Returns the text behind the last one."""
    for delta in reply:
        wait.end()
        if reply.token is None:
            return delta
        event = {"event": "token", "id": reply.token.id, "text": delta.content, "reasoning": delta.reasoning}
        print(json.dumps(event), flush=True)
    return Delta("")


def _print_text(reply: ModelReply, wait: progress.Wait, thoughts: ThoughtWriter | None) -> None:
    writer = PlainWriter(sys.stdout, thoughts, raw=not sys.stdout.isatty())
    try:
        for delta in reply:
            if any(delta):
                wait.end()
            if delta.reasoning:
                writer.reason(delta.reasoning)
            if delta.content:
                writer.write(delta.content)
    finally:
        # Also after Ctrl+C: the shell's prompt begins a line of its own.
        writer.end()


def _thought_writer(*, fold: bool) -> ThoughtWriter | None:
    """Writes the reasoning on standard error, as in luce chat; None: nowhere."""
    console = Console(stderr=True, highlight=False, markup=False)
    if console.is_terminal and not console.is_dumb_terminal and environment("NO_COLOR") is None:
        return _LateThoughts(console, fold=fold)
    return None if fold else PlainThoughts(sys.stderr)


class _LateThoughts:
    """A MarkdownWriter from the first reasoning on: its libraries take 30 ms, and many replies have none."""

    def __init__(self, console: Console, *, fold: bool) -> None:
        self._console, self._fold = console, fold
        self._writer: ThoughtWriter | None = None

    def reason(self, text: str) -> None:
        """Show more of the reasoning."""
        if self._writer is None:
            from luce.cli.markdown import MarkdownWriter

            self._writer = MarkdownWriter(self._console, fold=self._fold)
        self._writer.reason(text)

    def end_reasoning(self) -> None:
        """As that of the writer."""
        if self._writer is not None:
            self._writer.end_reasoning()
