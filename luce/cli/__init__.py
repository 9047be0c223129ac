"""The command line: one file per verb, each with `run(arguments) -> exit status`; `main` parses and dispatches."""
