"""How fast a device computes, measured with Luce's own kernels, which fall short of a vendor's by shares that differ.

Here: the measuring of a device of this process and of a link between two of them, and the files that keep the figures.
Not here: what the figures mean for a model (luce.backend.device_figures), and daemons, which measure their own devices
with this package (luce.remote.probe). `luce doctor`, `luce plan` and the placement of a server's layers use it.

    profile        the figures of a device and of a link
    measuring      measures them, in bounded time
    profile_cache  keeps them in the user's cache folder
    link_cache     keeps the links to daemons there
    draft_cache    keeps there what drafts brought servers
    cached_file    files of one value each, written whole
"""
