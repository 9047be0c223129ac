"""A shard: consecutive layers on one device, behind a handful of verbs that are the same here and in a daemon.

Here: the Shard protocol, the shard of this process, its CUDA graphs, saved states, and the pipeline that runs several
shards one after the other. Not here: which layers go where (luce.backend) and shards in other processes (luce.remote).
luce.backend, luce.remote and luce.draft call it; it calls luce.layers.

    shard         the protocol
    shard_options what all shards of a model are loaded for
    local         the shard of this process
    local_state   its pages and recurrent states, to host memory and back
    pipeline      shards in the order of their layers, a thread each, and the copies between them
    graphs        captures a step as a CUDA graph and replays it
    saved_state   pages and recurrent states of a sequence in host memory
    page_ranking  which pages a query attends to, from statistics of their keys
    sizes         pure: bytes of states and activations
    timing        seconds that shards and copies take
    memory_watch  free memory of the devices
"""
