"""What `luce connect` tells other programs: where the server is, and the model that it has.

Here: the configuration of each client, and how it gets into files that users have written. Not here: requests to the
server (luce.cli.repl.server_client). A new client is a function in `programs` and its line in `PROGRAMS`.

    served       what the server tells of its model
    programs     by client: its files, its variables, its command
    config_file  a file with settings of others: what is added to it, and its backup
    formats      JSON, TOML, YAML and lists of variables, changed in place
"""
