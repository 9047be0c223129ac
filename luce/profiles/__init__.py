"""How fast a device computes, measured with Luce's own kernels, which fall short of a vendor's by shares that differ.

Here: the measuring of a device of this process and of a link between two of them, and the files that keep the figures.
Not here: what the figures mean for a model (luce.backend.device_figures), and daemons, which measure their own devices
with this package (luce.remote.probe). `luce doctor`, `luce plan` and the placement of a server's layers use it.

    profile        the figures of a device and of a link
    measuring      measures them, in bounded time
    products       measures products with weights of one type
    layer_parts    what else layers compute
    timer          medians of a few runs, and how much is computed in them
    profile_cache  keeps them in the user's cache folder
    link_cache     keeps the links to daemons there
    draft_cache    keeps there what drafts brought servers
    figure_files   the files of one kind of figures, such as these
    cached_file    files of one value each, written whole
    simulated_profile  the figures of simulated devices
"""
