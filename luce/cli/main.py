"""Parser and dispatch. Only the module of the verb that runs is imported, so that `luce --help` stays quick."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from luce.cli import streams
from luce.cli.streams import OutputError
from luce.config.suggest import nearest
from luce.errors import LuceError, UsageError
from luce.text.collector import COLLECTOR_OFF

#: each verb and its line in `luce --help`; luce.cli.VERB has its `add_arguments(parser)` and `run(arguments)`
VERBS = {
    "serve": "serve a model over HTTP",
    "chat": "talk with a model",
    "run": "answer one prompt and exit",
    "inspect": "show the contents of a model file and the placement of its layers",
    "plan": "predict how fast placements of a model are, and find the fastest",
    "bench": "measure how fast a model runs on this machine",
    "cache": "list, check and remove the prompts that are cached on disk",
    "pull": "download a model",
    "models": "list the models on this machine, or models to begin with",
    "rm": "remove models that were downloaded",
    "connect": "set up another program for a running server",
    "service": "install a systemd service, or remove it",
    "shard": "hold layers for a server in another process",
    "join": "lend this machine's devices to a server on another machine",
    "cluster": "show the machines that have joined a server, and let more join",
    "ray": "run copies of a model on many machines, with Ray",
    "top": "show what a running server does",
    "doctor": "show drivers, devices and kernel builds of this machine, and problems with them",
}
#: verbs that write nothing that their user reads on standard output
_WITHOUT_OUTPUT = ("serve", "shard", "join")


#: by verb, a command line that its help shows
EXAMPLES = {
    "serve": "luce serve smollm2 --max-ctx 4k --port 8080",
    "chat": "luce chat smollm2 --temperature 0",
    "run": "git log -5 | luce run smollm2 'Summarise these commits.' -n 100",
    "inspect": "luce inspect smollm2 --devices cpu:0,cpu:1",
    "plan": "luce plan smollm2 --devices cpu:0,cpu:1",
    "bench": "luce bench smollm2 -p 512,2k -n 128",
    "cache": "luce cache ls",
    "pull": "luce pull ORG/REPO:Q4_K_M",
    "models": "luce models --recommended",
    "rm": "luce rm ORG/REPO:Q4_K_M",
    "connect": "luce connect opencode --write",
    "service": "luce service install --user --model smollm2",
    "shard": "luce shard model.gguf --listen 0.0.0.0:5005 --key-file shard.pem",
    "join": "luce join --cluster home --model-dir /srv/models",
    "cluster": "luce cluster status",
    "ray": "luce ray up ray.toml",
    "top": "luce top --server http://127.0.0.1:8080",
    "doctor": "luce doctor",
}
#: flags of other programs and what they are called here
_ELSEWHERE = {
    "-c": "--max-ctx",
    "--ctx-size": "--max-ctx",
    "--num-ctx": "--max-ctx",
    "--max-model-len": "--max-ctx",
    "--context-length": "--max-ctx",
    "-t": "--threads",
    "--tensor-split": "--layer-split",
    "-ngl": "--target-device",
    "--n-gpu-layers": "--target-device",
    "--n-predict": "--max-tokens",
    "--prefill-skip-park": "--draft-residency persistent",
    "--disk-prefix-cache-compress": "--prefill-freeze",
    **{f"--reasoning-effort-{name}": "--effort" for name in ("low", "medium", "high", "x-high", "max")},
}
#: flags of other programs for what is not done here
_NOWHERE = {
    f"--prefill-upstream-{name}": "compressed prompts go to no other server" for name in ("base", "key", "model")
}
#: settings that the short help shows
_COMMON = {
    "config",
    "target_device",
    "target_devices",
    "max_ctx",
    "parallel",
    "threads",
    "draft",
    "kv_cache_dir",
    "temperature",
    "host",
    "port",
    "api_key_file",
}


class _Help(argparse.Action):
    """--help shows the common flags, --help all shows all."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        assert isinstance(parser, _Parser)
        if values not in (None, "all"):
            parser.error(f"--help {values}: expected --help or --help all")
        print(parser.format_help() if values else parser.format_short_help(), end="")
        parser.exit()


