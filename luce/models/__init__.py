"""Model families as data: one file per family turns GGUF metadata into a ModelSpec.

Here: everything that differs between families, and only here their names. Not here: computation, allocation and the
values of tensors (luce.layers). Called by luce.assembly and luce.draft when they load or describe a model.

    registry  GGUF architecture name to family
    spec      ModelSpec and its parts
    channels  replies that are messages of several channels; calls, tool_formats: how models write tool calls
    keys      metadata keys that several families share
    shapes    holds the sizes of a spec against the shapes of the tensors
    hybrid    the part that the Qwen3.5 families share
    dflash    names in DFlash draft files that depend on their target's family
"""
