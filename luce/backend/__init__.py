"""The pipeline of shards as one model: the placement of layers on devices, and steps through all shards.

Here: the Backend protocol that the engine calls, its only implementation LayerSplitBackend (one device is a split of
one), placement and memory plans. Not here: what one shard does (luce.shard) and shards in other processes
(luce.remote). luce.engine, luce.kvcache and luce.draft call it; it calls luce.shard and luce.remote.

    backend           the protocol
    layersplit        LayerSplitBackend
    placement         assigns the layers of a file to devices, and plans the memory
    layer_assignment  pure: layers to devices, by weights or by bytes
    microbatch        splits a step into replies, prompts, and microbatches for the pipeline
    pipeline_state    saves, restores and ranks pages, in all shards
    restore           loads a stored state into all shards at the same time
    boundary_memory   memory for activations between shards
    kvflash_size      pure: number of resident tokens of a long sequence (KVFlash)
    draft_load        drafting, as a prediction takes it
    model_work        what the layers of a file ask of devices, for predictions
    fastest_placement  the fastest placement by predicted speed, held against the memory plan
    prediction_facts  a prediction as facts for JSON, and as a line
    measured_devices  figures of a model's devices and of the links between them: stored, or measured
    observation       how shards' own times compare with the prediction, for later plans
    device_figures    what a measured device does for a file's types of weights, for predictions
    serving_options   ServingOptions: the settings of a whole model
    loading           loads the shards of a plan
    simulated_shard   shards of simulated devices, which take the predicted time
"""
