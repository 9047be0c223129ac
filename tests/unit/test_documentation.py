"""The guide and the README held against the code: flags, metrics, endpoints, error codes, exit codes, commands; and the
messages of daemons in the internals."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import re
import shlex
from collections import defaultdict
from pathlib import Path

import msgspec
import msgspec.inspect
import pytest

from luce import errors
from luce.cli import main as cli
from luce.cli.arguments import settings
from luce.cli.repl.commands import COMMANDS
from luce.cluster.cluster_status import member_status
from luce.cluster.membership import Member
from luce.cluster.wire import Status
from luce.compress.compression_options import CompressionOptions
from luce.compress.compressor import Compressor
from luce.config.sampling import SAMPLERS
from luce.config.settings import FIELDS, flag
from luce.draft import messages as draft_messages
from luce.draft.ngram import NgramDrafter
from luce.gguf.reader import open_gguf
from luce.ipc import lifecycle
from luce.kvcache.disk.stats import DiskStats
from luce.models.keys import Source
from luce.models.registry import FAMILIES, read_spec
from luce.ops.weight import KERNEL_TYPES
from luce.remote import messages
from luce.server import messages_request, native_request, responses_request, schema
from luce.server.native_request import InfillRequest, NativeRequest
from tests.support.family_features import features
from tests.support.http_server import running
from tests.support.scorers import ScriptedScorer

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs/guide").glob("*.md"))
FOR_USERS = [ROOT / "README.md", *GUIDE]
#: pages about the tree as it is; the diary in docs/measurements has the names of its days
PAGES = [
    *(
        p
        for top in ("docs", "kernels", "luce", "models")
        for p in (ROOT / top).rglob("*.md")
        if p.parent.name != "measurements"
    ),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / ".ci/run",
]
#: flags of other programs, and of Luce's tools, that the guide shows
FOREIGN = {"--type", "--now", "--full", "--profile", "--settings", "--env-file"}


def page(name: str) -> str:
    """The text of a page of the guide."""
    return (ROOT / "docs/guide" / f"{name}.md").read_text()


def all_flags() -> set[str]:
    """Every flag of every verb."""
    found = set()
    for verb in cli.VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"luce.cli.{verb}").add_arguments(parser)
        found |= set(re.findall(r"--[a-z][a-z-]+", parser.format_usage() + parser.format_help()))
    return found


def words(text: str) -> set[str]:
    """What stands in backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def fields(kind: type) -> set[str]:
    """The fields of a request body."""
    return set(kind.__struct_fields__)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 130


