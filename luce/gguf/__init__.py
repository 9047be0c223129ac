"""The GGUF file format.

Not here: the meaning of keys and tensors for a model family, which is in luce.models. Files are untrusted: whatever the
bytes are, opening a file ends in a GGUFFile or in one ModelError, and the bytes of a file bound the memory that is
taken, never the counts that it claims. Called by luce.models, luce.text, luce.ops, luce.shard and luce.backend.

reader       open_gguf: header, tensor directory and tensor bytes; split files
model_file   a file read by position, which notices changes
mapped_file  a file in memory without a copy, under a lease
metadata     Metadata: the keys, with getters that check types
quants       sizes of quant blocks, and tensor bytes to float32
fingerprint  a digest that distinguishes model files
"""
