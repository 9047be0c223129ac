"""Sequences and steps: which rows run next, and which token follows.

Here: the scheduler, the engine thread, sampling, speculative decoding, replies. Not here: pages (luce.kvcache), text
(luce.text implements TextOutput), HTTP, and where layers run. luce.api and luce.server call it; it calls luce.kvcache,
luce.draft, and luce.backend through the Backend protocol.

    events        SamplingParams, the events of a reply, TextOutput
    scheduler     pure: waiting and running sequences in, steps out
    draft_tree    pure: draft trees as rows of a step, and the pages that their branches see
    sampling      logits to a token; log probabilities
    speculate     asks the drafter, shares out rows to verify, counts what was accepted
    draft_budget  how many draft rows pay: measured step times and acceptance rates
    checkpoints   where a sequence resumes from the prefix cache, and which checkpoints of it are saved
    reply         a reply as it grows: choosing tokens, judging whether one is the last, scores, timings
    admission     what other threads ask for: who is admitted, who waits, commands between two steps
    loop          Engine: the thread that joins these with a backend and with those who wait for replies
"""
