"""Operations on device arrays: one module per topic, with the checks, the kernel launches and the NumPy reference.

Not here: the kernels (kernels/X.cu for ops/X.py), weights' names and the order of ops (luce.layers). Called by
luce.layers, luce.shard and luce.draft.

An op takes the device first. On the NumPy device it runs its reference; elsewhere it launches kernels. Matrices are
[rows, features] with unit stride along the features; the row stride may be larger, so that callers can pass a slice of
a fused product without a copy. Rows are independent: the sums of one row do not depend on the number of rows, except
where a docstring says so.

weight              weight matrices on a device
matmul              products; matmul_int8 and matmul_bf16 for few rows, matmul_prefill with fp16 for many
scaled_products     products with scales still to be applied: sums of int8_rows, halves of half_products
quantise            rows of activations as int8
moe                 mixture of experts; moe_int8, moe_rows and moe_prefill for few, more and many rows; moe_prefill_int8
                    for many with int8 weights
attention           attention over KV pages; attention_mma on tensor cores, kvtype for the types of K and V
block_sparse        attention of a long text of which rows read some blocks
qkv, rope           query, key and value heads before attention; rotary angles
deltanet            gated DeltaNet
short_conv          gated short convolution
altup               copies of the residual stream; gates of which the largest count
dynamic_conv        grouped dynamic causal convolution
norm, activation    norms; gates and the residual addition
embedding           token embedding
sample, draw        argmax and candidates; tokens drawn from these
features            hidden states that drafters read
tail_attention      how much a text's last rows attend to each token
page_ranking        statistics by which KVFlash ranks pages
"""
