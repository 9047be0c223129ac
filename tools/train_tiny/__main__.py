"""`python -m tools.train_tiny STAGE`: see the package's docstring."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import data, draft, draft2, drafter, evaluate, export, prompts, sampled, target, train
from .layers import no_compile

#: the models that draft blocks
DRAFTS: dict[str, type[draft.Draft]] = {"draft": draft.Draft, "draft2": draft2.Draft2}


def _retry(stage: Callable[[train.Setup, float], Mapping[str, Tensor]], setup: train.Setup, seconds: float) -> Any:
    """The stage's weights. A failed stage runs again in the rest of its time, uncompiled, then with half the rows."""
    end = time.monotonic() + seconds
    plans = [
        setup,
        replace(setup, compile=no_compile),
        replace(setup, compile=no_compile, rows=setup.rows // 2, tasks=setup.tasks // 2),
    ]
    for plan in plans:
        try:
            return stage(plan, end - time.monotonic())
        except Exception:
            traceback.print_exc()
            if plan is plans[-1] or time.monotonic() > end - seconds / 4:
                raise
            torch.cuda.empty_cache()
    raise AssertionError


def _evaluated(evaluation: Callable[[], None]) -> None:
    """Evaluate; training continues if that fails."""
    try:
        evaluation()
    except Exception:
        traceback.print_exc()


def _weights(folder: Path, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """The weights of the models that a folder holds, by the model's name; .pt files come before .gguf files."""
    return {
        name: {n: w.to(device) for n, w in read(path).items()}
        for name in export.WRITERS
        for suffix, read in ((".gguf", export.read), (".pt", train.load))
        if (path := (folder / name).with_suffix(suffix)).is_file()
    }


def _trained_draft(
    name: str,
    weights: Mapping[str, Mapping[str, Tensor]],
    feed: train.Feed,
    corpus: data.Corpus,
    setup: train.Setup,
    options: argparse.Namespace,
) -> dict[str, Tensor]:
    """The weights of a draft of the target, from the given ones on; a DFlash2 draft begins as the DFlash draft.
    Prints its acceptance."""
    kind, mask = DRAFTS[name], data.token_id(corpus.tokenizer, data.MASK)
    start = weights.get(name) or (draft2.grown(weights.get("draft")) if name == "draft2" else draft.fresh())

    def run(plan: train.Setup, seconds: float) -> Mapping[str, Tensor]:
        base, path, each = weights["target"], options.out / f"{name}.pt", seconds / options.rounds
        sizes = {"sequences": options.sequences, "tokens": options.generated}

        def texts() -> list[train.Run]:
            return train.draft_texts(base, feed, corpus, plan, each, **sizes)

        model = kind(plan.dtype, mask, plan.compile)
        return train.draft(model, base, start, texts, plan, seconds, path, rounds=options.rounds)

    found: dict[str, Tensor] = _retry(run, setup, getattr(options, name))
    model, sizes = kind(setup.dtype, mask), {"count": options.evaluated, "budget": options.generated}
    _evaluated(lambda: evaluate.acceptance(weights["target"], model, found, corpus, setup, **sizes))
    return found


def _train(options: argparse.Namespace) -> None:
    begun = time.monotonic()

    def say(message: str) -> None:
        print(f"== {time.monotonic() - begun:.1f} s: {message}", flush=True)

    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    corpus = data.load(options.corpus)
    device = torch.device(options.device)
    setup = train.Setup(device, no_compile, options.rows, options.tasks, options.length, options.workers)
    feed = train.Feed(corpus, setup, options.seed)
    feed.start()
    say("corpus loaded")
    setup = replace(setup, compile=train.compiler(device) if options.compile else no_compile)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    weights = _weights(options.start or out, device)
    if device.type == "cuda" and (options.draft or options.draft2 or options.drafter) and "target" in weights:
        target.Target.graphs = target.graphs_work(weights["target"], setup.dtype)
        say(f"CUDA graphs: {target.Target.graphs}")

    def check(name: str, model: target.Target | drafter.Drafter) -> None:
        count = min(32, options.evaluated)
        evaluate.losses(name, model, weights[name], corpus, setup, count)
        lengths = tuple(n for n in (1024, 2048, 4096) if n <= setup.length) or (256,)
        evaluate.passkeys(name, model, weights[name], corpus, setup, lengths, depths=min(20, count))

    if options.target:
        say("target")
        start = weights.get("target") or target.fresh()

        def run_target(plan: train.Setup, seconds: float) -> Mapping[str, Tensor]:
            model = target.Target(plan.dtype, plan.compile)
            return train.language(model, start, "output.weight", feed, plan, seconds, out / "target.pt", lr=options.lr)

        weights["target"] = _retry(run_target, setup, options.target)
        _evaluated(lambda: check("target", target.Target(setup.dtype)))
    for name in DRAFTS:
        if getattr(options, name):
            say(name)
            weights[name] = _trained_draft(name, weights, feed, corpus, setup, options)
    if options.drafter:
        say("drafter")
        start_drafter = weights.get("drafter") or drafter.fresh()

        def run_drafter(plan: train.Setup, seconds: float) -> Mapping[str, Tensor]:
            model = drafter.Drafter(plan.dtype, plan.compile)
            path = out / "drafter.pt"
            return train.language(model, start_drafter, "token_embd.weight", feed, plan, seconds, path, lr=options.lr)

        weights["drafter"] = _retry(run_drafter, setup, options.drafter)
        small = drafter.Drafter(setup.dtype)
        _evaluated(lambda: check("drafter", small))
        sizes = {"count": options.evaluated, "budget": options.generated}
        _evaluated(lambda: evaluate.chained(weights["target"], small, weights["drafter"], corpus, setup, **sizes))
    feed.close()
    say("done")


def _compare(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    files = _weights(options.folder, device)
    bpe = data.read_tokenizer(options.folder / "target.gguf")
    texts = [text for task in json.loads((options.folder / "prompts.json").read_text()).values() for text in task]
    ids = [bpe.encode(text, add_special_tokens=False).ids[-128:] for text in texts]
    long = [own for own in ids if len(own) == 128]
    chosen = torch.tensor(long[:: max(1, len(long) // options.count)][: options.count], device=device)
    sampled.compare(files, data.token_id(bpe, data.MASK), chosen, print, rounds=options.rounds, device=device)


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(prog="train_tiny", description=__doc__)
    stages = parser.add_subparsers(dest="stage", required=True)
    fetch = stages.add_parser("fetch", help="download and unpack the Debian packages")
    fetch.add_argument("packages", type=Path)
    corpus = stages.add_parser("corpus", help="make the tokenizer and the corpus file; prints a table of the files")
    corpus.add_argument("packages", type=Path)
    corpus.add_argument("out", type=Path)
    corpus.add_argument("--tokenizer", type=Path, metavar="GGUF", help="keep the tokenizer of this exported file")
    run = stages.add_parser("train", help="train the models that have SECONDS, and evaluate them")
    run.add_argument("corpus", type=Path)
    run.add_argument("out", type=Path, help="where target.pt, drafter.pt, draft.pt and draft2.pt are written")
    run.add_argument(
        "--start",
        type=Path,
        help="folder of .pt or .gguf files to start from; the draft learns from the target there; default: OUT",
    )
    for name in ("target", "drafter", "draft", "draft2"):
        run.add_argument(f"--{name}", type=float, default=0.0, metavar="SECONDS")
    run.add_argument("--device", default="cuda")
    run.add_argument("--no-compile", dest="compile", action="store_false")
    run.add_argument("--rows", type=int, default=14, help="sequences a step")
    run.add_argument("--tasks", type=int, default=5, help="of these, generated tasks")
    run.add_argument("--length", type=int, default=target.CONTEXT)
    run.add_argument("--workers", type=int, default=12)
    run.add_argument("--sequences", type=int, default=98304, help="continuations the draft learns from in a round")
    run.add_argument("--rounds", type=int, default=1, help="times that the draft gets other continuations")
    run.add_argument("--generated", type=int, default=128, help="tokens of a continuation, a multiple of 64")
    run.add_argument("--evaluated", type=int, default=256, help="prompts of each kind that acceptance is measured on")
    run.add_argument("--lr", type=float, default=4e-3)
    run.add_argument("--seed", type=int, default=1)
    write = stages.add_parser("export", help="write quantised GGUF files of the weights that a folder holds")
    write.add_argument("corpus", type=Path)
    write.add_argument(
        "weights", type=Path, help="folder with target.pt, drafter.pt, draft.pt, draft2.pt; missing ones are left out"
    )
    write.add_argument("out", type=Path)
    expect = stages.add_parser(
        "expected", help="write the outputs of PyTorch in float32 for the exported files, for tests"
    )
    expect.add_argument("corpus", type=Path)
    expect.add_argument("out", type=Path, help="folder of the GGUF files; expected.json is put beside them")
    ask = stages.add_parser("prompts", help="write prompts by task for tools/bench_draft.py")
    ask.add_argument("out", type=Path)
    ask.add_argument("--corpus", type=Path, help="take its held-out files; default: Luce's own files")
    ask.add_argument("--count", type=int, default=200)
    compare = stages.add_parser("sampled", help="compare ways to accept drafted tokens of sampled text")
    compare.add_argument("folder", type=Path, help="folder of the GGUF files")
    compare.add_argument("--device", default="cuda")
    compare.add_argument("--count", type=int, default=32, help="prompts")
    compare.add_argument("--rounds", type=int, default=12, help="steps of each prompt")
    options = parser.parse_args()
    if options.stage == "fetch":
        data.fetch(options.packages)
    elif options.stage == "corpus":
        bpe = data.read_tokenizer(options.tokenizer) if options.tokenizer else None
        print(data.build(options.packages, options.out, bpe))
    elif options.stage == "export":
        options.out.mkdir(parents=True, exist_ok=True)
        bpe = data.load(options.corpus).tokenizer
        for name, writer in export.WRITERS.items():
            if (path := options.weights / f"{name}.pt").is_file():
                writer(options.out / f"{name}.gguf", train.load(path), bpe)
    elif options.stage == "expected":
        evaluate.expected(options.out, data.load(options.corpus))
    elif options.stage == "sampled":
        _compare(options)
    elif options.stage == "prompts":
        prompts.write(options.out, options.corpus and data.load(options.corpus), options.count)
    else:
        _train(options)


if __name__ == "__main__":
    main()
