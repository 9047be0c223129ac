"""What a command imports: nothing of the parts of Luce and of packages that only other commands need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = Path(__file__).parents[1] / "reference" / "qwen3-a-F32.gguf"
#: modules that `luce run` imported before models by name, several models, services and traces were there
BEFORE = 1292
REPORT = """
import sys
from luce.cli.main import main
status = main(sys.argv[1:])
print("\\n".join(["", "modules", *sorted(sys.modules)]))
sys.exit(status)
"""


def modules(*words: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    done = subprocess.run([sys.executable, "-c", REPORT, *words], capture_output=True, text=True, check=True)
    return set(done.stdout.partition("\nmodules\n")[2].split())


def test_a_run_imports_what_it_needs() -> None:
    words = ("run", str(MODEL), "hi", "--max-tokens", "1", "--devices", "cpu:0")
    # The first start on a machine compiles kernels.
    found = modules(*words)
    found = modules(*words) if "numba" in found else found
    packages = {name.partition(".")[0] for name in found}
    own = {".".join(name.split(".")[:2]) for name in found if name.startswith("luce.")}
    assert not packages & {"aiohttp", "prometheus_client", "opentelemetry", "huggingface_hub", "requests"}
    assert not packages & {"numba", "asyncio", "markdown_it", "pygments"}
    assert not own & {"luce.server", "luce.bench", "luce.systemd"}
    assert not {name for name in found if name.startswith("luce.cli.")} & {
        f"luce.cli.{verb}" for verb in ("serve", "service", "service_files", "top", "models", "version", "doctor")
    }
    assert len(found) <= BEFORE * 1.05


def test_the_version_and_the_help_import_no_model() -> None:
    for words in (("--version",), ("--help",)):
        assert not {name.partition(".")[0] for name in modules(*words)} & {"numpy", "aiohttp", "numba", "tokenizers"}
