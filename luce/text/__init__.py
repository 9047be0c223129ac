"""Text on both sides of the engine: strings to token ids and back, and conversations to prompts.

Here: the tokenizer built from a GGUF file's metadata, ids to whole characters, stop strings, reasoning apart from
content, the chat template and the prompt made with it. Not here: HTTP shapes (server) and choosing tokens (engine).
Called by server, api and cli.
"""
