"""Drafters propose the next tokens; the target verifies several of them in one step.

Here: the Drafter protocol, prompt lookup, the target's own MTP block, a small model as drafter, and drafters in
daemons; luce.draft.dflash is the block-diffusion draft. Not here: which drafts are worth verifying (luce.engine).
luce.assembly opens drafters, luce.engine asks them; they call luce.layers and luce.shard.

    drafter          the protocol
    open             the drafter that the settings name
    spec             a drafter with weights as settings and files describe it, before it has a device
    on_demand        a drafter whose memory is taken and given back
    ngram            prompt lookup
    mtp              the target's own block for multi-token prediction
    small_model      a small model of any family
    context          a draft's keys and values of each slot: rings of pages
    feature_window   which of the target's hidden states the ring holds
    feature_tail     the hidden states before a checkpoint, saved with it
    feature_drafter  what drafters share that read the target's hidden states
    target_head      the target's embedding and head
    probabilities    how sure a draft is of its tokens
    remote, daemon   a drafter in a daemon: the server's side and the daemon's side
"""
