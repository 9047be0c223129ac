#!/usr/bin/env python3
"""What --prompt-precision int8 changes: logits and perplexity of a text, compared with fp16 on the same GPU.

    tools/compare_precision.py MODEL... --text LICENSE --devices cuda:0

The text is cut into pieces of --window tokens, each of which is read as a prompt of its own; of all rows

    nmse       the mean of (int8 - fp16)^2 over the mean of (fp16 - mean)^2, the median of rows and the 90th percentile
    top        share of rows whose largest logit is that of the same token
    perplexity of the text with both: exp of the mean of -log p(next token)

A file with a vocabulary of random words has no meaningful perplexity; its NMSE is as good as any.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import luce
from luce.api import Model
from luce.kvcache.page_table import PageTables
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.runtime.step import Span, Step

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """Of two sets of logits [rows, vocab] of the same tokens."""

    rows: int
    nmse_median: float
    nmse_p90: float
    top: float
    perplexity: float
    perplexity_fp16: float


def difference(exact: Logits, other: Logits, following: NDArray[np.int32]) -> Difference:
    """Compare logits with those of fp16; `following` is the token behind each row."""
    x, y = exact.astype(np.float64), other.astype(np.float64)
    nmse = ((y - x) ** 2).mean(axis=1) / x.var(axis=1)
    top = (x.argmax(axis=1) == y.argmax(axis=1)).mean()
    own, theirs = (perplexity(each, following) for each in (y, x))
    return Difference(len(x), float(np.median(nmse)), float(np.quantile(nmse, 0.9)), float(top), own, theirs)


def perplexity(logits: NDArray[np.float64], following: NDArray[np.int32]) -> float:
    """exp of the mean of -log p of the tokens that follow."""
    most = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - most).sum(axis=1)) + most[:, 0]
    return float(np.exp((total - logits[np.arange(len(following)), following]).mean()))


def text_logits(model: Model, pieces: list[NDArray[np.int32]]) -> Logits:
    """The logits of all rows of all pieces but each one's last row."""
    rows = []
    for piece in pieces:
        pages = PageTables.over(model.backend, len(piece))
        pages.reserve(0, len(piece))
        pages.extend(0, 0, len(piece))
        wanted = np.arange(len(piece) - 1, dtype=np.int32)
        step = Step.of_spans([Span(0, 0, len(piece), 0)], piece, pages.views, wanted, needs_logits=True)
        rows.append(np.array(model.backend.forward(step).logits))
    return np.concatenate(rows)


def compare(path: Path, text: str, window: int, devices: str) -> Difference:
    """Load a model twice, and compare. Raises LuceError."""
    found: list[Logits] = []
    following = np.empty(0, np.int32)
    for precision in ("fp16", "int8"):
        fields = {"target_devices": devices, "max_ctx": window, "chunk": window, "cache_ram": 0}
        with luce.load(path, prompt_precision=precision, **fields) as model:
            tokens = np.array(model.tokenizer.encode(text, specials=False), np.int32)
            pieces = [tokens[at : at + window] for at in range(0, len(tokens) - window + 1, window)]
            if not pieces:
                raise SystemExit(f"{path}: the text has {len(tokens)} tokens, fewer than --window {window}")
            following = np.concatenate([piece[1:] for piece in pieces])
            found.append(text_logits(model, pieces))
    exact, other = found
    return difference(exact, other, following)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--window", type=int, default=512, help=f"tokens of a piece, at least {BLAS_ROWS}")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.window < BLAS_ROWS:
        parser.error(f"--window {given.window}: fewer rows than {BLAS_ROWS} are multiplied in another way")
    text = given.text.read_text(encoding="utf-8")
    rows = {path.name: compare(path, text, given.window, given.devices) for path in given.models}
    if given.json:
        json.dump({name: asdict(row) for name, row in rows.items()}, sys.stdout, indent=1)
        return
    print(f"{'model':34} {'rows':>6} {'nmse':>9} {'p90':>9} {'top':>6} {'perplexity':>10} {'fp16':>8}")
    for name, row in rows.items():
        text_of = f"{row.nmse_median:9.2e} {row.nmse_p90:9.2e} {row.top:6.3f} {row.perplexity:10.3f}"
        print(f"{name:34} {row.rows:6} {text_of} {row.perplexity_fp16:8.3f}")


if __name__ == "__main__":
    main()
