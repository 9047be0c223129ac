"""Every setting of Luce: one dataclass field is one flag, TOML key, environment variable and keyword of luce.load.

Precedence: flag or keyword, then `LUCE_<FIELD>`, then the TOML file named by `--config`, then the default. Values are
checked here, whatever their origin, and all errors of one start are reported together.

    settings     the table: Config, and what is to be known of each field
    sampling     the table of sampling values: SamplingParams, and the Sampler of each
    values       texts to values: what a parser of the table takes
    conflicts    what is wrong between settings
    resolve      a Config from all origins
    flags        settings as flags of a command line
    file         settings as a TOML file, and the sample of one
    environment  the environment of this process; no other module reads it
    directories  where Luce keeps what outlives it
"""
