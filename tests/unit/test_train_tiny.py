"""The parts of tools/train_tiny that decide whether what it exports is what it trained. Needs PyTorch for most."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import luce
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.runtime.host import HostDevice
from tests.support.drive import Driver
from tests.support.lazy import Lazy
from tests.support.proposals import recorded

if find_spec("torch") is None:
    pytest.skip("torch is what tools/train_tiny trains with and not installed", allow_module_level=True)
torch = Lazy("torch")
data = Lazy("tools.train_tiny.data")
delta = Lazy("tools.train_tiny.delta")
draft = Lazy("tools.train_tiny.draft")
draft2 = Lazy("tools.train_tiny.draft2")
drafter = Lazy("tools.train_tiny.drafter")
export = Lazy("tools.train_tiny.export")
layers = Lazy("tools.train_tiny.layers")
prompts = Lazy("tools.train_tiny.prompts")
sampled = Lazy("tools.train_tiny.sampled")
target = Lazy("tools.train_tiny.target")
tasks = Lazy("tools.train_tiny.tasks")
train = Lazy("tools.train_tiny.train")

pytestmark = pytest.mark.oracle
TINY = Path(__file__).resolve().parents[2] / "models" / "tiny" / "target.gguf"
SOURCES = Path(luce.__file__).parent
RULES = ("ratio", "coupled", "likeliest", "independent")


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    """A tokenizer of this repository's own text, and that text."""
    texts = [path.read_text() for path in sorted(SOURCES.rglob("*.py"))]
    bpe = data.train_tokenizer(iter(texts * 2))
    ids = np.array([i for text in texts for i in bpe.encode(text, add_special_tokens=False).ids], np.uint16)
    return data.Corpus(bpe, ids, ids, ids)


def logits(path: Path, ids: np.ndarray) -> np.ndarray:
    """The outputs of Luce's CPU backend."""
    with open_gguf(path) as file:
        spec = read_spec(Source(str(path), file.metadata, file.tensors))
        backend = LayerSplitBackend(file, spec, [HostDevice()], ServingOptions(slots=1, context=256))
        try:
            driver = Driver(backend)
            return driver.feed((driver.start(), ids.astype(np.int32)))[0]
        finally:
            backend.close()


@pytest.mark.parametrize(("family", "head"), [(target, "output.weight"), (drafter, "token_embd.weight")])
@pytest.mark.parametrize("matrices", [Type.F32, Type.Q8_0])
def test_luce_computes_what_was_trained(
    corpus: data.Corpus, tmp_path: Path, family: Any, head: str, matrices: Type
) -> None:
    torch.manual_seed(1)
    weights = {
        name: w + 0.2 * torch.randn_like(w) if w.ndim == 1 and "norm" in name else w
        for name, w in family.fresh().items()
    }
    name = "target" if family is target else "drafter"
    path = tmp_path / "model.gguf"
    export.WRITERS[name](path, weights, corpus.tokenizer, matrices)
    read = export.read(path)
    assert read.keys() == weights.keys()
    model = (target.Target if family is target else drafter.Drafter)(torch.float32)
    ids = np.random.default_rng(0).integers(0, 4000, 128)
    with torch.no_grad():
        expected = model.head(read, model(read, torch.from_numpy(ids)[None])[0])[0].numpy()
    found = logits(path, ids)
    assert np.mean((found - expected) ** 2) / expected.var() < 1e-9


def test_the_draft_file_has_every_tensor_and_key(corpus: data.Corpus, tmp_path: Path) -> None:
    weights = draft.fresh()
    export.write_draft(tmp_path / "draft.gguf", weights, corpus.tokenizer, Type.F32)
    read = export.read(tmp_path / "draft.gguf")
    assert all(torch.equal(read[name], w) for name, w in weights.items())
    reader = gguf.GGUFReader(tmp_path / "draft.gguf")
    key = "qwen35-dflash-draft.dflash."
    assert reader.fields[key + "mask_token_id"].contents() == corpus.tokenizer.token_to_id(data.MASK)
    assert reader.fields[key + "target_layer_ids"].contents() == list(draft.CAPTURE)


