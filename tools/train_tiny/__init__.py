"""Makes the trained tiny family: a qwen35 target, its DFlash draft and a qwen3 drafter.

    python -m tools.train_tiny STAGE --help

Needs PyTorch, tokenizers and gguf; nothing in `luce` imports it. Stages, in order: corpus, target, drafter, draft,
export, evaluate. models/tiny/README.md records the runs and their results.
"""
