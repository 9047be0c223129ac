"""Prompt compression (PFlash): a small model reads a long prompt, and the target reads the parts that matter.

    selection            scores to kept tokens
    anchors              places where n-grams of a text's end occur before
"""
