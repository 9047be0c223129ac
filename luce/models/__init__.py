"""Model families as data: one file per family turns GGUF metadata into a ModelSpec; `registry` maps names to them.

Nothing here computes, allocates or reads a tensor. Called by luce.assembly when a model is loaded or described.
"""
