"""A shard: consecutive layers on one device, with the same interface in this process and in a daemon.

Here: the Shard protocol, the shard of this process, its CUDA graphs, saved states, and the pipeline that runs several
shards one after the other. Not here: the placement of layers (luce.backend) and shards in other processes
(luce.remote). luce.backend, luce.remote and luce.draft call it; it calls luce.layers.

    shard         the protocol
    shard_options settings that are the same for all shards of a model
    local         the shard of this process
    local_state   saves, restores and loads its pages and recurrent states
    pipeline      shards in the order of their layers, each on its thread, and the copies between them
    device_masks  masks of output rows, copied to the device beside its work
    graphs        captures a step as a CUDA graph and replays it
    saved_state   pages and recurrent states of a sequence in host memory
    page_ranking  estimates which pages a query attends to, from statistics of their keys
    layerwise     a whole text through a model, one layer at a time
    sizes         pure: bytes of states and activations
    timing        seconds that shards and copies take
    warm_up       what a load runs so that every kernel is built
    memory_watch  free memory of the devices
"""
