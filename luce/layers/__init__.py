"""A family's spec turned into layers, with weights and state on one device.

Here: attention, convolutions, gated DeltaNet, MLP and MoE as callables of (rows, step), and the builder, which
allocates their weights, pages and recurrent states. Not here: page tables and slots, which come with each step, kernels
(luce.ops) and the layers' order (luce.shard). Called by luce.shard and luce.draft; calls luce.ops.

    build          spec to layers: names of tensors, checks of shapes; build_deltanet those of DeltaNet
    tensors        the tensors that a shard reads, and their bytes
    decoder_layer  the parts of a layer on the residual stream; embedding and head
    altup          layers that keep four copies of the stream
    attention      grouped-query attention over KV pages; latent_attention over pages of latents
    short_conv     gated short convolution
    dynamic_conv   grouped dynamic causal convolution around a part of a layer
    deltanet       gated DeltaNet
    mlp, moe       feed-forward parts
    norm           norms of rows
    per_layer      per-layer embeddings
    rotary         rotary angles of a step
    state          pages and recurrent states
    weight_pool    weights that small models of one file share
    weights        tensors of a file on a device
    features       the target's hidden states in a ring on the drafter's device
"""
