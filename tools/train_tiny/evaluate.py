"""Evaluates the trained models: loss on held-out files, passkeys by length and depth, accepted tokens by task."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from . import draft as draft_model
from . import draft2, export
from . import drafter as drafter_model
from . import target as target_model
from .data import MASK, Corpus, token_id
from .layers import Weights
from .tasks import Tasks
from .train import Setup, continuations


def _windows(tokens: np.ndarray, count: int, length: int, device: torch.device) -> Tensor:
    places = np.linspace(0, len(tokens) - length - 1, count).astype(np.int64)
    return torch.from_numpy(np.stack([tokens[p : p + length] for p in places]).astype(np.int64)).to(device)


@torch.no_grad()
def losses(
    name: str, model: target_model.Target | drafter_model.Drafter, w: Weights, corpus: Corpus, setup: Setup, rows: int
) -> None:
    """Print the cross entropy, in nats a token, on held-out code and text."""
    for kind, tokens in (("code", corpus.code), ("text", corpus.text)):
        total = 0.0
        for ids in _windows(tokens, rows, min(2048, setup.length) + 1, setup.device).split(8):
            x, _ = model(w, ids[:, :-1])
            for hidden, labels in zip(x, ids[:, 1:], strict=True):
                total += float(F.cross_entropy(model.head(w, hidden), labels))
        print(f"{name}: held-out {kind} loss {total / rows:.4f}", flush=True)


@torch.no_grad()
def passkeys(
    name: str,
    model: target_model.Target | drafter_model.Drafter,
    w: Weights,
    corpus: Corpus,
    setup: Setup,
    lengths: tuple[int, ...],
    *,
    depths: int,
    each: int = 5,
) -> None:
    """Print the share of passkeys whose every token has the highest logit, given the ones before it."""
    tasks = Tasks(corpus, 99, filler=corpus.code)
    for length in lengths:
        right = np.zeros(depths)
        for depth in range(depths):
            rows, answers = [], []
            for _ in range(each):
                prompt, answer = tasks.passkey(length - 16, depth / max(1, depths - 1), tasks.key())
                rows.append(np.concatenate([prompt, answer, np.zeros(16 - len(answer), np.uint16)]))
                answers.append((len(prompt), answer))
            ids = torch.from_numpy(np.stack(rows).astype(np.int64)).to(setup.device)
            x, _ = model(w, ids)
            for row, (start, answer) in enumerate(answers):
                chosen = model.head(w, x[row, start - 1 : start + len(answer) - 1]).argmax(-1).cpu().numpy()
                right[depth] += bool((chosen == answer).all())
        cells = " ".join(f"{v / each:.1f}" for v in right)
        print(f"{name}: passkeys at {length} tokens {right.mean() / each:.3f}; by depth {cells}", flush=True)


def task_prompts(corpus: Corpus, setup: Setup, count: int) -> dict[str, Tensor]:
    """Prompts by kind, from held-out files."""
    tasks = Tasks(corpus, 7, filler=corpus.code)
    device = setup.device
    long = 64 * max(4, min(32, setup.length // 64 - 8))
    recall, copies = [], []
    for i in range(max(4, count // 4)):
        recall.append(tasks.passkey(long, i * 4 / count, tasks.key())[0])
        size = 256
        snippet = tasks.filler(size)
        begin, middle = tasks.encode("\nText:\n"), tasks.encode("\nCopy:\n")
        text = np.concatenate([begin, snippet, middle, snippet])
        copies.append(text[len(begin) + len(middle) + size + 16 - 256 :][:256])
    return {
        "code": _windows(corpus.code, count, 256, device),
        "code, 1024 tokens before": _windows(corpus.code, max(4, count // 4), 1024, device),
        "text": _windows(corpus.text, count, 256, device),
        "copy": torch.from_numpy(np.stack(copies).astype(np.int64)).to(device),
        "passkey": torch.from_numpy(np.stack(recall).astype(np.int64)).to(device),
    }


@torch.no_grad()
def acceptance(
    base: Weights, model: draft_model.Draft, w: Weights, corpus: Corpus, setup: Setup, *, count: int, budget: int = 128
) -> None:
    """Print, by task, the tokens committed per step and the share of steps with each number of them."""
    teacher = target_model.Target(setup.dtype)
    for kind, prompts in task_prompts(corpus, setup, count).items():
        run = continuations(base, teacher, prompts, budget + 64, batch=max(8, 256 * 512 // prompts.shape[1]))
        steps: list[tuple[int, int]] = []
        for ids, captured in zip(run.ids.split(256), run.captured.split(256), strict=True):
            steps += model.accepted(w, base, captured, ids, run.prompt, budget)
        counts = [count for _, count in steps]
        early = [count for before, count in steps if before < 64]
        histogram = Counter(counts)
        shares = " ".join(f"{histogram[i] / len(steps):.3f}" for i in range(1, draft_model.BLOCK + 1))
        print(
            f"acceptance on {kind}: {sum(counts) / len(counts):.3f} tokens a step over {budget}"
            f" ({sum(early) / len(early):.3f} over the first 64); shares of 1..{draft_model.BLOCK}: {shares}",
            flush=True,
        )


@torch.no_grad()
def chained(
    base: Weights,
    model: drafter_model.Drafter,
    w: Weights,
    corpus: Corpus,
    setup: Setup,
    *,
    count: int,
    budget: int = 128,
) -> None:
    """Print the tokens committed per step by task when the drafter proposes a block's length, token by token."""
    teacher = target_model.Target(setup.dtype)
    for kind, prompts in task_prompts(corpus, setup, count).items():
        text = torch.cat([prompts, teacher.generate(base, prompts, budget)], 1)
        agrees = []
        for part in text.split(32):
            x, _ = model(w, part)
            agrees.append(model.head(w, x[:, prompts.shape[1] : -1]).argmax(-1) == part[:, prompts.shape[1] + 1 :])
        same = torch.cat(agrees).cpu().numpy()
        steps = []
        for row in same:
            at = 0
            while at < len(row):
                run = row[at : at + draft_model.BLOCK - 1]
                steps.append(1 + (len(run) if run.all() else int(run.argmin())))
                at += steps[-1]
        share = f"{sum(steps) / len(steps):.3f} tokens a step over {budget}, agrees on {same.mean():.3f}"
        print(f"drafter on {kind}: {share}", flush=True)


