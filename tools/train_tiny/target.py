"""The qwen35 target: gated DeltaNet layers with one of gated full attention in every four."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .data import VOCAB
from .delta import Delta
from .layers import Weights, attend, feed_forward, linear, matrix, no_compile, rms, rope

HIDDEN, LAYERS, FFN = 256, 8, 768
INTERVAL = 4
HEADS, KV_HEADS, HEAD = 4, 2, 64
ROPE_DIMS, ROPE_BASE = 16, 1e7
KEY_HEADS, VALUE_HEADS, STATE, TAPS = 2, 4, 64, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * STATE
CONTEXT = 4608


def full(layer: int) -> bool:
    """Whether a layer has full attention."""
    return (layer + 1) % INTERVAL == 0


def fresh() -> dict[str, Tensor]:
    """Initial weights by GGUF name."""
    out = (2 * LAYERS) ** -0.5
    weights = {
        "token_embd.weight": torch.randn(VOCAB, HIDDEN) * 0.5,
        "output_norm.weight": torch.ones(HIDDEN),
        "output.weight": matrix(VOCAB, HIDDEN, 0.5),
    }
    for layer in range(LAYERS):
        layer_weights = {
            "attn_norm.weight": torch.ones(HIDDEN),
            "post_attention_norm.weight": torch.ones(HIDDEN),
            "ffn_gate.weight": matrix(FFN, HIDDEN),
            "ffn_up.weight": matrix(FFN, HIDDEN),
            "ffn_down.weight": matrix(HIDDEN, FFN, out),
        }
        if full(layer):
            layer_weights |= {
                "attn_q.weight": matrix(2 * HEADS * HEAD, HIDDEN),
                "attn_k.weight": matrix(KV_HEADS * HEAD, HIDDEN),
                "attn_v.weight": matrix(KV_HEADS * HEAD, HIDDEN),
                "attn_output.weight": matrix(HIDDEN, HEADS * HEAD, out),
                "attn_q_norm.weight": torch.ones(HEAD) * 1.5,
                "attn_k_norm.weight": torch.ones(HEAD) * 1.5,
            }
        else:
            step = torch.exp(torch.empty(VALUE_HEADS).uniform_(-6.9, -2.3))
            layer_weights |= {
                "attn_qkv.weight": matrix(CHANNELS, HIDDEN),
                "attn_gate.weight": matrix(VALUE_HEADS * STATE, HIDDEN),
                "ssm_alpha.weight": matrix(VALUE_HEADS, HIDDEN, 0.1),
                "ssm_beta.weight": matrix(VALUE_HEADS, HIDDEN, 0.5),
                # log(-ssm_a): the file holds -exp of it
                "ssm_a": torch.log(torch.empty(VALUE_HEADS).uniform_(1, 8)),
                "ssm_dt.bias": step + torch.log(-torch.expm1(-step)),
                "ssm_conv1d.weight": torch.randn(CHANNELS, TAPS) * 0.3 + torch.eye(TAPS)[-1] * 0.7,
                "ssm_norm.weight": torch.ones(STATE),
                "ssm_out.weight": matrix(HIDDEN, VALUE_HEADS * STATE, out),
            }
        weights |= {f"blk.{layer}.{name}": w for name, w in layer_weights.items()}
    return weights


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _mix(c: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [..., VALUE_HEADS, STATE], log decay and beta [..., VALUE_HEADS] from the convolved channels."""
    q, k, v = c.split([KEY_HEADS * STATE, KEY_HEADS * STATE, VALUE_HEADS * STATE], -1)
    q, k = (_unit(x.unflatten(-1, (KEY_HEADS, STATE))) for x in (q, k))
    # value head h reads key head h mod KEY_HEADS
    tiled = [1] * (q.ndim - 2) + [VALUE_HEADS // KEY_HEADS, 1]
    q, k = (q * STATE**-0.5).repeat(tiled), k.repeat(tiled)
    g = -rate.exp() * F.softplus(a.float() + bias)
    return q, k, v.unflatten(-1, (VALUE_HEADS, STATE)), g, b.float().sigmoid()


def _delta_in(
    x: Tensor,
    norm: Tensor,
    qkv: Tensor,
    gate: Tensor,
    alpha: Tensor,
    beta: Tensor,
    rate: Tensor,
    bias: Tensor,
    conv: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    y = rms(x, norm).to(dtype)
    m = linear(y, qkv, dtype)
    rows = F.pad(m.float(), (0, 0, TAPS - 1, 0))
    c = conv[:, 0] * rows[:, : m.shape[1]]
    for s in range(1, TAPS):
        c = c + conv[:, s] * rows[:, s : s + m.shape[1]]
    mixed = _mix(F.silu(c), linear(y, alpha, dtype), linear(y, beta, dtype), rate, bias)
    return (*mixed, linear(y, gate, dtype), m)


def _delta_out(x: Tensor, o: Tensor, z: Tensor, norm: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    gated = rms(o, norm).flatten(-2) * F.silu(z.float())
    return x + linear(gated, out, dtype)


def _attention_in(
    x: Tensor,
    norm: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = rms(x, norm).to(dtype)
    q, gate = linear(y, query, dtype).unflatten(-1, (HEADS, 2, HEAD)).unbind(-2)
    k = linear(y, key, dtype).unflatten(-1, (KV_HEADS, HEAD))
    v = linear(y, value, dtype).unflatten(-1, (KV_HEADS, HEAD))
    q = rope(rms(q, query_norm), positions, ROPE_DIMS, ROPE_BASE).to(dtype)
    k = rope(rms(k, key_norm), positions, ROPE_DIMS, ROPE_BASE).to(dtype)
    return q, k, v, gate


def _attention_out(x: Tensor, o: Tensor, gate: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    return x + linear((o.float() * gate.float().sigmoid()).flatten(-2), out, dtype)


def cuda_graph_of(work: Callable[[], None]) -> Callable[[], None] | None:
    """Replays `work` from a CUDA graph; None if it cannot be captured. Capture does not run it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        print("no CUDA graph:", error, flush=True)
        # A capture that fails at its end leaves its own stream as the current one.
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        return None
    replay: Callable[[], None] = graph.replay
    return replay


@dataclass
class State:
    """The state of decoding by layer, changed in place so that a CUDA graph can be replayed."""

    #: int64 [1], of the next token
    position: Tensor
    #: of layers with full attention, [sequences, KV_HEADS, length, HEAD]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    #: of the others, float32 [sequences, VALUE_HEADS, STATE, STATE]
    memory: dict[int, Tensor]
    #: of the others, float32 [sequences, TAPS - 1, CHANNELS]
    past: dict[int, Tensor]


class Target:
    """The forward pass, for training (`compile` is torch.compile or the identity) and for greedy generation."""

    #: generation may be replayed from CUDA graphs
    graphs = True

    def __init__(self, dtype: torch.dtype, compile: Any = no_compile) -> None:
        self.dtype = dtype
        self._delta = Delta(compile)
        self._delta_in, self._delta_out = compile(_delta_in), compile(_delta_out)
        self._attention_in = compile(_attention_in)
        self._ffn = compile(feed_forward)

    def _ffn_of(self, w: Weights, layer: int, x: Tensor, ffn: Any) -> Tensor:
        names = ("post_attention_norm", "ffn_gate", "ffn_up", "ffn_down")
        result: Tensor = ffn(x, *(w[f"blk.{layer}.{name}.weight"] for name in names), self.dtype)
        return result

    @staticmethod
    def _delta_weights(w: Weights, layer: int) -> list[Tensor]:
        names = ("attn_norm.weight", "attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight")
        return [w[f"blk.{layer}.{n}"] for n in (*names, "ssm_a", "ssm_dt.bias", "ssm_conv1d.weight")]

    @staticmethod
    def _attention_weights(w: Weights, layer: int) -> list[Tensor]:
        names = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm")
        return [w[f"blk.{layer}.{n}.weight"] for n in names]

    def __call__(
        self, w: Weights, ids: Tensor, *, capture: tuple[int, ...] = (), state: State | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Token ids [batch, T] (T a multiple of 64) -> the last layer's output [batch, T, HIDDEN], float32, before the
        final norm, and the outputs of the layers in `capture`. Writes `state` if it is given."""
        x = F.embedding(ids, w["token_embd.weight"])
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        captured = []
        for layer in range(LAYERS):
            if full(layer):
                q, k, v, gate = self._attention_in(x, *self._attention_weights(w, layer), positions, self.dtype)
                o = attend(q, k, v, self.dtype)
                x = _attention_out(x, o, gate, w[f"blk.{layer}.attn_output.weight"], self.dtype)
                if state is not None:
                    state.keys[layer][:, :, : k.shape[1]] = k.transpose(1, 2)
                    state.values[layer][:, :, : v.shape[1]] = v.transpose(1, 2)
            else:
                q, k, v, g, beta, z, m = self._delta_in(x, *self._delta_weights(w, layer), self.dtype)
                o, memory = self._delta(q, k, v, g, beta)
                out_norm, out = (w[f"blk.{layer}.{n}.weight"] for n in ("ssm_norm", "ssm_out"))
                x = self._delta_out(x, o, z, out_norm, out, self.dtype)
                if state is not None:
                    state.memory[layer].copy_(memory)
                    state.past[layer].copy_(m[:, 1 - TAPS :])
            x = self._ffn_of(w, layer, x, self._ffn)
            if layer in capture:
                captured.append(x)
        if state is not None:
            state.position.fill_(ids.shape[1])
        return x, captured

    def head(self, w: Weights, x: Tensor) -> Tensor:
        """Logits, float32, of hidden states before the final norm."""
        return linear(rms(x, w["output_norm.weight"]), w["output.weight"], self.dtype).float()

    def empty(self, sequences: int, length: int, device: torch.device) -> State:
        """A state for __call__ to write."""

        def zeros(attention: bool, *shape: int, dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
            layers = [layer for layer in range(LAYERS) if full(layer) == attention]
            return {layer: torch.zeros(sequences, *shape, dtype=dtype, device=device) for layer in layers}

        return State(
            torch.zeros(1, dtype=torch.int64, device=device),
            zeros(True, KV_HEADS, length, HEAD, dtype=self.dtype),
            zeros(True, KV_HEADS, length, HEAD, dtype=self.dtype),
            zeros(False, VALUE_HEADS, STATE, STATE),
            zeros(False, TAPS - 1, CHANNELS),
        )

    def step(self, w: Weights, ids: Tensor, state: State) -> Tensor:
        """One token for each sequence, ids [batch] -> its last hidden state [batch, 1, HIDDEN]; advances `state`."""
        x = F.embedding(ids[:, None], w["token_embd.weight"])
        for layer in range(LAYERS):
            if full(layer):
                norm, wq, wk, wv, q_norm, k_norm = self._attention_weights(w, layer)
                here = state.position[None]
                q, k, v, gate = _attention_in(x, norm, wq, wk, wv, q_norm, k_norm, here, self.dtype)
                keys, values = state.keys[layer], state.values[layer]
                keys.index_copy_(2, state.position, k.transpose(1, 2))
                values.index_copy_(2, state.position, v.transpose(1, 2))
                q = q.unflatten(2, (KV_HEADS, -1))[:, 0]
                scores = (q @ keys.mT).float() * HEAD**-0.5
                later = torch.arange(keys.shape[2], device=ids.device) > state.position
                o = (scores.masked_fill(later, -torch.inf).softmax(-1).to(self.dtype) @ values).flatten(1, 2)
                x = _attention_out(x, o[:, None], gate, w[f"blk.{layer}.attn_output.weight"], self.dtype)
            else:
                norm, qkv, out_gate, alpha, beta_w, rate, bias, conv = self._delta_weights(w, layer)
                y = rms(x, norm).to(self.dtype)
                m = linear(y, qkv, self.dtype).float()
                rows = torch.cat([state.past[layer], m], 1)
                state.past[layer].copy_(rows[:, 1:])
                c = F.silu((rows * conv.mT).sum(1))
                a, b = (linear(y[:, 0], n, self.dtype) for n in (alpha, beta_w))
                q, k, v, g, beta = _mix(c, a, b, rate, bias)
                memory = state.memory[layer]
                memory *= g.exp()[..., None, None]
                read = (memory * k[..., None]).sum(-2)
                memory += k[..., None] * (beta[..., None] * (v - read))[..., None, :]
                o = (memory * q[..., None]).sum(-2)[:, None]
                z = linear(y, out_gate, self.dtype)
                out_norm, out = (w[f"blk.{layer}.{n}.weight"] for n in ("ssm_norm", "ssm_out"))
                x = _delta_out(x, o, z, out_norm, out, self.dtype)
            x = self._ffn_of(w, layer, x, feed_forward)
        state.position += 1
        return x

    @torch.no_grad()
    def generate(self, w: Weights, prompts: Tensor, tokens: int) -> Tensor:
        """Greedy continuations [batch, tokens] of prompts [batch, T] (T a multiple of 64). On CUDA the steps after the
        first three are replayed from a graph: the launch of 300 kernels takes longer than their work."""
        state = self.empty(len(prompts), prompts.shape[1] + tokens, prompts.device)
        x, _ = self(w, prompts, state=state)
        latest = self.head(w, x[:, -1:])[:, 0].argmax(-1)
        del x
        chosen = prompts.new_empty(len(prompts), tokens)

        def advance() -> None:
            latest.copy_(self.head(w, self.step(w, latest, state))[:, 0].argmax(-1))

        run: Any = advance
        for i in range(tokens):
            chosen[:, i] = latest
            if i == 3 and prompts.is_cuda and self.graphs:
                run = cuda_graph_of(advance) or advance
            if i + 1 < tokens:
                run()
        return chosen


def graphs_work(w: Weights, dtype: torch.dtype, tokens: int = 64) -> bool:
    """Whether generation gives the same tokens from CUDA graphs as without them."""
    model, replayed = Target(dtype), Target(dtype)
    model.graphs = False
    prompts = torch.arange(128, device=w["token_embd.weight"].device).view(2, 64)
    try:
        return bool(torch.equal(replayed.generate(w, prompts, tokens), model.generate(w, prompts, tokens)))
    except RuntimeError as error:
        print("generation from CUDA graphs failed:", error, flush=True)
        return False