def test_the_readme_lists_every_verb() -> None:
    assert set(re.findall(r"^\| `luce (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)) == set(cli.VERBS)


def cells(text: str, label: str) -> list[str]:
    """The cells of the first row of a table whose first cell begins with the label."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_figures_of_the_readme_are_those_of_the_measurements() -> None:
    performance = (ROOT / "docs/internals/performance.md").read_text()
    one, several = performance.partition("### Two to four H200")[::2]
    prompt, decode = cells(one, "27B, prompt 8192"), cells(one, "27B, decode")
    four = [cells(several, label)[cells(several, "| one GPU").index("four")] for label in ("prompt 8192", "decode")]
    shown = re.findall(r"^\| (?:Luce|best peer) \| .*", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in shown] == [
        ["Luce", prompt[1], decode[1], "1"],
        ["best peer", prompt[3], decode[3], "1"],
        ["Luce", *four, "4"],
    ]


@pytest.mark.parametrize("path", FOR_USERS, ids=lambda p: p.name)
def test_every_flag_that_is_shown_exists(path: Path) -> None:
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text()))
    # What other programs take is shown in their own commands.
    for line in re.findall(
        r"^ *(?:openssl|sudo|tools/|curl|echo|git|\.venv/bin/pip).*", path.read_text(), re.MULTILINE
    ):
        shown -= set(re.findall(r"--[a-z][a-z-]+", line))
    assert shown <= all_flags() | FOREIGN | {"--version"}


def commands(path: Path) -> list[str]:
    """The command lines of Luce in the shell blocks of a page."""
    blocks = re.findall(r"^ *```sh\n(.*?)```", path.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.partition(" #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r" (?:&&|\|) ", line)]
    return [match[1] for part in parts if (match := re.match(r"(?:[~.\w/-]+/)?luce (.+)", part))]


@pytest.mark.parametrize("path", FOR_USERS, ids=lambda p: p.name)
def test_commands_that_are_shown_are_valid(path: Path) -> None:
    for command in commands(path):
        arguments = cli.parse(shlex.split(command.replace("$(which python)", "python")))
        if arguments.verb not in ("shard", "pull", "doctor"):
            settings(arguments)


def test_the_guide_shows_commands() -> None:
    shown = {command.split()[0] for path in FOR_USERS for command in commands(path)}
    assert shown == set(cli.VERBS)


def test_every_flag_is_in_the_guide() -> None:
    text = "\n".join(path.read_text() for path in GUIDE)
    names = {name for f in FIELDS.values() for name in (flag(f.name), *(f"--{a}" for a in f.metadata["flags"]))}
    assert {name for name in names if not re.search(rf"{name}(?![\w-])", text)} == set()


def test_settings_lists_every_setting() -> None:
    assert {flag(name) for name in FIELDS} <= set(re.findall(r"--[a-z-]+", page("settings")))


def series(text: str) -> dict[str, tuple[str, set[str]]]:
    """The metrics of an answer in the Prometheus text format: type and names of labels."""
    found: dict[str, tuple[str, set[str]]] = {}
    for name, kind in re.findall(r"^# TYPE (luce_\w+) (\w+)$", text, re.MULTILINE):
        if not name.endswith("_created"):
            lines = re.findall(rf"^{name}(?:_count)?(?:{{(.*)}})? ", text, re.MULTILINE)
            labels = {label for line in lines for label in re.findall(r'(\w+)="', line)}
            found[name.removesuffix("_total")] = kind, labels
    return found


def compressor() -> Compressor:
    """Keeps a tenth of each prompt."""
    return Compressor(CompressionOptions("always", keep_ratio=0.1), ScriptedScorer, identity="a")


def cluster() -> Status:
    """A cluster with a member."""
    box = msgspec.structs.replace(
        member_status(Member("box", b"", "", "idle", 0.0), 1.0, None, (), None, None), round_trip_ms=1.0
    )
    return Status("home", (), epoch=2, open_tokens=0, streamed_bytes=10, replans={"start": 1}, members=(box,))


async def test_metrics_are_those_of_the_server() -> None:
    shown: dict[str, tuple[str, set[str]]] = {}
    for names, kind, labels in re.findall(r"^\| (`luce_[^|]+) \| (\w+) \| ([^|]*)\|", page("metrics"), re.MULTILINE):
        # A label may list its values behind a colon.
        named = set(re.findall(r"(?:^|; |, )`(\w+)`(?=[:,; ])", re.sub(r": (`\w+`(, )?)+", "", labels) + " "))
        shown |= dict.fromkeys(words(names), (kind, named))
    served: dict[str, tuple[str, set[str]]] = {}
    for model, options in (
        ({"drafter": NgramDrafter(block=7), "compressor": compressor()}, {"verify_width": 8, "cluster": cluster}),
        ({"context": 2048}, {"kvflash": "512", "kvflash_host_mb": 3}),
    ):
        async with running(model=model, **options) as here:
            await here.chat()
            served |= series((await here.get("/metrics"))[1])
    assert shown.keys() == served.keys()
    for name, (kind, labels) in served.items():
        assert shown[name][0] == kind, name
        # Without daemons and GPUs some metrics have no values.
        assert not labels or shown[name][1] == labels, name
    assert sum(bool(labels) for _, labels in served.values()) > 10
    check_dashboard(shown)


def check_dashboard(metrics: dict[str, tuple[str, set[str]]]) -> None:
    """Every query of the dashboard for Grafana is of samples that these metrics have, and of their labels."""
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    labels = {name + ending: found for name, (kind, found) in metrics.items() for ending in endings[kind]}
    dashboard = json.loads((ROOT / "docs/guide/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 15 and len(dashboard["panels"]) == len({panel["id"] for panel in dashboard["panels"]})
    for query in queries:
        named = re.findall(r"luce_\w+", query)
        assert named and set(named) <= labels.keys(), query
        known = set.union(*(labels[name] for name in named)) | {"instance", "le"}
        by = re.findall(r"\b(?:by|ignoring) \(([^)]+)\)", query)
        assert {label for group in by for label in group.split(", ")} <= known | {"kind"}, query
        assert set(re.findall(r"(\w+)=~?\"", query)) <= known, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
    (variable,) = [v for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert set(re.findall(r"luce_\w+", variable["query"]["query"])) <= labels.keys()


async def test_endpoints_are_those_of_the_server() -> None:
    shown = set()
    for row in re.findall(r"^\| (`(?:GET|POST|DELETE) [^|]+) \|", page("http-api"), re.MULTILINE):
        method = ""
        for word in re.findall(r"`([^`]+)`", row):
            method, path = word.split() if " " in word else (method, word)
            shown.add(f"{method} {path}")
    async with running() as here:
        served = set((await here.get("/props"))[1]["api"]["endpoints"])
    # Each path under /v1 is there without it too.
    assert shown == served - {e.replace("/v1", "") for e in served if "/v1" in e}


def key_paths(value: object, path: str = "") -> set[str]:
    """The keys of a JSON value, joined by dots; items of lists have the path of the list."""
    if isinstance(value, list):
        return set().union(*(key_paths(item, path) for item in value))
    if not isinstance(value, dict):
        return set()
    return set().union(*({f"{path}{key}", *key_paths(item, f"{path}{key}.")} for key, item in value.items()))


async def test_json_that_pages_name_is_what_the_server_shead_and_tail() -> None:
    model = {"drafter": NgramDrafter(block=7), "compressor": compressor(), "context": 8192}
    async with running(verify_width=8, model=model, compat=("lucebox",)) as here:
        reply = await here.chat("".join(map(chr, range(0x100, 0xA00))))
        held = await here.chat(guided_choice=["a"])
        drafted = await here.chat("to and fro " * 8, max_tokens=60, ignore_eos=True)
        bodies = [
            reply,
            drafted,
            *reply["choices"],
            *held["choices"],
            (await here.get("/props"))[1],
            (await here.get("/v1/cache"))[1],
        ]
    served = set().union(*map(key_paths, bodies)) | {f"tiers.disk.{f.name}" for f in dataclasses.fields(DiskStats)}
    roots = "runtime|speculative|tiers|finish_details|usage|timings"
    shown = {name for path in PAGES for name in re.findall(rf"`((?:{roots})\.[\w.]+)`", path.read_text())}
    assert shown
    assert shown - served == set()


#: by section of the page: the bodies that it describes, beside what all of them share
REQUESTS = {
    "Chat completions": (schema.ChatRequest,),
    "Completions": (schema.CompletionRequest,),
    "Responses": (responses_request.ResponsesRequest,),
    "Messages": (messages_request.MessagesRequest,),
    "Completion and infill": (NativeRequest, InfillRequest),
    "Tokens": (schema.DetokenizeRequest,),
}


def sections() -> dict[str, str]:
    """The page of the HTTP API by its headings."""
    return dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page("http-api"), re.MULTILINE | re.DOTALL))


def parts(text: str) -> set[str]:
    """The names in backticks, also those inside another: `a.b`, `{"c": 1}`."""
    return {part for word in words(text) for part in re.findall(r"\w+", word)}


def nested(kind: msgspec.inspect.Type, seen: set[type]) -> set[str]:
    """The names of all fields of a body, and of the objects in it."""
    found: set[str] = set()
    if isinstance(kind, msgspec.inspect.StructType) and kind.cls not in seen:
        seen.add(kind.cls)
        found = {field.encode_name for field in kind.fields}
    inside = [getattr(kind, name) for name in ("item_type", "value_type") if hasattr(kind, name)]
    inside += getattr(kind, "types", ()) or getattr(kind, "item_types", ())
    inside += [field.type for field in getattr(kind, "fields", ()) if found]
    return found.union(*(nested(item, seen) for item in inside))


@pytest.mark.parametrize("heading", REQUESTS)
def test_fields_of_requests_are_in_the_section_of_their_endpoint(heading: str) -> None:
    found = sections()
    shared = found["Fields of both endpoints"] + found["What Luce refuses"]
    named = parts(found[heading] + shared + page("prefix-cache") + page("structured-output"))
    for kind in REQUESTS[heading]:
        assert nested(msgspec.inspect.type_info(kind), set()) - named == set()


#: of a body in pieces: those that are checked one by one
ITEMS = {
    "Responses": (
        responses_request.MessageItem,
        responses_request.ReasoningItem,
        responses_request.FunctionCallItem,
        responses_request.CustomCallItem,
        responses_request.LocalShellCallItem,
        responses_request.OutputItem,
        responses_request.FunctionTool,
        responses_request.CustomTool,
        responses_request.NamespaceTool,
    )
}


def test_fields_of_items_and_tools_are_in_the_section_of_their_endpoint() -> None:
    for heading, kinds in ITEMS.items():
        for kind in kinds:
            assert nested(msgspec.inspect.type_info(kind), set()) - parts(sections()[heading]) == set(), kind


def test_no_body_of_a_request_is_left_out_of_the_page() -> None:
    seen: set[type] = set()
    for kind in (*sum((*REQUESTS.values(), *ITEMS.values()), ()), schema.TokenizeRequest, schema.NamedModel):
        nested(msgspec.inspect.type_info(kind), seen)
    reached = {base for kind in seen for base in kind.__mro__}
    for module in (schema, responses_request, messages_request, native_request):
        kinds = {kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
        assert kinds - reached == set(), module.__name__


def test_tokenize_takes_what_the_page_says() -> None:
    own = fields(schema.TokenizeRequest) - fields(schema.ChatRequest)
    assert own <= parts(sections()["Tokens"])


def test_fields_that_the_page_names_exist() -> None:
    kinds = [*sum(REQUESTS.values(), ()), schema.TokenizeRequest]
    known = set().union(*(nested(msgspec.inspect.type_info(kind), set()) for kind in kinds))
    known |= {alias for sampler in SAMPLERS.values() for alias in sampler.aliases}
    # Members of objects that pass through, places in lists, and paths.
    known |= {"user_id", "thinking_budget", "i", "j", "v1", "tokenize", "infill"}
    for heading in (*REQUESTS, "Fields of both endpoints", "What Luce refuses"):
        tables = re.findall(
            r"^\| (?:field|`/v1/tokenize`) \|.*\n\|---.*\n((?:\|.*\n)+)", sections()[heading], re.MULTILINE
        )
        assert tables, heading
        for row in "".join(tables).splitlines():
            assert parts(row.split(" | ")[0]) - known == set(), heading


def test_versions_of_clients_are_those_that_the_tests_install() -> None:
    lists = ROOT / "tools/clients"
    pinned = set(json.loads((lists / "package.json").read_text())["dependencies"].values())
    for path in lists.glob("*.txt"):
        if not path.stem.endswith(".hashes"):
            pinned |= set(re.findall(r"^[^#\s]+==([\d.]+)", path.read_text(), re.MULTILINE))
    tried = re.findall(r"^Tried with (.*?)(?=\n\n|\Z)", page("clients"), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"\b\d+(?:\.\d+)+\b", " ".join(tried))) == pinned


def test_other_names_of_samplers_are_in_the_guide() -> None:
    assert {alias for sampler in SAMPLERS.values() for alias in sampler.aliases} <= parts(page("http-api"))


def error_codes() -> set[str]:
    """Every `code` of an error that a request can get."""
    found = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "status")}
    for path in (ROOT / "luce").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                found.add(node.value.value)
    return {code for code in found if code}


def test_error_codes_are_in_the_guide() -> None:
    assert error_codes() - words(page("http-api")) == set()


def test_statuses_of_errors_are_in_the_guide() -> None:
    shown = set(re.findall(r"^\| (\d{3}) \| `", page("http-api"), re.MULTILINE))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LuceError)]
    assert shown == {str(kind.status) for kind in kinds}


def test_exit_codes_are_those_of_the_errors() -> None:
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", page("exit-codes"), re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LuceError)]
    assert shown == {kind.exit_code for kind in kinds} | {0, 130, 141}


def test_the_unit_does_not_restart_what_the_guide_says() -> None:
    unit = (ROOT / "systemd/luce.service").read_text()
    assert re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE) == ["2 3"]
    assert "every failure but 2 and 3" in page("exit-codes")


def test_commands_of_the_chat_are_in_the_guide() -> None:
    shown = set(re.findall(r"`(/\w+|/\?)", page("chat")))
    assert set(COMMANDS) <= shown


def test_families_and_types_are_in_the_guide() -> None:
    text = page("models").partition("## What runs")[2]
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) == set(FAMILIES)
    named = set(
        re.findall(
            r"\b(?:[IT]?Q\d\w*|B?F\d+|(?:MX|NV)FP\d+)\b", text.partition("Tensor types:")[2].partition("are used as")[0]
        )
    )
    assert named == {kind.name for kind in KERNEL_TYPES}


def test_features_of_families_are_those_of_their_reference_files() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests" / "reference").glob("*-*.gguf"):
        with open_gguf(path) as file:
            family = file.metadata.string("general.architecture")
            if family in FAMILIES:
                found[family] |= set(features(read_spec(Source(str(path), file.metadata, file.tensors))))
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| (.*) \|$", page("models").partition("## What runs")[2], re.MULTILINE)
    named = {family: set() if text == "-" else set(text.split(", ")) for family, text in rows}
    # Experts come with Mixtral's files alone, of which none is among the reference files.
    assert named.pop("llama") == {"experts (Mixtral)"} and not found.pop("llama")
    assert named == found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_that_pages_name_exist(path: Path) -> None:
    # X and NAME stand for a name that a change invents.
    found = re.findall(
        r"(?<![\w./~-])((?:luce|kernels|tests|tools|docs|models|systemd)/[\w./-]*\w/?)", path.read_text()
    )
    named = {name for name in found if not re.search(r"\bX\b|_X\b|NAME", name)}
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_messages_of_daemons_are_those_of_the_code() -> None:
    text = (ROOT / "docs/internals/remote-shards.md").read_text()
    table = text.partition("| message | response |")[2].partition("\n\n")[0]
    shown = {name for row in re.findall(r"^\| (\w+) \| (\w*) ?\|", table, re.MULTILINE) for name in row}
    values = [value for module in (lifecycle, messages, draft_messages) for value in vars(module).values()]
    kinds = (kind for kind in values if isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    assert shown - {"", "any"} == {kind.__name__ for kind in kinds if kind.__struct_config__.tag}


def test_messages_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    texts = [
        node.value
        for path in (ROOT / "luce").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for quoted in re.findall(r'\*\*"([^"]+)"|, "([^"]+)"\.\*\*', page("troubleshooting")):
        # Names of devices and values are filled in.
        for part in re.split(r"\.\.\.|\bcuda\b", "".join(quoted)):
            assert any(part.strip() in text for text in texts), part
