"""Write the reference files of a family (tests/reference/README.md).

    python -m tools.make_reference olmoe-a

makes a tiny model of transformers with random weights, and writes it as tests/reference/olmoe-a-F32.gguf with the names
and keys of the public converter, what the model computes as olmoe-a-F32.npz, and limits into tolerances.json. A new
family is an entry of RECIPES. Needs torch and transformers. The same recipe gives the same files.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

DIRECTORY = Path(__file__).parent.parent / "tests" / "reference"
#: whose vocabulary new files have
_VOCABULARY = DIRECTORY / "minimaxm2-a-F32.gguf"
_LONG, _STEPS = 150, 32
#: keys of the epsilon of norms, and what configurations call it
_EPSILONS = (
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
)
#: what an honest implementation may be off, of what one is
_MARGIN = 4.0


Key = int | float | bool | list[bool] | list[float]


@dataclass(frozen=True)
class Recipe:
    """A tiny model with everything that could go wrong: every kind of layer, fewer KV heads than heads, windows shorter
    than the long prompt, a head size other than width / heads where published models have one."""

    #: `general.architecture`
    architecture: str
    #: name of the class in transformers, whose configuration class is found from it
    model: str
    #: of the configuration, beside `vocab_size` and the common ones of `_config`
    config: Mapping[str, Any] = field(default_factory=dict)
    #: metadata beside those of `_keys`, under the architecture's prefix
    keys: Mapping[str, Key] = field(default_factory=dict)
    #: standard deviation of the embedding table: where embeddings are scaled up, 1 drowns the layers
    embedding: float = 1.0
    #: what the converter adds to norms
    norm_offset: float = 0.0
    #: parts of parameters' names that the gguf package does not know, and what it knows them as
    names: Mapping[str, str] = field(default_factory=dict)
    #: what begins the names of parameters that the converter stacks, in order, into one tensor of the part before it
    stacked: tuple[str, ...] = ()


RECIPES: Mapping[str, Recipe] = {
    "olmoe-a": Recipe(
        "olmoe",
        "OlmoeForCausalLM",
        {"num_key_value_heads": 2, "intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 3},
        {"expert_count": 6, "expert_used_count": 3},
    ),
    "ernie45-a": Recipe("ernie4_5", "Ernie4_5ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    "ernie45moe-a": Recipe(
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "tie_word_embeddings": True,
        },
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 64,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
        names={"gate.moe_statics.e_score_correction_bias": "moe_statics.e_score_correction.bias"},
    ),
    "commandr-a": Recipe("command-r", "CohereForCausalLM", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "stablelm-a": Recipe(
        "stablelm",
        "StableLmForCausalLM",
        {
            "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
        {"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "qwen2moe-a": Recipe(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "decoder_sparse_step": 1,
        },
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 96,
        },
    ),
    "gemma3n-a": Recipe(
        "gemma3n",
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 6,
            "intermediate_size": 48,
            "head_dim": 16,
            "vocab_size_per_layer_input": 352,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.9, 0.0],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            "feed_forward_length": 48,
            "attention.sliding_window": 32,
            "attention.sliding_window_pattern": [True, False] * 3,
            "attention.shared_kv_layers": 2,
            # NormalDist().inv_cdf of activation_sparsity_pattern.
            "activation_sparsity_scale": [0.8416212, 0.8416212, -math.inf, -math.inf, 1.2815516, -math.inf],
            "altup.active_idx": 0,
            "altup.num_inputs": 4,
            "embedding_length_per_layer_input": 16,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "final_logit_softcapping": 30.0,
        },
        embedding=0.1,
        stacked=("altup_projections.", "altup_unembed_projections."),
    ),
    "gemma-a": Recipe(
        "gemma", "GemmaForCausalLM", {"head_dim": 32, "num_key_value_heads": 1}, embedding=0.1, norm_offset=1.0
    ),
}


def make(name: str, directory: Path = DIRECTORY) -> None:
    """Write the files of a recipe into a directory, which has a tolerances.json."""
    path, model = directory / f"{name}-F32.gguf", random_model(name)
    _write(path, name, RECIPES[name], model, gguf.GGUFReader(_VOCABULARY).fields)
    outputs = _outputs(model)
    np.savez_compressed(path.with_suffix(".npz"), allow_pickle=False, **outputs)
    limits = directory / "tolerances.json"
    known = json.loads(limits.read_text())
    known[path.stem] = _limits(model, outputs, len(gguf.GGUFReader(path).tensors))
    limits.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{path}: {path.stat().st_size} bytes, least margin {outputs['greedy_long_margin'].min():.4f}")


def random_model(name: str) -> Any:
    """The model of a recipe, with weights that make every part matter."""
    recipe, vocabulary = RECIPES[name], gguf.GGUFReader(_VOCABULARY).fields["tokenizer.ggml.tokens"]
    kind = getattr(transformers, recipe.model)
    common = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "vocab_size": len(vocabulary.contents()),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    torch.manual_seed(sum(name.encode()))
    model = kind(kind.config_class(**{**common, **recipe.config})).eval().float()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "bias" in parameter_name:
            # Norms about 1, biases about 0.
            middle = 0.0 if "bias" in parameter_name else 1.0 - recipe.norm_offset
            parameter.data = torch.randn_like(parameter) * 0.3 + middle
        elif "embed_tokens" in parameter_name:
            parameter.data = torch.randn_like(parameter) * recipe.embedding
        else:
            parameter.data = torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5
    model.tie_weights()
    return model


def _tensors(recipe: Recipe, model: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors of the file."""
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == recipe.architecture)
    known = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for name, value in _stacked(recipe, _separate(model)):
        for part, other in recipe.names.items():
            name = name.replace(part, other)
        stem, dot, ending = name.rpartition(".")
        if ending not in ("weight", "bias"):
            stem, dot, ending = name, ".", "weight"
        found = known.get_name(stem)
        if found is None:
            raise SystemExit(f"{name}: the gguf package has no name for it in {recipe.architecture}")
        offset = np.float32(recipe.norm_offset if found.endswith("norm") else 0)
        yield f"{found}{dot}{ending}", np.ascontiguousarray(value + offset)


