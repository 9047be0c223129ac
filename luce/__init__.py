"""Luce: a local LLM server in pure Python that splits one GGUF model by layers over devices that need not match.

The packages in the order in which a request flows down them; imports point the same way, and a test holds them to it:

    cli       the verbs: serve, chat, run, inspect, plan, bench, pull, models, connect, service, join, cluster and more
    ray       many copies on many machines: processes under Ray, and a router that knows what replicas have cached
    server    HTTP: routes, request checks, OpenAI responses, streams, metrics, the web UI
    bench     how fast a model runs here, beside the measured limits of its devices
    assembly  `luce.load(...)`: makes a Model of a file and a Config, and opens its parts in order
    api       Model: the engine as a Python object
    text      tokenizer, detokenizer, stop strings, reasoning, chat template, where prompts diverge
    engine    sequences and steps: the pure scheduler, sampling, speculative decoding, the engine thread
    kvcache   keys and values: page tables, paging, the prefix cache in RAM and on disk
    draft     drafters, which propose tokens for the target to verify
    compress  prompt compression: a small model reads a long prompt, the target the parts that matter
    cluster   other machines that join: tokens, keys, members, and connections to their devices
    backend   the pipeline of shards as one model: placement, steps through all shards
    planner   how fast a placement is, and which one is the fastest; pure
    remote    shards in other processes: the engine's messages, both sides
    shard     consecutive layers on one device: run, save, restore
    layers    a family's spec turned into layers with weights and state
    profiles  how fast devices and links are, measured with Luce's own kernels, and the files that keep it
    ops       one file per kernel topic: checks, launch shape, NumPy reference
    ipc       other processes and the transport to them: frames, shared memory, supervision, TCP
    runtime   devices: CuPy (CUDA and HIP) or NumPy; the driver's few calls by ctypes; kernel builds; a step's arrays
    cpu_kernels  kernels of the CPU, compiled by numba: products on packed weights, attention, DeltaNet; their threads
    kernels/  CUDA and HIP sources, compiled at run time by the vendor's own compiler

Beside the flow, importing nothing above them: models (families as data), gguf (the file format), hub (where files of
models come from). Under all: config, errors, log.

The life of one request: `server` checks the body and authenticates; `text` renders the template and tokenises,
and lets `compress` shorten the prompt if it may; `engine.loop` queues a Sequence; `kvcache` gives it what earlier ones
computed; `engine.scheduler` puts its next rows into a Step (rows of several sequences, prompt chunks beside single
decode rows); `backend` queues the Step on its shards, which work on consecutive Steps at the same time; the last shard
returns one token id or logits row per output row; `engine.commit` accepts drafts, and `engine.reply` chooses tokens and
finds the finish reason; `text` turns ids into whole characters; `server` streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Model", "load"]

if TYPE_CHECKING:
    from luce.api import Model
    from luce.assembly import load


def __getattr__(name: str) -> Any:
    # Imported on first use: `import luce` must stay cheap for tools that only want the version.
    if name in __all__:
        from luce import assembly

        return getattr(assembly, name)
    raise AttributeError(f"module 'luce' has no attribute {name!r}")
