"""Compares ways to accept drafted tokens of sampled text: how many tokens each commits in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import draft as draft_model
from . import draft2, target
from .layers import Weights, linear

#: ratio: accept with min(1, p / q), and draw the rest from what p has more. coupled: both sides take the largest of log
#: p or log q with the same noise. likeliest, independent: p is drawn, and the draft proposes its likeliest tokens, or
#: draws its own
RULES = ("ratio", "coupled", "likeliest", "independent")


@dataclass
class Texts:
    """Texts that grow: ids [n, room], of which `lengths` [n] are known; noise [n, room, vocab] of each place's draw."""

    ids: Tensor
    lengths: Tensor
    noise: Tensor

    def rows(self, count: int) -> Tensor:
        """The next `count` places of each text [n, count]."""
        return self.lengths[:, None] + torch.arange(count, device=self.ids.device)


def gumbel(*shape: int, device: torch.device) -> Tensor:
    """Noise."""
    return -torch.log(-torch.log(torch.rand(*shape, device=device).clamp(1e-12, 1 - 1e-7)))


@torch.no_grad()
def tokens_a_step(
    rule: str, base: Weights, w: Weights, model: draft_model.Draft, prompts: Tensor, *, rounds: int, temperature: float
) -> float:
    """Mean tokens of a step, behind prompts [n, T], over so many steps of each."""
    n, begin = prompts.shape
    block = draft_model.BLOCK
    room = -(-(begin + (rounds + 1) * block) // 64) * 64
    ids = torch.nn.functional.pad(prompts, (0, room - begin))
    noise = gumbel(n, room, base["output.weight"].shape[0], device=prompts.device)
    texts = Texts(ids, torch.full((n,), begin, device=prompts.device), noise)
    teacher = target.Target(model.dtype)
    for _ in range(rounds):
        captured = torch.cat(teacher(base, texts.ids, capture=draft_model.CAPTURE)[1], -1)
        seeds = texts.ids.gather(1, texts.lengths[:, None] - 1)
        z = model(w, base, captured, seeds, texts.lengths[:, None] - 1)[:, 0, 1:]
        drafted, q = _propose(rule, base, w, model, z, seeds[:, 0], texts, temperature)
        at = texts.rows(block - 1)
        with_draft = texts.ids.scatter(1, at, drafted)
        x, _ = teacher(base, with_draft)
        p = torch.stack(
            [
                (teacher.head(base, row[own]).float() / temperature).softmax(-1)
                for row, own in zip(x, texts.rows(block) - 1, strict=True)
            ]
        )
        commit(rule, texts, drafted, p, q)
    return float((texts.lengths - begin).float().mean()) / rounds


def _propose(
    rule: str,
    base: Weights,
    w: Weights,
    model: draft_model.Draft,
    z: Tensor,
    seeds: Tensor,
    texts: Texts,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Tokens [n, BLOCK - 1], and the distributions that they come from [n, BLOCK - 1, vocab]."""
    logits, before, found, every = linear(z, base["output.weight"], model.dtype).float(), seeds, [], []
    for row in range(z.shape[1]):
        best, ids = logits[:, row].topk(draft2.TOP if isinstance(model, draft2.Draft2) else 64, -1)
        if isinstance(model, draft2.Draft2):
            best = best + model.edges(w, z[:, row], before, ids)
        q = torch.zeros_like(logits[:, row]).scatter(-1, ids, (best / temperature).softmax(-1))
        if rule == "likeliest":
            before = q.argmax(-1)
        else:
            noise = texts.noise.gather(1, (texts.lengths + row)[:, None, None].expand(-1, 1, q.shape[-1]))[:, 0]
            before = (q.log() + (noise if rule == "coupled" else gumbel(*q.shape, device=q.device))).argmax(-1)
        found.append(before)
        every.append(q)
    return torch.stack(found, 1), torch.stack(every, 1)


def commit(rule: str, texts: Texts, drafted: Tensor, p: Tensor, q: Tensor) -> None:
    """Append the accepted tokens and one more to each text: p [n, BLOCK, vocab] is the target's behind each of them."""
    for text in range(len(drafted)):
        for row in range(drafted.shape[1] + 1):
            place, own = int(texts.lengths[text]), p[text, row]
            token = int(drafted[text, row]) if row < drafted.shape[1] else -1
            right = False
            if rule == "ratio" and token >= 0:
                other = q[text, row]
                right = bool(torch.rand(()) * other[token].cpu() < own[token].cpu())
                rest = (own - other).clamp(min=0)
                own = own if right or float(rest.sum()) == 0 else rest
            chosen = token if right else int((own.log() + texts.noise[text, place]).argmax())
            texts.ids[text, place] = chosen
            texts.lengths[text] += 1
            if chosen != token or (rule == "ratio" and not right):
                break


def compare(
    files: Mapping[str, Weights],
    mask: int,
    prompts: Tensor,
    say: Callable[[str], None],
    *,
    rounds: int,
    device: torch.device,
) -> None:
    """Print the tokens a step of each draft in `files`, by rule and temperature."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kinds: dict[str, type[draft_model.Draft]] = {"draft": draft_model.Draft, "draft2": draft2.Draft2}
    for name in (name for name in kinds if name in files):
        for temperature in (1.0, 0.7):
            found = []
            for rule in RULES:
                torch.manual_seed(1)
                model = kinds[name](dtype, mask)
                mean = tokens_a_step(
                    rule, files["target"], files[name], model, prompts, rounds=rounds, temperature=temperature
                )
                found.append(f"{rule} {mean:.3f}")
                assert math.isfinite(mean)
            say(f"{name} at temperature {temperature}: tokens a step: {', '.join(found)}")
