"""Generated tasks mixed into the corpus: passkeys hidden in filler, and copying. All in token ids.

`PASSKEY` is the plain form that the evaluation and Luce's tests use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from .data import END, Corpus, token_id

Ids = NDArray[np.uint16]
Flags = NDArray[np.uint8]

#: statement, question, and what comes before the answer; {n} is the thing's name, {v} its value
PASSKEY = (
    "\nThe pass key is {v}. Remember it. {v} is the pass key.\n",
    "\nWhat is the pass key? The pass key is {v}.\n",
)
_NAMED = (
    ("\nThe {n} is {v}. Remember it. {v} is the {n}.\n", "\nWhat is the {n}? The {n} is {v}.\n"),
    ("\nOne of the special magic numbers for {n} is: {v}.\n", "\nThe special magic number for {n} is: {v}.\n"),
    ("\n{n} = {v}\n", "\nassert {n} == {v}\n"),
    ('\n    "{n}": {v},\n', '\n>>> values["{n}"]\n{v}\n'),
    ("\nRemember: the code of the {n} is {v}.\n", "\nQuestion: what is the code of the {n}?\nAnswer: {v}\n"),
)
_THINGS = ("pass key", "passkey", "secret code", "access code", "magic number", "pin code", "password", "secret number")
_WORDS = (
    "amber apple arrow autumn badger banjo birch bishop blue bronze candle canyon cedar cherry cobalt copper coral "
    "crane crimson dragon eagle ember falcon forest garden ginger glacier golden granite green harbor hazel heron "
    "indigo island ivory jade jasper lantern lemon lilac linen lotus magnet maple marble meadow mint nectar north "
    "ocean olive onyx orange orchid otter paper pearl pepper pine planet plum purple quartz rabbit raven river rose "
    "ruby saddle sage salmon scarlet shadow silver sparrow spruce stone summer sunset tiger topaz tulip velvet violet "
    "walnut willow winter yellow zebra"
)
_REPEATED = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n",
    "One two three four five six seven eight nine ten.\n",
    "Nothing of interest is written in this line.\n",
)


@dataclass(frozen=True)
class Rows:
    """Rows of tokens [n, length + 1] and, for each predicted token, its weight in the loss [n, length]."""

    ids: Ids
    weight: NDArray[np.float16]


class Tasks:
    """Makes episodes. One generator, so equal seeds give equal rows."""

    def __init__(self, corpus: Corpus, seed: int, *, filler: Ids | None = None) -> None:
        self._bpe = corpus.tokenizer
        self._filler = corpus.train if filler is None else filler
        self._end = token_id(self._bpe, END)
        self._words = _WORDS.split()
        self._repeated = [self.encode(text) for text in _REPEATED]
        self.random: Generator = np.random.default_rng(seed)

    def encode(self, text: str) -> Ids:
        """The ids of a text; texts of special tokens are recognised."""
        return np.array(self._bpe.encode(text, add_special_tokens=False).ids, np.uint16)

    def filler(self, length: int) -> Ids:
        """`length` tokens of text or code, or of one sentence over and over."""
        if length > 0 and self.random.random() < 0.15:
            unit = self._repeated[self.random.integers(len(self._repeated))]
            return np.resize(unit, length)
        start = self.random.integers(len(self._filler) - length)
        piece = self._filler[start : start + length].copy()
        return piece

    def key(self) -> str:
        """A number of 4 to 7 digits."""
        return "".join(map(str, self.random.integers(0, 10, self.random.integers(4, 8))))

    def _names(self, count: int, style: int) -> list[str]:
        names: list[str] = []
        while len(names) < count:
            a, b = (str(self.random.choice(self._words)) for _ in range(2))
            name = (f"{a} {b}", f"{a}-{b}", f"{a}_{b}".upper(), f"{a}_{b}")[int(style)]
            if name not in names:
                names.append(name)
        return names

    def passkey(self, length: int, depth: float, key: str, *, ask: bool = True) -> tuple[Ids, Ids]:
        """One PASSKEY at `depth` (0 to 1) in about `length` tokens: the prompt, and the ids of its answer."""
        statement, question = (self.encode(part.replace("{v}", key)) for part in PASSKEY)
        prompt, _, _ = PASSKEY[1].partition("{v}")
        asked = self.encode(prompt.removesuffix(" "))
        answer = self.encode(" " + key)
        room = max(0, length - len(statement) - len(asked))
        filler = self.filler(room)
        cut = round(depth * room)
        return np.concatenate([filler[:cut], statement, filler[cut:], asked if ask else question]), answer

    def _statements(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Statements, and for each its question up to the answer and the answer with what follows."""
        if self.random.random() < 0.35:
            thing = "pass key" if self.random.random() < 0.5 else str(self.random.choice(_THINGS))
            pairs, names = [tuple(part.replace("pass key", thing) for part in PASSKEY)], [thing]
        else:
            form = int(self.random.integers(len(_NAMED)))
            style = {2: self.random.choice([2, 3]), 3: self.random.choice([1, 3])}.get(form, self.random.choice([0, 1]))
            names = self._names(int(self.random.integers(1, 7)), int(style))
            if form in (0, 4):
                names = [f"{name} {self.random.choice(_THINGS)}" for name in names]
            pairs = [_NAMED[form]] * len(names)
        statements, questions = [], []
        for (statement, question), name in zip(pairs, names, strict=True):
            value = self.key()
            statements.append(statement.replace("{n}", name).replace("{v}", value))
            before, _, after = question.replace("{n}", name).partition("{v}")
            spaced = before.endswith(" ")
            questions.append((before.removesuffix(" "), " " * spaced + value + after))
        return statements, questions

    def recall(self, length: int) -> tuple[Ids, Flags]:
        """An episode of at most `length` tokens: ids and, for each, whether it is part of an answer."""
        statements, questions = self._statements()
        chat = "? " in questions[0][0] and self.random.random() < 0.4
        parts: list[tuple[Ids, bool]] = [(self.encode("<|im_start|>user\n"), False)] if chat else []
        order = self.random.permutation(len(questions))
        asked = []
        for i in order[: self.random.integers(1, len(questions) + 1)]:
            before, answer = questions[i]
            if chat:
                question, _, lead = before.strip().partition("? ")
                asked += [(self.encode(f"\n{question}?<|im_end|>\n<|im_start|>assistant\n"), False)]
                asked += [(self.encode(lead + answer.rstrip("\n") + "<|im_end|>\n"), True)]
                break
            asked += [(self.encode(before), False), (self.encode(answer), True)]
        told = [self.encode(statement) for statement in statements]
        room = length - sum(len(p) for p, _ in asked) - sum(map(len, told)) - len(parts) * 8 - 1
        filler = self.filler(max(0, room))
        cuts = np.sort(self.random.integers(0, len(filler) + 1, len(told)))
        if self.random.random() < 0.5:  # depths spread evenly rather than at random
            cuts = np.sort((self.random.random(len(told)) * (len(filler) + 1)).astype(int))
        before = 0
        for cut, statement in zip(cuts, told, strict=True):
            parts += [(filler[before:cut], False), (statement, False)]
            before = int(cut)
        parts += [(filler[before:], False), *asked, (np.array([self._end], np.uint16), False)]
        ids = np.concatenate([part for part, _ in parts])
        return ids, np.concatenate([np.full(len(part), flag, np.uint8) for part, flag in parts])

    def copy(self, length: int) -> tuple[Ids, Flags]:
        """A snippet and its copy, as text, code or random tokens."""
        size = max(4, length // 2 - 12)
        if self.random.random() < 0.5:
            snippet = self.random.integers(0, 4000, size).astype(np.uint16)
        else:
            start = self.random.integers(len(self._filler) - size)
            snippet = self._filler[start : start + size]
        begin, middle = self.encode("\nText:\n"), self.encode("\nCopy:\n")
        ids = np.concatenate([begin, snippet, middle, snippet, np.array([self._end], np.uint16)])
        answer = np.zeros(len(ids), np.uint8)
        answer[-size - 1 : -1] = 1
        return ids, answer

    def rows(self, count: int, length: int, *, plain: float = 0.3, answer_weight: float = 3.0) -> Rows:
        """Rows filled with episodes of random lengths."""
        ids = np.empty((count, length + 1), np.uint16)
        weight = np.ones((count, length), np.float16)
        for row in range(count):
            at = 0
            while at < length + 1:
                left = length + 1 - at
                if left < 96:
                    piece = self.filler(left)
                    flags = np.zeros(left, np.uint8)
                elif self.random.random() < 0.15:
                    piece, flags = self.copy(min(left, int(self.random.integers(24, 400))))
                else:
                    size = min(left, int(np.exp(self.random.uniform(np.log(160), np.log(length + 1)))))
                    piece, flags = self.recall(left if left - size < 160 else size)
                piece, flags = piece[:left], flags[:left]
                ids[row, at : at + len(piece)] = piece
                first = max(at, 1)
                scale = 1 + (answer_weight - 1) * flags[first - at :]
                weight[row, first - 1 : at + len(piece) - 1] = scale
                at += len(piece)
        return Rows(ids, weight)
