"""The command line: one file per verb, each with `run(arguments) -> exit status`; `main` parses and dispatches.

`plan` runs in the place of a verb with --dry-run.
"""
