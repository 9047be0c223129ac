"""What transformers computes from SmolLM2's file with its own code: recorded, as it takes 25 s of CPU.

.venv/bin/python -m tests.support.smollm2       record it anew
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from luce.hub.lookup import resolve_model

RECORD = Path(__file__).parents[1] / "golden" / "recorded" / "smollm2.json"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
)
STEPS = 64
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


def digest(path: Path) -> str:
    """SHA-256 of the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def computed(path: Path) -> dict[str, Any]:
    """Of each prompt its ids, a greedy continuation of STEPS tokens in float32 and its text; the ids of MESSAGES."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        network = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    # EOS is an ordinary token here: all STEPS tokens are compared.
    network.generation_config.eos_token_id = None
    prompts = {}
    for prompt in PROMPTS:
        encoded = tokenizer(prompt, return_tensors="pt")
        ids = encoded.input_ids[0].tolist()
        output = network.generate(**encoded, do_sample=False, max_new_tokens=STEPS, pad_token_id=0)
        tokens = output[0].tolist()[len(ids) :]
        prompts[prompt] = {"ids": ids, "tokens": tokens, "text": tokenizer.decode(tokens, skip_special_tokens=True)}
    chat = list(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False))
    return {"file": digest(path), "prompts": prompts, "chat": chat}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(computed(resolve_model("smollm2")), indent=1) + "\n")
