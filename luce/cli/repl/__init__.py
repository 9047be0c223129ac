"""The conversation behind `luce chat`: prompt, commands, and replies of the model here or of a server.

Here: everything between the terminal and what answers. Not here: loading a model, flags (luce.cli.chat). A new command
is a function in `commands` and its line in `COMMANDS`.

    dispatch       reads the input and hands it to a command or to the session
    commands       the commands; show: the topics of /show; attachments: texts in front of the next message
    session        one conversation: its settings, its messages, the next reply
    turn           one reply at the terminal, which Ctrl+C stops at any moment, and its speed
    replier        what answers: the protocol; model_replier: the model here; server_replier: a server's OpenAI API
    server_client  requests and event streams of that server
    conversation   a conversation as data and on disk
    input          a terminal with line editing, or a pipe
"""
