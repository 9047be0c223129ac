"""DFlash: a block-diffusion draft, which computes a block of tokens in one forward.

Here: the drafter, its model on a device, its spec from GGUF or safetensors, correction heads and draft trees. Not here:
the parts that all drafters share (luce.draft). luce.draft.spec opens it; it calls luce.layers.

    drafter      one forward of the draft proposes a block behind the seed
    model        the draft's layers on one device and its forward
    spec         a DFlash draft as data, from GGUF metadata
    safetensors  a published checkpoint seen as such a file
    dialect      a GGUF file in llama.cpp's dialect seen as such a file
    correction   heads that correct a block's tokens one by one
    tree         pure: the likeliest tree of tokens, from the distributions at each position
"""
