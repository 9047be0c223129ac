"""Who runs when, and which token comes next.

    sequence    the nouns: SamplingParams, events, TextOutput
    pages       host-side account of KV pages: reserve, extend, release, the page views of a step
    residency   KVFlash: which pages of a sequence that does not fit are on the devices, and moving the others
    policies    what says which pages matter
    tree        pure: trees of guesses as rows of a step, and the pages that their branches see
    scheduler   pure: waiting and running sequences in, steps out
    sampling    logits to a token; log probabilities
    gain        what it is worth to verify guesses: times of steps, rates, how many rows pay
    speculate   what a drafter proposes, verified
    points      where a sequence begins in the prefix cache, and what of it is kept there
    reply       a reply as it grows: choosing tokens, judging whether one is the last, scores, timings
    intake      what other threads want: who is let in, who waits, commands between two steps
    loop        Engine: the thread that joins these with a backend and with those who wait for replies

Not here: text (luce.text implements TextOutput), HTTP, and where layers run. Called by luce.api and luce.server; calls
luce.backend through its Backend protocol.
"""
