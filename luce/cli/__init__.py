"""The command line: one module per verb with `add_arguments(parser)` and `run(arguments) -> exit status`.

Here: arguments, messages and tables for people. Not here: everything that a verb calls (assembly, server, bench).
Called by the `luce` command and `python -m luce`. A new verb is a module here and its line in `main.VERBS`.

    main          the verbs, the parser, dispatch and exit statuses
    arguments     arguments that several verbs share
    options       sampling values by name, for `run -o` and `/set`
    serve, chat, run, inspect, plan, bench, cache, pull, connect, shard, doctor     the verbs
    plan          also the placement of the layers: in place of a verb with --dry-run, and a part of inspect
    predicted_plan  the predictions of plan, and their tables
    repl          the conversation behind chat
    clients       the programs that connect sets up, and their files
    user_files    files that verbs write for their users
    markdown      a reply at the terminal, as Markdown or plain
"""