def _stacked(
    recipe: Recipe, parameters: Iterator[tuple[str, NDArray[np.float32]]]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The parameters, those that the converter stacks as one; each before the parameter behind it."""
    parts: dict[str, list[NDArray[np.float32]]] = {}
    for name, value in parameters:
        found = next((part for part in recipe.stacked if f".{part}" in name), None)
        if found is None:
            yield name, value
        else:
            parts.setdefault(f"model.{found}weight", []).append(value)
    yield from ((name, np.stack(values)) for name, values in parts.items())


def _separate(model: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The parameters, gates and ups of experts apart, and without the head that is the embedding."""
    for name, parameter in model.state_dict().items():
        value = parameter.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("gate_up_proj"):
            gate, up = np.split(value, 2, axis=1)
            yield name.replace("gate_up_proj", "gate_proj"), gate
            yield name.replace("gate_up_proj", "up_proj"), up
        else:
            yield name, value.reshape(-1) if "bias" in name else value


def _write(path: Path, name: str, recipe: Recipe, model: Any, vocabulary: Mapping[str, Any]) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, recipe.architecture)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Key] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        **{key: getattr(config, field) for key, field in _EPSILONS if hasattr(config, field)},
        "rope.freq_base": config.rope_parameters.get("rope_theta", 0.0),
        "rope.dimension_count": size,
        **recipe.keys,
    }
    writer.add_name(f"tiny {name}")
    for key, value in keys.items():
        kinds: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        kinds.get(type(value), writer.add_float32)(f"{recipe.architecture}.{key}", value)
    for key, found in vocabulary.items():
        if key.startswith("tokenizer."):
            writer.add_key_value(key, found.contents(), found.types[0], *found.types[1:])
    for tensor, values in _tensors(recipe, model):
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _run(model: Any, ids: list[int], *, hidden: bool = False) -> tuple[NDArray[np.float32], list[Any]]:
    """Logits [n, vocabulary], and the stream before each layer."""
    with torch.no_grad():
        found = model(torch.tensor([ids]), use_cache=False, output_hidden_states=hidden)
    # Of several copies of the stream the first.
    return found.logits[0].numpy(), [
        each.reshape(-1, *each.shape[-2:])[0].numpy() for each in found.hidden_states or ()
    ]


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """A continuation, and by how much each token leads."""
    ids, margins = list(prompt), []
    for _ in range(_STEPS):
        logits = _run(model, ids)[0][-1]
        best = np.sort(logits)
        margins.append(float(best[-1] - best[-2]))
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], margins