class _Version(argparse.Action):
    """--version."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        # What the line needs takes longer than a whole start of another command.
        from luce.cli.version import version_line

        print(version_line())
        parser.exit()


class _Parser(argparse.ArgumentParser):
    #: a command line for the help
    example = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags."""
        return tuple(self._option_string_actions)

    def format_short_help(self) -> str:
        """The arguments of the verb, its own flags, and the settings that most people use."""
        from luce.config.settings import FIELDS

        # Only flags of settings have no default here. A verb's own flag may have the name of a setting.
        settings = {a.dest for a in self._actions if a.dest in FIELDS and a.default is argparse.SUPPRESS}
        flags = [a for a in self._actions if a.option_strings and (a.dest not in settings or a.dest in _COMMON)]
        rest = sum(bool(a.option_strings) for a in self._actions) - len(flags)
        operands = [a for a in self._actions if not a.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(None, operands, [], f"usage: {self.prog} [FLAG...] ")
        formatter.add_text(self.description)
        formatter.add_text(f"example: {self.example}")
        for title, actions in (("arguments", operands), ("flags", flags)):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        if rest:
            formatter.add_text(f"`{self.prog} --help all` shows {rest} more flag{'s' if rest > 1 else ''}.")
        # argparse puts its own name of the program behind ours, with or without operands.
        return formatter.format_help().replace(f"{self.prog} [FLAG...] {self.prog}", f"{self.prog} [FLAG...]", 1)

    def error(self, message: str) -> NoReturn:
        """One line: the usage of a verb has sixty."""
        self.exit(UsageError.exit_code, f"luce: {message} ({self.prog} --help tells more)\n")


def _parsers(verb: str) -> tuple[_Parser, _Parser]:
    """The parser of a command line whose verb is `verb`, which knows only the names of the other verbs, and that of the
    verb."""
    top = _Parser(
        prog="luce",
        description="A local LLM server that splits one GGUF model over devices that need not match.",
        epilog="example: luce chat smollm2. `luce VERB --help` shows its common flags, `luce VERB --help all` all; "
        "`luce --help all` shows all of every verb.",
    )
    top.add_argument("--version", action=_Version, nargs=0, help="show version, commit and extras, and exit")
    found = top
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in VERBS.items():
        sub = verbs.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False, add_help=False
        )
        if name == verb:
            sub.example = EXAMPLES[name]
            sub.add_argument(
                "-h", "--help", action=_Help, nargs="?", metavar="all", help="show the common flags, or all"
            )
            importlib.import_module(f"luce.cli.{name}").add_arguments(sub)
            found = sub
    return top, found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A parsed command line. Raises UsageError for arguments that the verb does not take, SystemExit behind a help.

    argparse fills the positionals of a verb before its flags and leaves over those that stand behind flags. A verb
    names the one of its positionals that may stand there with `parser.set_defaults(behind_flags=NAME)`.
    """
    if list(argv) in (["--help", "all"], ["-h", "all"]):
        texts = [_parsers("")[0].format_help(), *(_parsers(verb)[1].format_help() for verb in VERBS)]
        print("\n\n".join(texts), end="")
        raise SystemExit(0)
    verb = _verb(argv)
    if verb and verb not in VERBS:
        raise UsageError(f"{verb}: no such verb{nearest(verb, VERBS)} (luce --help tells more)")
    top, sub = _parsers(verb)
    arguments, unknown = top.parse_known_args(argv)
    if unknown and not any(word.startswith("-") for word in unknown):
        name = getattr(arguments, "behind_flags", "")
        value = getattr(arguments, name, "")
        if isinstance(value, list):
            setattr(arguments, name, [*value, *unknown])
            unknown = []
        elif value is None:
            setattr(arguments, name, unknown.pop(0))
    if unknown:
        flag = unknown[0].partition("=")[0]
        meant = f"; did you mean {_ELSEWHERE[flag]}?" if flag in _ELSEWHERE else nearest(flag, sub.flags)
        meant = f": {_NOWHERE[flag]}" if flag in _NOWHERE else meant
        raise UsageError(f"{' '.join(unknown)}: unknown{meant} (luce {arguments.verb} --help tells more)")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status of a LuceError is its class's, after one line on standard error."""
    alone = argv is None
    argv = sys.argv[1:] if argv is None else argv
    with streams.checked(needed=_verb(argv) not in _WITHOUT_OUTPUT) as check_output:
        try:
            check_output()
            status = _run(argv, alone=alone)
            check_output()
        except LuceError as error:
            print(f"luce: {error}", file=sys.stderr)
            return error.exit_code
        except OutputError as error:
            if not error.silent:
                print(f"luce: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            return 130
    return status


def _run(argv: Sequence[str], *, alone: bool) -> int:
    """`alone`: the process is there for this command."""
    # Imports leave no cycles to collect. Without the collector `luce run` took 1.9 s where it took 2.1.
    with COLLECTOR_OFF:
        try:
            arguments = parse(argv)
        except SystemExit as ended:  # --help, --version
            return int(ended.code or 0)
        verb = "plan" if getattr(arguments, "dry_run", False) else arguments.verb
        module = importlib.import_module(f"luce.cli.{verb}")
        if alone:
            # It would be looked through as soon as the collector is on again: 35 ms.
            gc.freeze()
    status: int = module.run(arguments)
    return status


def _verb(argv: Sequence[str]) -> str:
    """The verb of a command line, empty if there is none."""
    return next((word for word in argv if not word.startswith("-")), "")
