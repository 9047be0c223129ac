"""Text and code from Debian packages, the tokenizer, and both as one compressed file.

Every package below has licences that allow redistribution of derived works. Only files with the given suffixes are
read, so a GPL `debian/` directory or a bundled C library of another licence is not.
"""

from __future__ import annotations

import hashlib
import html.parser
import io
import lzma
import re
import subprocess
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

VOCAB = 4096
#: Special tokens, at the end of the vocabulary as in published Qwen files; True for control tokens.
SPECIALS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|mask|>": True,
    "<think>": False,
    "</think>": False,
    "<tool_call>": False,
    "</tool_call>": False,
}
END = "<|endoftext|>"
MASK = "<|mask|>"
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Qwen3.5's pre-tokenizer: contractions, words with combining marks, single digits, punctuation runs, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Package:
    """A Debian package: the suffixes of the files to read, their licence, and the most MB to read."""

    name: str
    licence: str
    suffixes: tuple[str, ...] = (".py",)
    cap_mb: float = 6.0


PACKAGES = (
    Package("libpython3.11-stdlib", "PSF-2.0"),
    Package("libpython3.11-testsuite", "PSF-2.0", cap_mb=12),
    Package("python3.11-doc", "PSF-2.0", (".rst.txt",), 12),
    Package("python3-aiohttp", "Apache-2.0"),
    Package("python3-dask", "BSD-3-Clause"),
    Package("python3-distributed", "BSD-3-Clause"),
    Package("python3-django", "BSD-3-Clause"),
    Package("python-django-doc", "BSD-3-Clause", (".html",), 7),
    Package("python3-flask", "BSD-3-Clause"),
    Package("python3-ipython", "BSD-3-Clause"),
    Package("python3-jinja2", "BSD-3-Clause"),
    Package("python3-matplotlib", "Matplotlib (PSF based)"),
    Package("python3-mpmath", "BSD-3-Clause"),
    Package("python3-mypy", "MIT"),
    Package("python3-networkx", "BSD-3-Clause"),
    Package("python3-numpy", "BSD-3-Clause"),
    Package("python3-pandas", "BSD-3-Clause", cap_mb=8),
    Package("python3-pygments", "BSD-2-Clause", cap_mb=2),
    Package("python3-pytest", "MIT"),
    Package("python3-scipy", "BSD-3-Clause", cap_mb=8),
    Package("python3-scrapy", "BSD-3-Clause"),
    Package("python3-setuptools", "MIT"),
    Package("python3-sklearn", "BSD-3-Clause", cap_mb=8),
    Package("python3-sphinx", "BSD-2-Clause"),
    Package("python3-sqlalchemy", "MIT"),
    Package("python3-statsmodels", "BSD-3-Clause"),
    Package("python3-sympy", "BSD-3-Clause", cap_mb=8),
    Package("python3-tornado", "Apache-2.0"),
    Package("python3-twisted", "MIT", cap_mb=8),
    Package("python3-werkzeug", "BSD-3-Clause"),
    Package("python3-xarray", "Apache-2.0"),
    Package("postgresql-doc-15", "PostgreSQL", (".html",), 8),
    Package("golang-1.19-src", "BSD-3-Clause", (".go",), 10),
)
# One file in this many is held out, chosen by a hash of its path.
_HELD_OUT = 50


class _Text(html.parser.HTMLParser):
    """The visible text of a page's body."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "head", "nav")
        if tag in ("p", "div", "li", "br", "tr", "h1", "h2", "h3"):
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "head", "nav")

    def handle_data(self, data: str) -> None:
        if self._hidden <= 0:
            self.parts.append(data)


def _plain(text: str) -> str:
    page = _Text()
    page.feed(text)
    lines = (line.rstrip() for line in "".join(page.parts).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _good(text: str) -> bool:
    """Whether a file is readable prose or code: no tables of numbers, no minified or binary text."""
    if not 400 <= len(text) <= 200_000:
        return False
    lines = text.count("\n") + 1
    digits = sum(map(text.count, "0123456789"))
    return len(text) < 90 * lines and digits < 0.12 * len(text) and len(text.encode()) < 1.02 * len(text)


def fetch(folder: Path) -> None:
    """Download and unpack the packages: `folder/NAME` is the tree of package NAME."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [package.name for package in PACKAGES if not (folder / package.name).is_dir()]
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=folder, check=True)
    for file in folder.glob("*.deb"):
        target = folder / file.name.partition("_")[0]
        if not target.is_dir():
            subprocess.run(["dpkg-deb", "-x", file, target], check=True)


