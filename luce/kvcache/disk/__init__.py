"""The disk tier of the prefix cache: snapshots that survive a restart.

Here: a directory of snapshots (FORMAT.md), the threads that write and read it, and the deadlines for a slow disk. Not
here: which checkpoints are saved, and where restored pages go (luce.kvcache). luce.kvcache calls DiskTier; `luce cache`
reads the directory through Store.

    tier             DiskTier: what the prefix cache calls
    open             the DiskTier of a loaded model
    write_thread     the thread that writes, with its pauses after failures
    read_ahead       the threads that read and decode, ahead of the devices
    store            a directory of snapshots: find, add, evict, remove
    directory        its subdirectories, lock, trash and garbage
    index            the snapshots in memory, and which of them match a text
    writer, reader   one snapshot on its way to the disk, and back
    part             one file of tensors: frames, compressed and with checksums
    open_files       parts that are read again and again, with few descriptors
    expansion        how much the parts of a snapshot may expand to
    manifest         a snapshot's tokens, files and parent
    fingerprint      the model and settings that a snapshot is valid for
    spans            spans of compressed prompts
    stats            numbers for /v1/cache and the metrics
    files            every file operation: below the directory, through no link
    threads          worker threads that a disk may block for ever
    deadline         how long a request waits for the disk
"""