def _outputs(model: Any) -> dict[str, NDArray[Any]]:
    """The arrays that tests/reference/README.md lists."""
    rng = np.random.default_rng(3)
    prompts = {key: rng.integers(0, 256, n).tolist() for key, n in (("1", 1), ("17", 17), ("long", _LONG))}
    found: dict[str, NDArray[Any]] = {f"prompt_{key}": np.array(ids, np.int32) for key, ids in prompts.items()}
    for key, rows in (("1", 1), ("17", 17), ("long", 16)):
        logits, hidden = _run(model, prompts[key], hidden=True)
        found["logits_long_last16" if key == "long" else f"logits_{key}"] = logits[-rows:]
        if key == "17":
            found["hidden_17"] = np.stack(hidden[:-1])
        if key != "1":
            tokens, margins = _greedy(model, prompts[key])
            found[f"greedy_{key}"] = np.array(tokens, np.int32)
            found[f"greedy_{key}_margin"] = np.array(margins, np.float32)
    return found


@contextmanager
def _rounded() -> Iterator[None]:
    """Inputs of every product have the 8 bits of bfloat16."""
    exact = torch.nn.functional.linear
    torch.nn.functional.linear = lambda x, *rest: exact(x.bfloat16().float(), *rest)
    try:
        yield
    finally:
        torch.nn.functional.linear = exact


def _limits(model: Any, expected: Mapping[str, NDArray[Any]], tensors: int) -> dict[str, Any]:
    """The entry of tolerances.json."""
    errors, same = [], []
    with _rounded():
        for key, prompt in (("logits_1", "1"), ("logits_17", "17"), ("logits_long_last16", "long")):
            want = expected[key].astype(np.float64)
            found = _run(model, expected[f"prompt_{prompt}"].tolist())[0][-len(want) :]
            errors.append(((found - want) ** 2).mean(axis=1) / want.var())
            same.append(found.argmax(axis=1) == want.argmax(axis=1))
    each, top = np.concatenate(errors), float(np.concatenate(same).mean())
    median, p90 = float(np.median(each)), float(np.quantile(each, 0.9))

    def short(value: float) -> float:
        return float(f"{value:.1e}")

    exact = {"nmse_median": 1e-8, "nmse_p90": 1e-8, "hidden_max_abs": 0.002, "top1": 1.0, "greedy": "exact"}
    wide = {"nmse_median": short(_MARGIN * median), "nmse_p90": short(_MARGIN * p90), "top1": round(top - 0.12, 2)}
    measured = {"nmse_median": short(median), "nmse_p90": short(p90), "nmse_max": short(each.max()), "top1": top}
    return {
        "weight_types": {"F32": tensors},
        "suggested": {"f32": exact, "bf16_activations": wide},
        "measured": {"bf16_activations": measured},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES), help="a recipe")
    make(parser.parse_args().name)


if __name__ == "__main__":
    main()
