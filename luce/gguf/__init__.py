"""The GGUF file format, and nothing about models: what a family makes of the keys and tensors is in luce.models.

    reader     open_gguf: header, tensor directory and tensor bytes over mmap; split files
    metadata   Metadata: the keys, with getters that check types
    quants     block sizes, and tensor bytes to float32

Files come from strangers: whatever the bytes are, opening one ends in a GGUFFile or in one ModelError, and what a file
claims never decides how much memory is taken, only what it holds. Called by luce.models, luce.text, luce.ops and
luce.backend.
"""
