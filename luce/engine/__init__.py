"""Sequences and steps: which rows run next, and which token follows.

Here: the scheduler, the engine's thread, sampling, speculative decoding, replies. Not here: pages (luce.kvcache), text
(luce.text implements TextOutput), HTTP, and the devices that layers run on. luce.api and luce.server call it; it calls
luce.kvcache, luce.draft, and luce.backend through the Backend protocol.

    engine_options   EngineOptions, and EngineStats: the numbers of an engine
    events           the events of a reply, TextOutput
    sequence         Sequence: a prompt and its reply, with the state that each part of the engine writes
    recovery         replies go on behind the loss of a shard
    request_checks   what a prompt and the first tokens of a reply must be
    stretching       sequences beyond the original context are read again, with LongRoPE's other frequencies
    failures         the boundary between one sequence's bookkeeping and what all share
    scheduler        pure: waiting and running sequences in, steps out
    prompt_turns     pure: which prompts the next step reads, and how many rows of each
    draft_tree       pure: draft trees as rows of a step, and the pages of their branches
    sampling         logits to a token; log probabilities
    masks            the masks of constrained rows, made on threads while the devices work
    speculate        asks the drafter, chooses the draft rows to verify, counts the accepted ones
    draft_account    pure: what drafting has gained and lost, and may lose
    draft_pace       which sequences the drafter is asked for
    draft_costs      measures what steps and proposals take before the first reply
    draft_budget     pure: how many draft rows pay, by measured step times and acceptance rates, and for which
                     sequences the drafter is asked
    drafted          what is known of the drafts of each sequence, and since the start
    checkpoints      where a sequence resumes from the prefix cache, and which checkpoints of it are saved
    sequence_paging  swaps the pages of long sequences before their steps
    reply            a reply while it grows: tokens, finish reason, prompt scores, times
    admission        who may wait and run, and commands of other threads
    parts            the collaborators of an engine, and how they are wired
    delivery         events to the sinks of replies, and the end of replies
    commit           a step's output to tokens of replies
    loop             Engine: the thread that joins these
"""
