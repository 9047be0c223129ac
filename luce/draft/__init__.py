"""Drafters: what proposes the tokens that the target verifies several at a time."""