def documents(folder: Path) -> Iterator[tuple[Package, str, str]]:
    """(package, path, text) of every good file, each text once, in a fixed order."""
    seen: set[bytes] = set()
    for package in PACKAGES:
        left = package.cap_mb * 1e6
        files = [f for f in (folder / package.name).rglob("*") if f.name.endswith(package.suffixes)]
        keyed = sorted((hashlib.sha256(str(f.relative_to(folder)).encode()).digest(), f) for f in files if f.is_file())
        for _, file in keyed:
            raw = file.read_bytes()
            text = unicodedata.normalize("NFC", raw.decode(errors="replace"))
            if "\ufffd" in text or file.is_symlink():
                continue
            if file.suffix == ".html":
                text = _plain(text)
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen or not _good(text):
                continue
            seen.add(digest)
            left -= len(text)
            if left < 0:
                break
            yield package, str(file.relative_to(folder)), text


def held_out(path: str) -> bool:
    """Whether the file of this path is held out of training."""
    return hashlib.sha256(b"held out" + path.encode()).digest()[0] % _HELD_OUT == 0


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(model)
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _with_specials(bpe: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    bpe.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in SPECIALS])
    return bpe


def train_tokenizer(texts: Iterator[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE of VOCAB tokens, the special ones last."""
    bpe = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return _with_specials(bpe)


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of an exported file, for models that are trained for its target."""
    fields = gguf.GGUFReader(path).fields
    texts, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    words = {text: i for i, text in enumerate(texts) if text not in SPECIALS}
    return _with_specials(_byte_level(models.BPE(words, [tuple(merge.split(" ")) for merge in merges])))


def token_id(bpe: tokenizers.Tokenizer, text: str) -> int:
    """The id of a token that the tokenizer has."""
    found = bpe.token_to_id(text)
    assert found is not None, text
    return found


@dataclass(frozen=True)
class Corpus:
    """Token ids, uint16; documents end with END. `code` and `text` are held-out files."""

    tokenizer: tokenizers.Tokenizer
    train: NDArray[np.uint16]
    code: NDArray[np.uint16]
    text: NDArray[np.uint16]


def build(packages: Path, out: Path, bpe: tokenizers.Tokenizer | None = None) -> str:
    """Write the corpus file, with this tokenizer or one trained on a quarter of the files. Returns a table of the files
    in markdown."""
    documents_ = list(documents(packages))
    if bpe is None:
        bpe = train_tokenizer(text for i, (_, _, text) in enumerate(documents_) if i % 4 == 0)
    end = token_id(bpe, END)
    parts: dict[str, list[NDArray[np.uint16]]] = {"train": [], "code": [], "text": []}
    rows: dict[str, list[int]] = {}
    for start in range(0, len(documents_), 256):
        batch = documents_[start : start + 256]
        encoded = bpe.encode_batch_fast([text for _, _, text in batch], add_special_tokens=False)
        for (package, path, text), one in zip(batch, encoded, strict=True):
            prose = package.suffixes[0] not in (".py", ".go")
            split = ("text" if prose else "code") if held_out(path) else "train"
            parts[split].append(np.array([*one.ids, end], np.uint16))
            row = rows.setdefault(package.name, [0, 0, 0])
            row[0] += 1
            row[1] += len(text)
            row[2] += len(one.ids) + 1
    buffer = io.BytesIO()
    content: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    np.savez(buffer, tokenizer=np.frombuffer(bpe.to_str().encode(), np.uint8), **content)
    # Two-byte tokens: positions and contexts modulo 2.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 0, "lp": 1, "pb": 1}]
    out.write_bytes(lzma.compress(buffer.getvalue(), lzma.FORMAT_XZ, filters=filters))
    licences = {package.name: package.licence for package in PACKAGES}
    table = [
        f"| {name} | {licences[name]} | {files} | {size / 1e6:.1f} | {tokens / 1e6:.2f} |"
        for name, (files, size, tokens) in rows.items()
    ]
    total = [sum(row[i] for row in rows.values()) for i in range(3)]
    table.append(f"| total | | {total[0]} | {total[1] / 1e6:.1f} | {total[2] / 1e6:.2f} |")
    held = ", ".join(f"{name} {sum(map(len, parts[name])) / 1e6:.2f}" for name in ("code", "text"))
    return "\n".join(
        [
            "| package | licence | files | MB | M tokens |",
            "| --- | --- | --- | --- | --- |",
            *table,
            "",
            f"Held out (M tokens): {held}.",
        ]
    )


def load(path: Path) -> Corpus:
    """Read a file that `build` wrote."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
        text = bytes(arrays["tokenizer"]).decode()
        return Corpus(tokenizers.Tokenizer.from_str(text), arrays["train"], arrays["code"], arrays["text"])
