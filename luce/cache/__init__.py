"""What past sequences leave for later ones: prompts that begin alike are computed once.

    tree         pure: token prefixes, in blocks of one page, and the points at which a sequence can be resumed
    pools        the pages on the devices, as far as the cache takes part in their account
    memory       blocks on the devices or in host memory, points with their states, eviction by bytes
    prefix       PrefixCache: what is kept, and put into the slots of those that begin alike
    saver        points on their way to the disk, in pieces between steps
    disk         the disk behind it: the thread that writes, reading ahead of the devices
    patience     how long the disk is waited for
    threads      those that wait for it
    turns        how long threads that read wait for each other
    store        a directory of snapshots: what comes and what goes (FORMAT.md)
    index        which snapshots there are, and which belong to a text
    writer       one snapshot on its way to the disk
    reader       one snapshot on its way back
    files        small steps on the directory
    manifest     what a snapshot is of, and which files hold it
    part         one file of tensors: compressed and checked frames
    fingerprint  which model a snapshot is of

Not here: which positions are worth a point (luce.engine decides when, luce.text finds chat boundaries). Called by
luce.engine on its thread; calls luce.backend through its Backend protocol.
"""
