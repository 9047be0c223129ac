"""Prompt compression (PFlash): a small model reads a long prompt, and the target reads the parts that matter.

    scorer               a small model reads a text: how much its end attends to each token
    selection            scores to kept tokens
    anchors              places where n-grams of a text's end occur before
    span_cache           the kept tokens of earlier prompts
    reading_time         predicts how long the small model and the target read a prompt

KVFlash's policy `drafter` (kvcache) scores pages with the same scorer.
"""