@pytest.mark.parametrize("matrices", [Type.F32, Type.Q8_0])
def test_luce_drafts_the_blocks_of_a_trained_second_generation(
    corpus: data.Corpus, tmp_path: Path, matrices: Type
) -> None:
    torch.manual_seed(2)
    weights = {
        name: w + 0.3 * torch.randn_like(w) if "conv" in name or name.startswith("selector_successor") else w
        for name, w in draft2.grown().items()
    }
    export.write_draft2(tmp_path / "draft2.gguf", weights, corpus.tokenizer, matrices)
    assert (tmp_path / "draft2.gguf").stat().st_size < (20e6 if matrices == Type.F32 else 4e6)
    read = export.read(tmp_path / "draft2.gguf")
    assert read.keys() == weights.keys()
    own, base = draft2.Draft2(torch.float32, data.token_id(corpus.tokenizer, data.MASK)), export.read(TINY)
    # Not of the corpus, which changes with the sources: some prompts bring near ties, which float32 decides otherwise.
    ids = np.random.default_rng(2).integers(100, 4000, 150).tolist()
    loaded = luce.load(TINY, target_devices="cpu:0", draft=str(tmp_path / "draft2.gguf"), verify_width=16)
    with loaded as model, recorded(model) as proposed:
        first, *_ = (t.id for t in model.generate(ids, max_tokens=20, temperature=0, ignore_eos=True))
    with torch.no_grad():
        padded = torch.tensor([ids + [0] * (-len(ids) % 64)])
        states = torch.cat(target.Target(torch.float32)(base, padded, capture=draft.CAPTURE)[1], -1)[:, : len(ids)]
        seed = torch.tensor([[first]])
        z = own(read, base, states.bfloat16().float(), seed, torch.tensor([[len(ids)]]))[0, :, 1:]
        expected = own.drafted(read, base, z, seed[0])[0].tolist()
        plain = (z[0] @ base["output.weight"].T).argmax(-1).tolist()
    assert proposed[0] == (len(ids) + 1, expected)
    # The selector decides some of them.
    assert plain != expected


def test_a_draft_of_the_second_generation_begins_as_the_first(corpus: data.Corpus) -> None:
    torch.manual_seed(3)
    first, base = draft.fresh(), {n: torch.randn(4096, 256) for n in ("token_embd.weight", "output.weight")}
    captured, seeds, anchors = torch.randn(2, 40, 5 * 256), torch.tensor([[1, 7], [3, 4]]), torch.tensor([[9, 30]] * 2)
    with torch.no_grad():
        z = draft.Draft(torch.float32, 5)(first, base, captured, seeds, anchors)
        grown = draft2.grown(first)
        again = draft2.Draft2(torch.float32, 5)(grown, base, captured, seeds, anchors)
        torch.testing.assert_close(again, z)
        rows = z[:, 0, 1:]
        tokens = draft2.Draft2(torch.float32, 5).drafted(grown, base, rows, seeds[:, 0])
        assert torch.equal(tokens, draft.Draft(torch.float32, 5).drafted(first, base, rows, seeds[:, 0]))


