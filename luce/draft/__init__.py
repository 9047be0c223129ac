"""Drafters propose the next tokens; the target verifies several of them in one step.

Here: the Drafter protocol, prompt lookup, the target's own layer for multi-token prediction, a small model as drafter,
and drafters in daemons; luce.draft.dflash is the block-diffusion draft. Not here: which proposals are worth verifying
(luce.engine). luce.assembly opens drafters, luce.engine calls them; they call luce.layers and luce.shard.

    drafter          the protocol
    open             opens the drafter that the settings name
    observed_drafts  drafting for predictions of speed, and how many tokens drafts bring
    spec             a drafter with weights as settings and files describe it, before it has a device
    on_demand        a drafter whose memory is allocated when it is needed
    no_drafter       what an engine without --draft has in place of a drafter
    coupled_draws    draws with the noise that the target's draws will have
    ngram            prompt lookup alone
    prompt_lookup    the continuation of an earlier place that a text's end repeats
    mtp              the target's own layer for multi-token prediction
    small_model      a small model of any family
    context          the keys and values of each slot in a draft: rings of pages
    feature_window   the positions whose features are in the ring
    feature_tail     the features before a checkpoint, saved with it
    feature_drafter  the base of drafters that read the target's features
    target_head      the target's embedding and head
    probabilities    probabilities of a draft's tokens
    messages         the messages about drafters in daemons
    remote, daemon   a drafter in a daemon: the server's side and the daemon's side
"""
