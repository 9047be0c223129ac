"""The training stages. Each ends after its seconds, with its weights saved."""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import draft as draft_model
from . import drafter as drafter_model
from . import target as target_model
from .data import Corpus
from .layers import Weights, no_compile, rms, token_loss, trainable
from .optim import Clock, Optimiser
from .tasks import Rows, Tasks


@dataclass(frozen=True)
class Setup:
    """Device and sizes: `rows` sequences of `length` tokens a step, `tasks` of them generated."""

    device: torch.device
    compile: Callable[[Any], Any]
    rows: int
    tasks: int
    length: int
    workers: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of matrix products."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def compiler(device: torch.device, seconds: float = 150.0) -> Callable[[Any], Any]:
    """torch.compile if a small function compiles in time and gives the same values as uncompiled, else the identity."""
    if device.type != "cuda":
        return no_compile
    result: list[bool] = []

    def probe() -> None:
        try:
            x = torch.randn(512, 256, device=device)

            def norm(x: Tensor) -> Tensor:
                return torch.nn.functional.silu(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

            result.append(bool(torch.allclose(torch.compile(norm, dynamic=False)(x), norm(x), atol=1e-5)))
        except Exception as error:
            print("torch.compile does not work here:", repr(error)[:300], flush=True)

    thread = threading.Thread(target=probe, daemon=True)
    start = time.monotonic()
    thread.start()
    thread.join(seconds)
    works = result == [True]
    print(f"torch.compile: {works} after {time.monotonic() - start:.1f} s", flush=True)
    return (lambda function: torch.compile(function, dynamic=False)) if works else no_compile


_shared: list[Corpus] = []


def _make(job: tuple[int, int, int]) -> Rows:
    seed, count, length = job
    return Tasks(_shared[0], seed).rows(count, length)


class Feed:
    """Rows of corpus and tasks. Other processes make tasks from the start on; rows come in random order."""

    def __init__(self, corpus: Corpus, setup: Setup, seed: int, *, batches: int = 1500) -> None:
        _shared[:] = [corpus]
        self._setup = setup
        self._pool: list[Rows] = []
        self._random = np.random.default_rng(seed)
        context = multiprocessing.get_context("fork")
        self._workers = context.Pool(setup.workers)
        jobs = [(seed + 1 + i, 8, setup.length) for i in range(batches)]
        results = self._workers.imap_unordered(_make, jobs)
        self._results = results
        self._train = torch.from_numpy(corpus.train.astype(np.int16))

    def start(self) -> None:
        """Called before the device is used: the other processes, which must not see it, exist now."""
        self._train = self._train.to(self._setup.device)

        def collect() -> None:
            for rows in self._results:
                self._pool.append(rows)

        threading.Thread(target=collect, daemon=True).start()
        while not self._pool:
            time.sleep(0.05)

    def close(self) -> None:
        """End the processes."""
        self._workers.terminate()

    def windows(self, count: int, length: int) -> Tensor:
        """int64 [count, length] of the corpus, at random places."""
        places = self._sent(self._random.integers(0, len(self._train) - length, count))
        return self._train[places[:, None] + torch.arange(length, device=self._setup.device)].long()

    def episodes(self, count: int) -> tuple[Tensor, Tensor]:
        """int64 [count, length + 1] and the weights float32 [count, length] of rows of tasks."""
        picks = [self._pool[self._random.integers(len(self._pool))] for _ in range(count)]
        rows = [int(self._random.integers(len(p.ids))) for p in picks]
        ids = np.stack([p.ids[r] for p, r in zip(picks, rows, strict=True)]).astype(np.int64)
        weight = np.stack([p.weight[r] for p, r in zip(picks, rows, strict=True)]).astype(np.float32)
        return self._sent(ids), self._sent(weight)

    def _sent(self, values: NDArray[Any]) -> Tensor:
        """On the device, without waiting for work that runs there."""
        tensor = torch.from_numpy(values)
        if self._setup.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._setup.device, non_blocking=True)

    def batch(self) -> tuple[Tensor, Tensor]:
        """ids [rows, length + 1] and weights [rows, length] of one step."""
        ids, weight = self.episodes(self._setup.tasks)
        plain = self.windows(self._setup.rows - self._setup.tasks, self._setup.length + 1)
        return torch.cat([plain, ids]), torch.cat([torch.ones_like(plain[:, 1:], dtype=torch.float32), weight])


