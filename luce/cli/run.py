"""`luce run MODEL PROMPT`: one prompt, one reply on standard output, everything else on standard error."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from luce.api import Model
from luce.assembly import open_model
from luce.cli import options, progress
from luce.cli.arguments import LOADED, add_json, add_model, add_settings, settings
from luce.cli.markdown import printable
from luce.cli.pull import fetch
from luce.config.settings import Config, flag
from luce.errors import UsageError

#: groups of the settings that this verb takes
SETTINGS = (*LOADED, "sampling")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, PROMPT, the request's values and the flags of the settings."""
    add_model(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the prompt; text from standard input is added to it"
    )
    parser.add_argument("-s", "--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "-o", "--option", metavar="K=V", action="append", default=[], help="sampling value (repeatable)"
    )
    parser.add_argument(
        "-n", "--max-tokens", metavar="N", help="longest reply in tokens (default: until the context is full)"
    )
    parser.add_argument("--seed", metavar="N", help="seed of the random choices (default: random)")
    parser.set_defaults(behind_flags="prompt")
    add_json(parser)
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Generate the reply. The exit status is 130 if Ctrl-C ended it."""
    config, sampling = _checked(arguments)
    prompt = _prompt(arguments)
    path = fetch(arguments.model)
    with progress.shown(f"loading {path.name}") as wait:
        model = open_model(path, config, wait.share)
    with model:
        return _reply(model, prompt, arguments, sampling)


def _checked(arguments: argparse.Namespace) -> tuple[Config, dict[str, Any]]:
    """The Config, and the keywords of Model.generate. Raises one UsageError that holds every problem."""
    problems: list[UsageError] = []
    config, sampling = Config(), {}
    try:
        config = settings(arguments)
    except UsageError as error:
        problems.append(error)
    try:
        sampling = options.parse_pairs(arguments.option)
    except UsageError as error:
        problems.append(error)
    for name in ("max_tokens", "seed"):
        text = getattr(arguments, name)
        if text is not None:
            try:
                sampling[name] = options.parse(name, text, flag(name))
            except UsageError as error:
                problems.append(error)
    options.raise_together(problems)
    return config, sampling


def _prompt(arguments: argparse.Namespace) -> str:
    parts = [arguments.prompt] if arguments.prompt is not None else []
    if not sys.stdin.isatty():
        piped = sys.stdin.read()
        if piped.strip():
            parts.append(piped)
    if not parts:
        raise UsageError("PROMPT: missing; give a prompt or pipe one in", param="prompt")
    return "\n\n".join(parts)


def _reply(model: Model, prompt: str, arguments: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Print the reply. A model without a chat template continues the prompt unchanged."""
    shown = printable if sys.stdout.isatty() else str
    with progress.shown("reading the prompt", unit="tokens") as wait:
        ids: str | list[int] = prompt
        if model.chat.template is not None or arguments.system:
            messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
            ids = model.chat.prompt([*messages, {"role": "user", "content": prompt}])
        generation = model.generate(ids, on_progress=wait.update, **sampling)
        begun = False
        try:
            for token in generation:
                if arguments.json:
                    wait.end()
                    print(json.dumps({"event": "token", "id": token.id, "text": token.text}), flush=True)
                elif token.text:
                    wait.end()
                    begun = not token.text.endswith("\n")
                    print(shown(token.text), end="", flush=True)
        except KeyboardInterrupt:
            if begun:
                # The shell's prompt begins a line of its own.
                print(flush=True)
            raise
    finish = generation.finish
    assert finish is not None
    if arguments.json:
        timings = finish.timings
        end = {
            "event": "end",
            "reason": finish.reason.value,
            "text": finish.text,
            "seed": finish.seed,
            "prompt_tokens": timings.prompt_tokens,
            "predicted_tokens": timings.predicted_tokens,
            "prompt_seconds": timings.prompt,
            "predicted_seconds": timings.predicted,
        }
        print(json.dumps(end))
    else:
        print(shown(finish.text))
    return 0
