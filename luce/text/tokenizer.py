"""The tokenizer that a GGUF file describes: its vocabulary, its merges and a pre-tokenizer chosen by name.

Text is first cut at the texts of special tokens; the pre-tokenizer's patterns split the text between them, and the
`tokenizers` library merges the pieces. Three kinds of vocabulary exist (`tokenizer.ggml.model`):

    gpt2     BPE over bytes that are spelled as printable characters (GPT-2's table)
    gemma4   BPE over UTF-8 text with spaces spelled U+2581; characters without a token become byte tokens
    llama    SentencePiece BPE: as gemma4, but merges are ranked by the score of the token that they make
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from luce.errors import FormatError, UnsupportedError
from luce.gguf.metadata import shown
from luce.text.cutter import STEP, Cutter
from luce.text.fim import fim_tokens
from luce.text.pieces import WINDOW, encode
from luce.text.prompt_limit import NO_LIMIT, PromptLimit

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN35 = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_LINE_BREAKS = r"(?:\r?\n)+"
_LLAMA3 = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
# A word begins with capital letters and goes on with small ones; letters of other scripts are both.
_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_TEKKEN = _WORD % ("", "") + r"|\p{N}" + _SYMBOLS
_GPT4O = _WORD % (("(?i:'s|'t|'re|'ve|'m|'ll|'d)?",) * 2) + r"|\p{N}{1,3}" + _SYMBOLS
# Kimi K2: Chinese characters are pieces of their own.
_KIMI_K2 = r"\p{Han}+|" + _GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
_SEED_CODER = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
)
_HAN_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")
# The letters with case that DeepSeek LLM's tokenizer.json lists, without those of some scripts.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_HANGUL,
    r"\p{N}+",
)


@dataclass(frozen=True)
class _Pre:
    """A pre-tokenizer."""

    #: each splits the pieces that the one before it made
    patterns: tuple[str, ...]
    #: before the patterns, each run of line breaks begins a piece, which goes on to the next run
    breaks_lead: bool = False
    #: a piece that is itself a token is taken before merges are tried
    whole: bool = False
    #: for files without the key
    add_bos: bool = False


_PRE: Mapping[str, _Pre] = {
    "default": _Pre((_GPT2,)),
    "gpt-2": _Pre((_GPT2,)),
    "smollm": _Pre((r"\p{N}", _GPT2)),
    "qwen2": _Pre((_QWEN2,)),
    "qwen35": _Pre((_QWEN35,)),
    "llama-bpe": _Pre((_LLAMA3,), whole=True, add_bos=True),
    "llama3": _Pre((_LLAMA3,), whole=True, add_bos=True),
    "llama-v3": _Pre((_LLAMA3,), whole=True, add_bos=True),
    # As in Laguna's tokenizer.json. llama.cpp cuts at "\n" alone, which differs where lines end in "\r\n".
    "laguna": _Pre((_QWEN2,), breaks_lead=True),
    "deepseek-r1-qwen": _Pre((_QWEN2,)),
    "hunyuan": _Pre((_QWEN2,)),
    "megrez": _Pre((_QWEN2,)),
    "dbrx": _Pre((_LLAMA3,)),
    "smaug-bpe": _Pre((_LLAMA3,)),
    "chatglm-bpe": _Pre((_LLAMA3,)),
    "glm4": _Pre((_LLAMA3,), whole=True),
    "lfm2": _Pre((_LLAMA3,), whole=True, add_bos=True),
    "falcon3": _Pre((_LLAMA3,), whole=True, add_bos=True),
    "falcon-h1": _Pre((_LLAMA3,), whole=True, add_bos=True),
    "pixtral": _Pre((_LLAMA3,), whole=True, add_bos=True),
    "refact": _Pre((r"\p{N}", _GPT2)),
    "command-r": _Pre((r"\p{N}", _GPT2)),
    "starcoder": _Pre((r"\p{N}", _GPT2)),
    "exaone": _Pre((r"\p{N}", _GPT2)),
    "exaone4": _Pre((_GPT2,)),
    "olmo": _Pre((_GPT2,)),
    "phi-2": _Pre((_GPT2,)),
    "granite-docling": _Pre((_GPT2,)),
    "tekken": _Pre((_TEKKEN,), whole=True, add_bos=True),
    "gpt-4o": _Pre((_GPT4O,)),
    "llama4": _Pre((_GPT4O,)),
    "minimax-m2": _Pre((_GPT4O,)),
    "kimi-k2": _Pre((_KIMI_K2,)),
    "stablelm2": _Pre((_QWEN2,)),
    "seed-coder": _Pre((_SEED_CODER,)),
    "deepseek-v3": _Pre(_DEEPSEEK_V3),
    "hunyuan-dense": _Pre(_DEEPSEEK_V3),
    "deepseek-coder": _Pre(_DEEPSEEK_CODER),
    "deepseek-llm": _Pre(_DEEPSEEK_LLM),
}
_GEMMA4 = _Pre((r"\n+",), add_bos=True)
_SENTENCEPIECE = _Pre((), add_bos=True)


@dataclass(frozen=True)
class _Kind:
    """A value of `tokenizer.ggml.model`."""

    #: pre-tokenizers by `tokenizer.ggml.pre`; None: `_SENTENCEPIECE`, whatever the file names
    pre: Mapping[str, _Pre] | None
    #: bytes are spelled as printable characters (GPT-2's table)
    spelled: bool = False
    #: merges are ranked by `tokenizer.ggml.scores`, not listed
    scored: bool = False
    #: BOS comes in front of every prompt, whatever the file says: the model is trained so
    always_bos: bool = False
    #: a space goes in front of a text unless `tokenizer.ggml.add_space_prefix` says otherwise
    space_prefix: bool = False
    #: a run of newlines that is a token is taken whole
    newline_runs: bool = False


_KINDS: Mapping[str, _Kind] = {
    "gpt2": _Kind(_PRE, spelled=True),
    "gemma4": _Kind({"default": _GEMMA4, "gemma4": _GEMMA4}, always_bos=True, newline_runs=True),
    "llama": _Kind(None, scored=True, space_prefix=True),
}

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_NEWLINES = re.compile(r"\n+")
_SPACE = "\u2581"


def _unspelled() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for U+0100 onwards, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(other)}


_UNSPELLED = _unspelled()
# For str.translate: each character as the one of its byte in Latin-1. Latin-1 has none for U+FFFF.
_UNSPELL = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(byte) for c, byte in _UNSPELLED.items()}


class Tokenizer:
    """Text to ids and ids to bytes. Immutable after construction; any thread may call it.

    `nfc` composes text first (Unicode normal form C). `eos_texts` are further tokens that end a reply, taken where the
    vocabulary has them. Every token that ends a reply counts as a control token, whatever its type in the file. Texts
    of more than `window` characters are encoded in pieces.

    Raises FormatError for tables that are missing or contradict each other, UnsupportedError for an unknown model or
    pre-tokenizer.
    """

    def __init__(
        self,
        metadata: Mapping[str, object],
        *,
        nfc: bool = False,
        eos_texts: Iterable[str] = (),
        window: int = WINDOW,
    ) -> None:
        self._window = window
        model = _value(metadata, "model", str)
        self._texts, self._types = _tokens(metadata)
        #: number of tokens
        self.vocab = len(self._texts)
        kind, pre = _kind(model, metadata)
        self._spelled = kind.spelled
        #: `encode` puts a space in front of a text
        self.space_prefix = kind.space_prefix and _value(metadata, "add_space_prefix", bool, default=True)

        ids = {text: i for i, text in enumerate(self._texts)}
        #: the file's own ids, None where it names none
        self.bos_id, self.eos_id = (_named_id(metadata, name, self.vocab) for name in ("bos", "eos"))
        named = (_named_id(metadata, name, self.vocab) for name in ("eot", "eom"))
        ends = (self.eos_id, *named, *(ids.get(text) for text in eos_texts))
        #: all ids that end a reply
        self.eos_ids = frozenset(i for i in ends if i is not None)
        wanted = kind.always_bos or _value(metadata, "add_bos_token", bool, default=pre.add_bos)
        #: a prompt begins with `bos_id`; `encode` does not add it, `with_bos` does
        self.add_bos = wanted and self.bos_id is not None

        # Few tokens are anything but normal. Of those with the same text, the last one counts.
        special = [i for i, type in enumerate(self._types) if type != NORMAL]
        self._control = frozenset(i for i in special if self._types[i] == CONTROL) | self.eos_ids
        control = {text: i for i in sorted(self._control) if ids[text := self._texts[i]] == i}
        others = [(self._texts[i], i) for i in special if i not in self._control and ids[self._texts[i]] == i]
        visible = {text: i for text, i in others if self._types[i] == USER_DEFINED}
        #: finds control tokens in text
        self.control = Cutter(control, window)
        #: finds control and user-defined tokens in text
        self.special = Cutter(control | visible, window)
        self._visible = Cutter(visible, window)
        #: tokens for filling in the middle, None if the vocabulary lacks them
        self.fim = fim_tokens(lambda name: _named_id(metadata, name, self.vocab), control | visible)

        # Control tokens stay out of the merges' vocabulary: no spelling of ordinary text can then end in one.
        out = control.keys() | {text for text, i in others if self._types[i] == UNUSED}
        words = {text: i for text, i in ids.items() if text not in out}
        merges = _scored_merges(metadata, self._types, words) if kind.scored else _merges(metadata, words)
        unknown = next((text for text, i in others if self._types[i] == UNKNOWN), None)
        self._bpe = _bpe(words, merges, unknown, kind, pre)
        self._composes = nfc
        if nfc:
            self._bpe.normalizer = normalizers.NFC()
        self._runs: dict[str, int] = {}
        if kind.newline_runs:
            # Merges find most runs of newlines; these they do not.
            runs = {text: i for text, i in words.items() if text and not text.strip("\n")}
            self._runs = {text: i for text, i in runs.items() if self._merge(text) != [i]}

    def with_bos(self, ids: list[int]) -> list[int]:
        """The ids of a prompt, with BOS in front if `add_bos` and it is not there."""
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def alike(self, other: Tokenizer) -> bool:
        """Whether the other vocabulary has the same tokens with the same ids."""
        return self._texts == other._texts

    def encode(
        self, text: str, *, specials: bool, limit: PromptLimit = NO_LIMIT, before: int = 0, continues: bool = False
    ) -> list[int]:
        """The ids of a text, without BOS. Lone surrogates are read as U+FFFD.

        `specials` True recognises the texts of control and user-defined tokens; False only those of user-defined
        tokens: a control token's text is then ordinary text, and no control token can result.
        With `space_prefix` a space goes before the text and after every special token, as in SentencePiece; with
        `continues` the text continues an earlier one, and none goes before it.

        Long texts are encoded in pieces; between two of them `limit` may stop it. `before`: tokens of the prompt in
        front of this text.
        """
        ids: list[int] = []
        prefix = " " * (self.space_prefix and not continues)
        for token, piece in (self.special if specials else self._visible).cut(text):
            limit.check(before + len(ids))
            if token is not None:
                ids.append(token)
                prefix = " " * self.space_prefix
                continue
            if not self._spelled:
                piece = (prefix + piece).replace(" ", _SPACE)
            for part in _between_newlines(piece) if self._runs else (piece,):
                if part in self._runs:
                    ids.append(self._runs[part])
                else:
                    ids += self._merge(part, limit, before + len(ids))
                    limit.check(before + len(ids))
        return ids

    def refuse_long(self, text: str, limit: PromptLimit) -> None:
        """Raises ContextError for a text that cannot have few enough tokens: its bytes by the longest token, or its
        digits by the most digits of a token. Needs no memory and a hundredth of the time that `encode` takes."""
        size = digits = 0
        for at in range(0, len(text), STEP):
            part = text[at : at + STEP].encode(errors="surrogatepass")
            # Composed characters have fewer bytes, by 8 to 3 at most.
            size += len(part) if not self._composes or part.isascii() else len(part) // 4
            digits += len(part) - len(part.translate(None, b"0123456789"))
            # What has no more bytes has no more tokens.
            longest, most_digits = (1, 1) if limit.tokens is None or max(size, digits) <= limit.tokens else self._most
            limit.check(max(size // longest, digits // most_digits))

    @cached_property
    def _most(self) -> tuple[int, int]:
        """Bytes of the longest token, and digits of that with the most."""
        texts = [self.token_bytes(i) or text.encode(errors="surrogatepass") for i, text in enumerate(self._texts)]
        digits = max([len(t) - len(t.translate(None, b"0123456789")) for t in texts], default=1)
        return max(map(len, texts), default=1) or 1, digits or 1

    def _merge(self, piece: str, limit: PromptLimit = NO_LIMIT, before: int = 0) -> list[int]:
        return encode(self._bpe, piece, limit, before, self._window)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a character; b'' for control and unused tokens."""
        kind, text = self._types[token], self._texts[token]
        if kind == UNUSED or self.is_control(token):
            return b""
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if kind == UNKNOWN:
            return "\ufffd".encode()
        if kind == USER_DEFINED:
            return text.encode()
        if self._spelled:
            try:
                return text.translate(_UNSPELL).encode("latin-1")
            except UnicodeEncodeError:
                return b"".join(bytes([_UNSPELLED[c]]) if c in _UNSPELLED else c.encode() for c in text)
        return text.replace(_SPACE, " ").encode()

    def token_text(self, token: int) -> str:
        """A token for people: its bytes as text, U+FFFD where they are no character, or the name of a control token."""
        return self.token_bytes(token).decode(errors="replace") or self._texts[token]

    def spelling(self, token: int) -> str:
        """The token's text in the vocabulary, where bytes and spaces may be spelled as other characters."""
        return self._texts[token]

    def is_control(self, token: int) -> bool:
        """Whether the token steers the model and is not part of a text."""
        return token in self._control

    def is_special(self, token: int) -> bool:
        """Whether the token's text is recognised as a whole: control or user-defined."""
        return self._types[token] == USER_DEFINED or self.is_control(token)


