"""The lists of files in CONTRIBUTING.md, one per kind of change, held against the tree and the code."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from luce.cli.main import VERBS
from luce.config.sampling import SAMPLERS
from luce.draft import spec as draft_spec
from luce.models.registry import FAMILIES
from luce.ops.matmul_int8 import INT8_TYPES
from luce.ops.weight import KERNEL_TYPES
from luce.runtime.device import DeviceKind
from luce.runtime.draws import Draw
from tests.support.quant_blocks import FORMATS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ADDING = dict(re.findall(r"^## Add an? ([\w ]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
#: what `X` stands for in the lists: a name that a change invents, of which the tree has several
EXAMPLES = {
    # A hyphen of a name is an underscore in the module's.
    "luce/models/X.py": [name.replace("-", "_") for name in FAMILIES],
    "luce/cli/X.py": VERBS,
    "luce/server/X.py": ("completions", "status", "cache", "props"),
    "luce/draft/X.py": ("ngram", "mtp", "small_model"),
    "luce/runtime/X.py": ("host", "gpu"),
    "tests/http/test_X.py": ("completions", "cache", "props"),
    "tests/unit/test_cli_X.py": ("bench", "cache", "doctor"),
}


def listed(kind: str) -> list[str]:
    """The files of the list of a kind of change: what stands before the colon of each item."""
    items = re.findall(r"^- (.*?):", ADDING[kind], re.MULTILINE)
    return [path for item in items for path in re.findall(r"`([^`]+)`", item)]


def variants(source: str) -> set[str]:
    """The values of QTYPE that a kernel is compiled for."""
    lines = re.findall(r"^// variants.*\bQTYPE=(\S+)", (ROOT / source).read_text(), re.MULTILINE)
    return {name for line in lines for name in line.split(",")}


def test_every_kind_of_change_has_a_list() -> None:
    assert set(ADDING) == {
        "family",
        "quant type",
        "sampler",
        "endpoint",
        "verb",
        "setting",
        "drafter",
        "device",
    }


@pytest.mark.parametrize("kind", ADDING)
def test_listed_files_exist(kind: str) -> None:
    files = [path for path in listed(kind) if "/" in path or path.endswith(".md")]
    assert files
    for path in files:
        for name in EXAMPLES[path] if "X" in path else [""]:
            assert (ROOT / path.replace("X", name)).exists(), path


def test_paths_in_the_text_exist() -> None:
    paths = set(re.findall(r"`((?:\w+|\.ci)/[\w./]+)`", PAGE)) - set(EXAMPLES)
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_a_family_is_a_file_and_a_line() -> None:
    assert listed("family")[:2] == ["luce/models/X.py", "luce/models/registry.py"]
    for name, spec in FAMILIES.items():
        assert spec.__module__ == f"luce.models.{name.replace('-', '_')}"


def test_a_quant_type_is_in_the_files_of_its_list() -> None:
    names = {kind.name for kind in KERNEL_TYPES}
    sources = {path: variants(path) for path in listed("quant type") if path.endswith(".cu")}
    floats, narrow = {"F32", "F16", "BF16"}, {kind.name for kind in INT8_TYPES}
    assert sources.pop("kernels/matmul_vec.cu") == names - narrow
    assert sources and all(found | floats == names for found in sources.values())
    for path in ("kernels/matmul_int8.cu", "kernels/moe_int8.cu", "kernels/moe_rows.cu"):
        assert f"`{path}`" in ADDING["quant type"] and variants(path) == narrow
    header = (ROOT / "kernels/quants.h").read_text()
    assert all(re.search(rf"\b{name}\b", header) for name in names - floats)
    assert floats | set(FORMATS) == names


def test_other_kernels_have_no_list_of_quant_types() -> None:
    mentioned = set(re.findall(r"`(kernels/\w+\.cu)`", ADDING["quant type"]))
    sources = {f"kernels/{path.name}" for path in (ROOT / "kernels").glob("*.cu")}
    assert {path for path in sources if variants(path)} <= mentioned


def test_a_sampler_touches_three_files_at_most() -> None:
    assert len(listed("sampler")) <= 3
    # The names are in these files alone: the others read the table. The list names more files for samplers of devices.
    of_draws = [field.name for field in fields(Draw) if field.name in SAMPLERS]
    assert sorted(of_draws) == ["min_p", "seed", "temperature", "top_k", "top_p"]
    for name in ("frequency_penalty", "min_p", "top_p"):
        assert name in SAMPLERS
        own = set(listed("sampler"))
        if name in of_draws:
            own |= set(re.findall(r"`(luce/[\w/]+\.py)`", ADDING["sampler"]))
        files = [p for p in (ROOT / "luce").rglob("*.py") if re.search(rf"\b{name}\b", p.read_text())]
        assert {str(p.relative_to(ROOT)) for p in files} <= own, name


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_a_module_with_its_own_arguments(verb: str) -> None:
    module = importlib.import_module(f"luce.cli.{verb}")
    assert list(inspect.signature(module.add_arguments).parameters) == ["parser"]
    assert len(inspect.signature(module.run).parameters) == 1


def test_drafters_with_weights_have_recipes() -> None:
    text = inspect.getsource(draft_spec)
    for path in sorted((ROOT / "luce/draft").rglob("*.py")):
        # The others wrap a drafter, or are what several share.
        if path.name not in ("ngram.py", "no_drafter.py", "on_demand.py", "open.py", "remote.py", "feature_drafter.py"):
            for name in re.findall(r"^class (\w+Drafter)\b(?!\(Protocol)", path.read_text(), re.MULTILINE):
                assert name in text, f"{path}: {name}"


def test_kinds_of_devices_are_in_the_files_of_their_list() -> None:
    kinds = set(DeviceKind.__args__)
    for path in ("luce/config/values.py",):
        assert path in listed("device")
        assert all(kind in (ROOT / path).read_text() for kind in kinds)
