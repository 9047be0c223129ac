"""What past sequences leave for later ones: prompts that begin alike are computed once.

    tree      pure: token prefixes, in blocks of one page, and the points at which a sequence can be resumed
    prefix    PrefixCache: blocks on the devices or in host memory, points with their states, eviction by bytes

Not here: which positions are worth a point (luce.engine decides when, luce.text finds chat boundaries). Called by
luce.engine on its thread; calls luce.backend through its Backend protocol.
"""