def _between_newlines(text: str) -> Iterator[str]:
    """The runs of newlines and the texts between them, in order; empty texts are left out."""
    end = 0
    for run in _NEWLINES.finditer(text):
        if end < run.start():
            yield text[end : run.start()]
        yield run[0]
        end = run.end()
    if end < len(text):
        yield text[end:]


def _tokens(metadata: Mapping[str, object]) -> tuple[list[str], list[int]]:
    """The texts and types of all tokens, by id."""
    texts: list[str] = _list(metadata, "tokens", str)
    types: list[int] = _list(metadata, "token_type", int, default=[NORMAL] * len(texts))
    if len(types) != len(texts):
        raise FormatError(f"tokenizer.ggml.token_type has {len(types)} entries, tokenizer.ggml.tokens has {len(texts)}")
    for text in [texts[i] for i, type in enumerate(types) if type == BYTE]:
        if not _BYTE_TOKEN.fullmatch(text):
            raise FormatError(f"tokenizer.ggml.tokens: byte token {shown(text)} is not of the form <0xNN>")
    return texts, types


def _kind(model: str, metadata: Mapping[str, object]) -> tuple[_Kind, _Pre]:
    """The kind of vocabulary and its pre-tokenizer."""
    name = _value(metadata, "pre", str, default="default")
    if model not in _KINDS:
        raise UnsupportedError(f"tokenizer.ggml.model: unknown tokenizer model {shown(model)}")
    kind = _KINDS[model]
    if kind.pre is None:
        return kind, _SENTENCEPIECE
    if name not in kind.pre:
        raise UnsupportedError(f"tokenizer.ggml.pre: unknown pre-tokenizer {shown(name)} of tokenizer model {model!r}")
    return kind, kind.pre[name]