def test_a_selector_learns_the_token_before() -> None:
    """Rows that say nothing: which of two tokens comes follows from the one before."""
    torch.manual_seed(4)
    model, names = draft2.Draft2(torch.float32, 5), [n for n in draft2.grown() if n.startswith("selector_")]
    w = layers.trainable({n: t for n, t in draft2.grown().items() if n in names}, torch.device("cpu"))
    base, z = {"output.weight": torch.randn(4096, 256)}, torch.randn(1, 1, 1, 256).expand(1, 8, 15, 256)
    best = (z[0, 0, 0] @ base["output.weight"].T).topk(2).indices
    tokens = best[torch.randint(0, 2, (1, 8, 1)).expand(1, 8, 16)].clone()
    tokens[..., 1::2] = best.sum() - tokens[..., 1::2]
    optimiser = torch.optim.AdamW(w.values(), lr=0.05)
    for _ in range(60):
        losses, chosen = model.losses(w, base, z, tokens)
        losses.mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    assert torch.equal(chosen, tokens[..., 1:])
    assert torch.equal(model.drafted(w, base, z[0], tokens[0, :, 0]), tokens[0, :, 1:])


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_acceptance(rule: str) -> None:
    """A draft that has the target's distributions, and one that has none of its tokens."""
    assert sampled.RULES == RULES
    torch.manual_seed(5)
    device, width = torch.device("cpu"), draft.BLOCK - 1
    p = torch.randn(3, draft.BLOCK, 50).softmax(-1)
    p[..., 40:] = 0
    texts = sampled.Texts(torch.zeros(3, 64).long(), torch.tensor([5, 6, 7]), sampled.gumbel(3, 64, 50, device=device))
    places = texts.rows(width)[..., None].expand(-1, -1, 50)
    right = (p[:, :-1].log() + texts.noise.gather(1, places)).argmax(-1)
    if rule in ("ratio", "coupled"):
        sampled.commit(rule, texts, right, p, p[:, :-1])
        assert texts.lengths.tolist() == [5 + draft.BLOCK, 6 + draft.BLOCK, 7 + draft.BLOCK]
        assert torch.equal(texts.ids[0, 5 : 5 + width], right[0])
    texts.lengths = torch.tensor([5, 6, 7])
    q = torch.zeros(3, width, 50)
    q[..., 45] = 1
    sampled.commit(rule, texts, torch.full((3, width), 45), p, q)
    assert texts.lengths.tolist() == [6, 7, 8]
    assert texts.ids[0, 5] == right[0, 0] and not (texts.ids[:, 5:9] == 45).any()


def test_q6_k_is_decoded_by_the_gguf_package() -> None:
    x = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    x[1] *= 100
    x[2] = 0
    y = gguf.quants.dequantize(export.q6_k(x), Type.Q6_K)
    error = np.sqrt(np.mean((x - y) ** 2, -1))
    # A step is 1/32 of the largest of 16 numbers, about 1.8 sigma; a uniform error is step / sqrt(12).
    assert (error <= 0.03 * x.std(-1)).all()
    assert (y[2] == 0).all()


