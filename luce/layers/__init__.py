"""A family's spec turned into layers, with weights and state on one device.

Here: attention, gated DeltaNet, MLP and MoE as callables of (rows, step), and the builder, which allocates their
weights, KV pools and recurrent states. Not here: page tables and slots, which come with each step, kernels (luce.ops)
and the layers' order (luce.shard). Called by luce.shard and luce.draft; calls luce.ops.

    build          spec to layers: names of tensors, checks of shapes
    decoder_layer  a pre-norm or sandwich-norm layer; embedding and head
    attention      grouped-query attention over KV pages
    deltanet       gated DeltaNet
    mlp, moe       feed-forward parts
    per_layer      per-layer embeddings
    rotary         rotary angles of a step
    state          KV pools and recurrent states
    weights        tensors of a file on a device
    features       the target's hidden states in a ring on the drafter's device
"""
