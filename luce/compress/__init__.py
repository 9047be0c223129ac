"""Prompt compression (PFlash): a small model reads a long prompt, and the target reads the parts that matter.

    open                 small models beside a target, each loaded once
    scorer               a small model reads a text: how much its end attends to each token
    daemon, remote       the same in a daemon: the daemon's side, and the server's
    messages             the messages between both
    selection            scores to kept tokens
    anchors              places where n-grams of a text's end occur before
    compression_options  mode, threshold, and the keep ratio of each length
    session_ratio        the keep ratio of each conversation
    span_cache           the kept tokens of earlier prompts
    reading_time         predicts how long the small model and the target read a prompt
    compressor           compresses prompts, and gives up after failures

`text` knows tokens and messages, and calls the compressor (luce.text.prompt_compression); `server` and `api` call that.
KVFlash's policy `drafter` (kvcache) scores pages with the same scorer.
"""
