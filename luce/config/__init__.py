"""Every setting of Luce: one dataclass field is one flag, TOML key, environment variable and keyword of luce.load.

Precedence: flag or keyword, then `LUCE_<FIELD>`, then the TOML file named by `--config`, then the default. Values are
checked here, whatever their origin, and all errors of one start are reported together. Not here: checks that need a
device or a file. Called by every package that reads a setting; imports only errors and log.

    settings     the table of settings: Config; server_settings, pool_settings, prefill_settings: parts of it
    field        the fields of that table
    sampling     the table of sampling values: SamplingParams
    values       parsers from texts to values
    conflicts    settings that contradict each other
    resolve      a Config from all origins
    flags        settings as flags of a command line
    file         settings as a TOML file, and the sample file
    environment  the environment of this process; no other module reads it
    suggest      what a misspelt name may mean
    directories  directories for files that outlive the process
    cache_directory  the one for prompts that are cached on disk
"""
