"""Drafters: what proposes the tokens that the target verifies several at a time.

    drafter       the protocol
    open          the drafter that settings name
    resident      a drafter whose memory comes and goes
    ngram         prompt lookup
    dflash        block-diffusion drafts, of which model has the forward on a device
    mtp           the target's own block for multi-token prediction
    plain         a small model of any family
    spec          a DFlash draft as data, from metadata; safetensors shows a published checkpoint as such a file
    context       what a draft remembers of each slot's text: rings of pages
    reader        what drafters share that read the target's features
    features      which of the target's hidden states are in a drafter's ring
    ends          the target's embedding and head
    chances       how sure a draft is
    correction    heads of drafts that go over a block's tokens one by one
    tree          the likeliest texts by what a block-diffusion draft says of each position

Called by luce.assembly, which opens drafters, and by luce.engine, which asks them. Calls luce.layers, and luce.backend
for the target's ends and for graphs.
"""
