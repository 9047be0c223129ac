"""Who runs when, and which token comes next.

    sequence    the nouns: SamplingParams, events, TextOutput
    pages       host-side account of KV pages: reserve, extend, release, the page views of a step
    scheduler   pure: waiting and running sequences in, steps out
    sampling    logits to a token; log probabilities
    loop        Engine: the thread that joins these with a backend and with those who wait for replies

Not here: text (luce.text implements TextOutput), HTTP, and where layers run. Called by luce.api and luce.server; calls
luce.backend through its Backend protocol.
"""