def save(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Weights as bfloat16."""
    torch.save({name: w.detach().to("cpu", torch.bfloat16) for name, w in weights.items()}, path)


def load(path: Path) -> dict[str, Tensor]:
    """The weights that `save` wrote, as float32."""
    return {name: w.float() for name, w in torch.load(path, weights_only=True).items()}


def language(
    model: target_model.Target | drafter_model.Drafter,
    weights: Mapping[str, Tensor],
    head: str,
    feed: Feed,
    setup: Setup,
    seconds: float,
    out: Path,
    *,
    lr: float,
) -> dict[str, Tensor]:
    """Train a language model on the feed and save it."""
    w = trainable(weights, setup.device)
    optimiser = Optimiser(w, lr=lr, tables=("token_embd", "output."))
    task_rows = slice(setup.rows - setup.tasks, None)
    clock = Clock(seconds)
    started = time.monotonic()
    step, shown = 0, started
    count = sum(t.numel() for t in w.values())
    print(f"{out.stem}: {count / 1e6:.2f} M parameters, {setup.rows * setup.length} tokens a step", flush=True)
    while clock.progress < 1.0:
        ids, weight = feed.batch()
        x, _ = model(w, ids[:, :-1])
        x = rms(x, w["output_norm.weight"])
        loss = token_loss(x.flatten(0, 1), w[head], ids[:, 1:].flatten(), weight.flatten(), model.dtype)
        loss.backward()
        norm = optimiser.step(clock.factor)
        step += 1
        if setup.device.type == "cuda" and (step == 3 or step % 10 == 0):
            torch.cuda.synchronize()  # the clock must not run ahead of the device
        if step == 3:  # compiling is over: the schedule covers what is left
            clock = Clock(seconds - (time.monotonic() - started))
            print(f"{out.stem}: first steps took {time.monotonic() - started:.1f} s", flush=True)
        if step % 100 == 0 or clock.progress >= 1.0 or step <= 3:
            with torch.no_grad():
                total = float(loss.detach())
                marked = weight[task_rows] > 1
                rows = x[task_rows][marked][:4096]
                right = (rows.to(model.dtype) @ w[head].to(model.dtype).T).argmax(-1) == ids[task_rows, 1:][marked][
                    :4096
                ]
                answers = float(right.float().mean())
            rate = step * setup.rows * setup.length / (time.monotonic() - started)
            print(
                f"{out.stem}: step {step} {clock.progress:.3f} loss {total:.4f} answers {answers:.3f}"
                f" gradient {float(norm):.2f} {rate / 1e6:.2f} M tokens/s",
                flush=True,
            )
            if not np.isfinite(total):
                raise SystemExit(f"{out.stem}: the loss is {total}")
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                save(out, w)
    save(out, w)
    return {name: t.detach() for name, t in w.items()}


@dataclass(frozen=True)
class Run:
    """Greedy text of the target."""

    #: [n, prompt + generated]
    ids: Tensor
    #: the target's captured states, bfloat16 [n, prompt + generated, N * HIDDEN]
    captured: Tensor
    #: length of the prompts
    prompt: int
    #: blocks are drafted from this position on
    first: int


def continuations(
    base: Weights,
    model: target_model.Target,
    prompts: Tensor,
    tokens: int,
    *,
    batch: int,
    before: int = 0,
    seconds: float = math.inf,
) -> Run:
    """Let the target continue the prompts [n, T] (T and tokens multiples of 64) and capture its states; fewer of them,
    but one batch at least, if more would take longer than `seconds`. Blocks are drafted from `before` tokens before the
    continuations on."""
    begun, done = time.monotonic(), 0
    ids = prompts.new_empty(len(prompts), prompts.shape[1] + tokens)
    width = len(draft_model.CAPTURE) * target_model.HIDDEN
    captured = torch.empty(*ids.shape, width, dtype=torch.bfloat16, device=ids.device)
    with torch.no_grad():
        for part in prompts.split(batch):
            ids[done : done + len(part)] = torch.cat([part, model.generate(base, part, tokens)], 1)
            for piece in ids[done : done + len(part)].split(max(1, batch // 8)):
                _, states = model(base, piece, capture=draft_model.CAPTURE)
                captured[done : done + len(piece)] = torch.cat(states, -1)
                done += len(piece)
            if prompts.is_cuda:
                torch.cuda.synchronize()  # the clock must not run ahead of the device
            if (time.monotonic() - begun) * (1 + batch / done) > seconds:
                break
    return Run(ids[:done], captured[:done], prompts.shape[1], prompts.shape[1] - before)


def prompts(feed: Feed, count: int, length: int) -> Tensor:
    """Beginnings for the target: seven parts of corpus, one of tasks cut anywhere."""
    made = -(-count // 8)
    ids, _ = feed.episodes(made)
    places = torch.randint(0, ids.shape[1] - length, (made, 1)).to(ids.device)
    cut = ids.gather(1, places + torch.arange(length, device=ids.device))
    mixed = torch.cat([feed.windows(count - made, length), cut])
    return mixed[torch.randperm(count).to(mixed.device)]


def copies(corpus: Corpus, count: int, length: int, seed: int) -> Tensor:
    """Snippets [count, length] whose copies have begun, on the host: at least `length` / 2 tokens are still to come."""
    tasks = Tasks(corpus, seed)
    begin, middle = tasks.encode("\nText:\n"), tasks.encode("\nCopy:\n")
    rows = []
    for _ in range(count):
        given = int(tasks.random.integers(1, length // 8))
        snippet = tasks.filler(length - len(begin) - len(middle) - given)
        rows.append(np.concatenate([begin, snippet, middle, snippet[:given]]))
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def draft_texts(
    base: Weights, feed: Feed, corpus: Corpus, setup: Setup, seconds: float, *, sequences: int, tokens: int = 128
) -> list[Run]:
    """The target's own greedy continuations, of `tokens` tokens each: as many of `sequences` as 0.4 of the time allows.
    Each call draws others.

    They are short, since a target this small soon only repeats itself.
    """
    base = {name: w.to(setup.device, torch.float32) for name, w in base.items()}
    seed = int(torch.randint(1 << 31, ()))
    teacher = target_model.Target(setup.dtype)
    started = time.monotonic()
    short, middle, long = 128, 320, max(64, min(draft_model.CONTEXT, setup.length // 64 * 64) - tokens)
    copied = copies(corpus, sequences // 8, 256, seed).to(setup.device)
    # Prompts, sequences in a batch, tokens of the prompt that are drafted too, and the share of the time. All lengths
    # divide the same number of drafted rows, so that the draft is compiled once.
    begun = (
        (prompts(feed, sequences // 2, short), 4096, short // 2, 0.2),
        (prompts(feed, sequences // 4, middle), 4096, short // 2, 0.1),
        (copied, 4096, 0, 0.06),
        (prompts(feed, max(8, sequences // 64), long), 1024, 0, 0.04),
    )
    runs = [
        continuations(base, teacher, ids, tokens, batch=batch, before=before, seconds=share * seconds)
        for ids, batch, before, share in begun
    ]
    made = ", ".join(str(len(run.ids)) for run in runs)
    print(f"draft: {made} continuations took {time.monotonic() - started:.1f} s", flush=True)
    return runs


def draft(
    model: draft_model.Draft,
    base: Weights,
    weights: Mapping[str, Tensor],
    texts: Callable[[], list[Run]],
    setup: Setup,
    seconds: float,
    out: Path,
    *,
    rounds: int = 1,
    lr: float = 3e-3,
) -> dict[str, Tensor]:
    """Train a draft on texts, and save it. In each of the `rounds` it learns from other texts: it knows those of one
    round by heart within a hundred seconds, and no more fit in memory."""
    started, runs, drawn = time.monotonic(), texts(), 1
    base = {name: w.to(setup.device, torch.float32) for name, w in base.items()}
    order = (0, 1, 0, 2, 0, 1, 0, 3)
    name, w = out.stem, trainable(weights, setup.device)
    optimiser = Optimiser(w, lr=lr, tables=("selector_predecessor", "selector_successor"))
    step, shown = 0, time.monotonic()
    count = sum(t.numel() for t in w.values())
    print(f"{name}: {count / 1e6:.2f} M parameters, shapes {[tuple(r.ids.shape) for r in runs]}", flush=True)
    budget = setup.rows * setup.length
    # A separate generator: a failed graph capture may have left the device's own one unusable.
    random = torch.Generator(setup.device).manual_seed(torch.initial_seed() % 2**63)
    clock = Clock(max(1.0, seconds - (time.monotonic() - started)))
    while clock.progress < 1.0:
        if clock.progress * rounds >= drawn:
            runs = []  # the memory that the next ones take
            runs, drawn = texts(), drawn + 1
        run = runs[order[step % len(order)]]
        size = max(1, budget // run.ids.shape[1])
        blocks = max(1, budget // 2 // (size * draft_model.BLOCK))
        pick = torch.randint(0, len(run.ids), (min(size, len(run.ids)),), device=setup.device, generator=random)
        last = run.ids.shape[1] - draft_model.BLOCK
        anchors = torch.randint(run.first, last + 1, (len(pick), blocks), device=setup.device, generator=random)
        loss, right = model.loss(w, base, run.captured[pick], run.ids[pick], anchors)
        loss.backward()
        norm = optimiser.step(clock.factor)
        step += 1
        if setup.device.type == "cuda" and step % 10 == 0:
            torch.cuda.synchronize()
        if step % 100 == 0 or clock.progress >= 1.0 or step <= 3:
            print(
                f"{name}: step {step} {clock.progress:.3f} loss {float(loss.detach()):.4f} right {float(right):.3f}"
                f" gradient {float(norm):.2f} {time.monotonic() - started:.1f} s",
                flush=True,
            )
            if not np.isfinite(float(loss.detach())):
                raise FloatingPointError(f"{name}: the loss is not finite")
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                save(out, w)
    save(out, w)
    return {name: t.detach() for name, t in w.items()}
