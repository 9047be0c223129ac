"""The pipeline of shards as one model: which layers go on which device, and steps through all of them.

Here: the Backend protocol that the engine calls, its only implementation LayerSplitBackend (one device is a split of
one), placement and memory plans. Not here: what one shard does (luce.shard) and shards in other processes
(luce.remote). luce.engine, luce.kvcache and luce.draft call it; it calls luce.shard and luce.remote.

    backend           the protocol
    layersplit        LayerSplitBackend
    placement         layers of a file on the devices at hand, and the memory they take
    layer_assignment  pure: layers to devices, by weights or by bytes
    microbatch        splits a step into replies, prompts, and microbatches for the pipeline
    pipeline_state    saving, restoring and ranking pages, in all shards
    restore           feeds a stored state to all shards at the same time
    boundary_memory   memory for activations between shards
    kvflash_size      pure: how many pages of a long sequence stay on the devices
    serving_options   ServingOptions: the settings of a whole model
    loading           loads the shards of a plan
"""