def _named_id(metadata: Mapping[str, object], name: str, vocab: int) -> int | None:
    """The id of `tokenizer.ggml.NAME_token_id`, None if the file does not name one."""
    key = f"{name}_token_id"
    if f"tokenizer.ggml.{key}" not in metadata:
        return None
    token: int = _value(metadata, key, int)
    if not 0 <= token < vocab:
        raise FormatError(f"tokenizer.ggml.{key}: {token} is outside the vocabulary of {vocab}")
    return token


def _bpe(
    words: dict[str, int], merges: list[tuple[str, str]], unknown: str | None, kind: _Kind, pre: _Pre
) -> tokenizers.Tokenizer:
    """The library's tokenizer of text between special tokens."""
    model = models.BPE(
        words,
        merges,
        unk_token=None if kind.spelled else unknown,
        fuse_unk=True,
        byte_fallback=not kind.spelled,
        ignore_merges=pre.whole,
    )
    bpe = tokenizers.Tokenizer(model)
    steps: list[Any] = []
    if pre.breaks_lead:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(_LINE_BREAKS), "merged_with_next"))
    steps += [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    if kind.spelled:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if steps:
        bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return bpe


_MISSING: Any = object()


def _value(metadata: Mapping[str, object], name: str, kind: type, default: Any = _MISSING) -> Any:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is _MISSING:
        raise FormatError(f"{key} is missing")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"{key}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def _list(metadata: Mapping[str, object], name: str, kind: type, default: Any = _MISSING) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is _MISSING:
        raise FormatError(f"{key} is missing")
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, Sequence) or not all(issubclass(each, kind) for each in set(map(type, values))):
        raise FormatError(f"{key}: expected a list of {kind.__name__}")
    return list(values)


def _merges(metadata: Mapping[str, object], words: Mapping[str, int]) -> list[tuple[str, str]]:
    """`tokenizer.ggml.merges` as pairs, without those that touch a token outside `words`: they could never apply."""
    pairs = map(str.partition, _list(metadata, "merges", str), repeat(" "))
    return [(left, right) for left, _, right in pairs if left in words and right in words and left + right in words]


def _scored_merges(
    metadata: Mapping[str, object], types: Sequence[int], words: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges: every split of a token into two tokens, best score of the result first."""
    scores = _list(metadata, "scores", float)
    if len(scores) != len(types):
        raise FormatError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(types)} tokens")
    parts = {text: i for text, i in words.items() if types[i] == NORMAL}
    ranked = sorted(parts, key=lambda text: (-scores[parts[text]], parts[text]))
    return [
        (left, right)
        for text in ranked
        for left, right in sorted(
            ((text[:k], text[k:]) for k in range(1, len(text)) if text[:k] in parts and text[k:] in parts),
            key=lambda pair: (parts[pair[0]], parts[pair[1]]),
        )
    ]
