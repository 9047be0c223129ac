"""The disk tier of the prefix cache: snapshots that survive a restart.

Here: a directory of snapshots (FORMAT.md), the threads that write and read it, and the deadlines for a slow disk. Not
here: which checkpoints are saved, and where restored pages go (luce.kvcache). luce.kvcache calls DiskTier; `luce cache`
reads the directory through Store.

    tier             DiskTier: the thread that writes, reads ahead of the devices
    store            a directory of snapshots: what is added and what is removed
    index            which snapshots there are, and which of them match a text
    writer, reader   one snapshot on its way to the disk, and back
    part             one file of tensors: frames, compressed and with checksums
    manifest         what a snapshot is of, and the files that hold it
    fingerprint      which model and settings a snapshot is valid for
    files            small steps on the directory
    threads          threads that wait for the disk
    deadline         how long a request waits for the disk
    switch_interval  how long reading threads hold the interpreter
"""
