#!/usr/bin/env python3
"""Figures and tables for docs/internals/performance.md from the output of `luce bench --json`.

    luce bench MODEL -p 512,2048,8192 -d 0,8192,32768 --rows 1,2,4,8,16 --sequences 1,2,4,8,16,32,64 --json > a.json
    tools/plot_bench.py a.json b.json --output docs/figures

A Markdown table of each file goes to standard output. Each figure holds one line per file: prompts and decoding by the
depth of the context, verification by rows, decoding by sequences. Needs matplotlib (pip install luce-llm[docs]).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
#: kind of test: field of the axis, title, label of the axis, key of the result
FIGURES = {
    "prompt": ("depth", "Reading a prompt", "tokens before it", "tokens_per_second"),
    "decode": ("depth", "Decoding one sequence", "tokens of context", "tokens_per_second"),
    "verify": ("size", "Verifying rows of one sequence", "rows in a step", "milliseconds_per_step"),
    "batch": ("size", "Decoding sequences side by side", "sequences", "tokens_per_second"),
}


def points(report: Report, kind: str) -> list[tuple[float, float, float]]:
    """(axis value, median, spread) of a report's results of one kind; of several prompt sizes, the largest."""
    axis, *_, key = FIGURES[kind]
    results = [result for result in report["results"] if result["kind"] == kind]
    if axis == "depth":
        largest = max((result["size"] for result in results), default=0)
        results = [result for result in results if result["size"] == largest]
    else:
        least = min((result["depth"] for result in results), default=0)
        results = [result for result in results if result["depth"] == least]
    relative = [result["spread"] / result["tokens_per_second"] for result in results]
    return [(r[axis], r[key], r[key] * s) for r, s in zip(results, relative, strict=True)]


def table(report: Report) -> str:
    """A report's results in Markdown."""
    lines = [
        f"{report['model']}, {report['bytes'] / 1e9:.2f} GB, {', '.join(d['name'] for d in report['devices'])}",
        "",
        "| test | tok/s | ± | ms a step | of bandwidth | of product rate |",
        "|---|---|---|---|---|---|",
    ]
    for result in report["results"]:
        # Reports before 2026-11-24 have the share of a copy's.
        bandwidth = result["of_bandwidth"] if "of_bandwidth" in result else result["of_copy_bandwidth"]
        products = result["of_matmul_rate"]
        cells = (
            result["test"],
            f"{result['tokens_per_second']:.1f}",
            f"{result['spread']:.1f}",
            f"{result['milliseconds_per_step']:.2f}",
            "" if bandwidth is None else f"{bandwidth:.0%}",
            "" if products is None else f"{products:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(reports: Mapping[str, Report], kind: str, path: Path) -> bool:
    """Draw one figure. Returns False, without a file, if no report has a result for it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = {label: found for label, report in reports.items() if (found := points(report, kind))}
    if not lines:
        return False
    _, title, axis, key = FIGURES[kind]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for label, line in lines.items():
        place, median, spread = zip(*sorted(line), strict=True)
        axes.errorbar(place, median, spread, marker="o", capsize=3, label=label)
    axes.set(title=title, xlabel=axis, ylabel="tok/s" if key == "tokens_per_second" else "ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; draw the figures if --output is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="FILE", help="output of luce bench --json")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder for the figures (SVG)")
    options = parser.parse_args(arguments)
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in options.reports}
    print("\n\n".join(map(table, reports.values())))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        for kind in FIGURES:
            path = options.output / f"{kind}.svg"
            if draw(reports, kind, path):
                print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