#: Prompts of the expected outputs: code, text, a chat.
PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "The following example shows how to open a file and",
    "<|im_start|>user\nThe pass key is 90817. Remember it.\nWhat is the pass key?<|im_end|>\n<|im_start|>assistant\n",
)


@torch.no_grad()
def _greedy(model: target_model.Target | drafter_model.Drafter, w: Weights, ids: list[int], tokens: int) -> list[int]:
    """Greedy continuation, every token from a forward pass over the whole text."""
    text = list(ids)
    for _ in range(tokens):
        padded = torch.tensor([text + [0] * (-len(text) % 64)])
        x, _ = model(w, padded)
        text.append(int(model.head(w, x[0, len(text) - 1]).argmax()))
    return text[len(ids) :]


@torch.no_grad()
def expected(folder: Path, corpus: Corpus, tokens: int = 64) -> None:
    """Write `folder/expected.json`: greedy tokens of target and drafter on PROMPTS and, if there is a draft, the block
    that it proposes after the target's first token. float32, from the exported files."""
    files = {
        name: export.read(folder / f"{name}.gguf") for name in export.WRITERS if (folder / f"{name}.gguf").is_file()
    }
    base, model, small = files["target"], target_model.Target(torch.float32), drafter_model.Drafter(torch.float32)
    mask = token_id(corpus.tokenizer, MASK)
    kinds = {"draft": draft_model.Draft, "draft2": draft2.Draft2}
    drafts = {name: kind(torch.float32, mask) for name, kind in kinds.items() if name in files}
    cases = []
    for prompt in PROMPTS:
        ids = corpus.tokenizer.encode(prompt, add_special_tokens=False).ids
        case = {
            "prompt": prompt,
            "ids": ids,
            "target": _greedy(model, base, ids, tokens),
            "drafter": _greedy(small, files["drafter"], ids, tokens),
        }
        for name, own in drafts.items():
            padded = torch.tensor([ids + [0] * (-len(ids) % 64)])
            # Rounded, as drafts read them.
            states = (
                torch.cat(model(base, padded, capture=draft_model.CAPTURE)[1], -1)[:, : len(ids)].bfloat16().float()
            )
            seed, anchor = torch.tensor([[case["target"][0]]]), torch.tensor([[len(ids)]])
            z = own(files[name], base, states, seed, anchor)[0, :, 1:]
            case[name] = own.drafted(files[name], base, z, seed[0])[0].tolist()
        cases.append(case)
    (folder / "expected.json").write_text(json.dumps(cases) + "\n")