def test_chunks_equal_the_recurrence_and_so_do_their_gradients() -> None:
    torch.manual_seed(0)
    shape = (2, 192, 3)
    q, k, v = (torch.randn(*shape, 16) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    k[:, 10:60] = k[:, 10:11]  # equal keys: what a series for the inverse would not survive
    g, beta = -torch.rand(shape) * 0.3, torch.rand(shape)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    state, rows = torch.zeros(2, 3, 16, 16), []
    for t in range(shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        read = (state * k[:, t][..., None]).sum(-2)
        state = state + k[:, t][..., None] * (beta[:, t][..., None] * (v[:, t] - read))[..., None, :]
        rows.append((state * q[:, t][..., None]).sum(-2))
    expected = torch.stack(rows, 1)
    found, last = delta.Delta(layers.no_compile)(*inputs)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(last, state, atol=2e-5, rtol=0)
    weight = torch.randn_like(expected)
    gradients = (
        torch.autograd.grad((o * weight).sum() + s.sum(), inputs) for o, s in ((found, last), (expected, state))
    )
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_decoding_continues_a_prompt_as_one_pass_does() -> None:
    torch.manual_seed(0)
    w, model = target.fresh(), target.Target(torch.float32)
    ids = torch.randint(0, 4000, (2, 128))
    with torch.no_grad():
        whole, _ = model(w, ids)
        state = model.empty(2, 128, ids.device)
        model(w, ids[:, :64], state=state)
        steps = torch.cat([model.step(w, ids[:, i], state) for i in range(64, 128)], 1)
    torch.testing.assert_close(steps, whole[:, 64:], atol=1e-4, rtol=0)


def test_generation_is_what_one_pass_gives() -> None:
    torch.manual_seed(0)
    w, model = target.fresh(), target.Target(torch.float32)
    ids = torch.randint(0, 4000, (2, 64))
    made = model.generate(w, ids, 8)
    whole = torch.cat([ids, made, torch.zeros(2, 56, dtype=torch.int64)], 1)
    with torch.no_grad():
        expected = model.head(w, model(w, whole)[0]).argmax(-1)[:, 63:71]
    assert torch.equal(made, expected)


@pytest.mark.parametrize("where", ["begin", "work", "end"])
def test_what_cannot_be_captured_runs_without_a_graph(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captures of CUDA are played here: one that fails at its end leaves the stream of the capture current."""
    current = ["own"]

    class Capture:
        def __init__(self, graph: object, **options: object) -> None:
            pass

        def __enter__(self) -> None:
            current[0] = "capturing"
            if where == "begin":
                raise RuntimeError("not here")

        def __exit__(self, *_: object) -> None:
            if where == "end":
                raise RuntimeError("invalidated")
            current[0] = "own"

    def work() -> None:
        if where == "work":
            raise RuntimeError("not permitted")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert target.cuda_graph_of(work) is None
    assert current == ["own"]


def test_graphs_that_give_other_tokens_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    w = target.fresh()
    assert target.graphs_work(w, torch.float32, 4)
    generate = target.Target.generate

    def wrong(self: target.Target, *arguments: Any) -> Any:
        return generate(self, *arguments) + int(self.graphs)

    monkeypatch.setattr(target.Target, "generate", wrong)
    assert not target.graphs_work(w, torch.float32, 4)


def test_continuations_end_with_their_time() -> None:
    torch.manual_seed(0)
    base, model = target.fresh(), target.Target(torch.float32)
    begun = torch.randint(0, 4000, (2, 64))
    every = train.continuations(base, model, begun, 64, batch=1)
    assert every.ids.shape == (2, 128) and torch.equal(every.ids[:, :64], begun) and every.prompt == 64
    with torch.no_grad():
        states = model(base, every.ids, capture=draft.CAPTURE)[1]
    torch.testing.assert_close(every.captured, torch.cat(states, -1).bfloat16(), atol=1e-2, rtol=1e-2)
    few = train.continuations(base, model, begun, 64, batch=1, seconds=0.0)
    assert torch.equal(few.ids, every.ids[:1]) and torch.equal(few.captured, every.captured[:1])


def test_blocks_begin_before_a_continuation(corpus: data.Corpus) -> None:
    torch.manual_seed(0)
    run = train.continuations(
        target.fresh(), target.Target(torch.float32), torch.zeros(1, 128).long(), 64, batch=1, before=64
    )
    assert (run.prompt, run.first) == (128, 64)


def test_copies_that_have_begun(corpus: data.Corpus) -> None:
    made = train.copies(corpus, 12, 256, 1)
    assert made.shape == (12, 256)
    for ids in made.tolist():
        snippet, _, begun = corpus.tokenizer.decode(ids).removeprefix("\nText:\n").rpartition("\nCopy:\n")
        left = corpus.tokenizer.encode(snippet.removeprefix(begun)).ids
        assert begun and snippet.startswith(begun) and len(left) >= 128


def test_prompts_of_every_task(corpus: data.Corpus) -> None:
    own = prompts.own()
    assert len({text for texts in prompts.make(*own, 20).values() for text in texts}) == 20
    for made in (prompts.make(*own, 20), prompts.make(*prompts.held_out(corpus), 20)):
        assert {task: len(texts) for task, texts in made.items()} == {"code": 8, "text": 6, "copy": 6}
        for text in made["copy"]:
            snippet, _, begun = text.removeprefix("\nText:\n").rpartition("\nCopy:\n")
            assert begun and snippet.startswith(begun) and len(snippet) > 10 * len(begun)


def test_a_block_sees_the_text_before_its_anchor_and_itself() -> None:
    mask = draft.visible(torch.tensor([[2, 5]]), 6)[0, 0]
    assert mask.shape == (2 * draft.BLOCK, 6 + 2 * draft.BLOCK)
    for row in range(2 * draft.BLOCK):
        block = row // draft.BLOCK
        seen = set(mask[row].nonzero()[:, 0].tolist())
        own = {6 + block * draft.BLOCK + i for i in range(draft.BLOCK)}
        assert seen == set(range((2, 5)[block])) | own


def test_an_exported_file_gives_its_tokenizer_back(corpus: data.Corpus, tmp_path: Path) -> None:
    export.write_drafter(tmp_path / "drafter.gguf", drafter.fresh(), corpus.tokenizer)
    again = data.read_tokenizer(tmp_path / "drafter.gguf")
    text = (SOURCES / "config" / "settings.py").read_text() + "<|im_end|> \u00e9\u0301 \U0001f600 12345\n\n\t<think>"
    assert again.encode(text).ids == corpus.tokenizer.encode(text).ids
    assert again.get_vocab() == corpus.tokenizer.get_vocab()


def test_task_text_has_the_ids_that_a_tokenizer_gives_it(corpus: data.Corpus) -> None:
    made = tasks.Tasks(corpus, 3, filler=corpus.train[:20000])
    for depth in (0.0, 0.5, 1.0):
        key = made.key()
        prompt, answer = made.passkey(300, depth, key)
        text = corpus.tokenizer.decode([*prompt, *answer], skip_special_tokens=False)
        assert len(prompt) == 300
        assert text.endswith(f"The pass key is {key}")
        assert text.count(key) == 3
        # without the first newline, which the text before may draw into a token of its own
        question = len(made.encode(tasks.PASSKEY[1].partition(" {v}")[0])) - 1
        assert made.encode(text)[-question - len(answer) :].tolist() == [*prompt[-question:], *answer]


def test_answers_are_what_was_told_before(corpus: data.Corpus) -> None:
    made = tasks.Tasks(corpus, 5)
    for _ in range(40):
        ids, flags = made.recall(600)
        assert len(ids) == len(flags) <= 600
        edges = np.flatnonzero(np.diff(flags, prepend=0, append=0))
        for begin, end in edges.reshape(-1, 2):
            value = re.search(r"\d{4,7}", corpus.tokenizer.decode(ids[begin:end]))
            assert value is not None
            assert value.group() in corpus.tokenizer.decode(ids[:begin])


def test_rows_are_full_and_answers_weigh_more(corpus: data.Corpus) -> None:
    rows = tasks.Tasks(corpus, 5).rows(4, 512, answer_weight=3.0)
    assert rows.ids.shape == (4, 513)
    assert rows.weight.shape == (4, 512)
    assert set(np.unique(rows.weight)) == {1.0, 3.0}
    made = tasks.Tasks(corpus, 6)
    ids, flags = made.copy(200)
    answer = ids[flags == 1].tolist()
    start = len(made.encode("\nText:\n"))
    assert ids[start : start + len(answer)].tolist() == answer


def test_a_draft_gets_other_texts_in_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds begin by the share of the time that has passed; learning goes on with the newest texts."""
    passed = iter(np.linspace(0, 1, 200))

    class Steps:
        factor = 1.0

        def __init__(self, seconds: float) -> None:
            pass

        @property
        def progress(self) -> float:
            return float(next(passed))

    seen: list[float] = []

    class Model:
        def loss(self, w: Any, base: Any, captured: Any, ids: Any, anchors: Any) -> Any:
            seen.append(float(captured[0, 0, 0]))
            return w["fc.weight"].square().sum() + w["norm.weight"].sum(), torch.tensor(0.0)

    made: list[int] = []

    def texts() -> list[Any]:
        made.append(len(made))
        return [train.Run(torch.zeros(4, 64, dtype=torch.long), torch.full((4, 64, 1), made[-1]), 32, 32)] * 4

    monkeypatch.setattr(train, "Clock", Steps)
    setup = train.Setup(torch.device("cpu"), layers.no_compile, 1, 1, 64, 1)
    weights = {"fc.weight": torch.ones(16, 16), "norm.weight": torch.ones(16)}
    train.draft(Model(), {}, weights, texts, setup, 60.0, tmp_path / "draft.pt", rounds=3)
    assert made == [0, 1, 2] and sorted(set(seen)) == [0.0, 1.0, 2.0] and seen == sorted(seen)
