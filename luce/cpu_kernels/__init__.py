"""Kernels of the CPU, compiled at run time by numba: products on packed weights, and the threads that run them.

    vectors   vectors of 16 lanes in compiled code, by the instructions of this CPU
    unpack    16 rows of a quant block to bytes, scales and minimums
    rows      rows of activations as int8
    product   products of quantised or float rows with 16 weight rows at a time
    threads   threads that share a kernel's parts
    attention, heads, elementwise: attention of few rows, and what is around products
    jit       decorators of compiled functions, and the folder that keeps their machine code
    sizes     sizes that compiled code and its callers share
    compiler  all kernels, with what their callers need to know

Not here: which product a weight gets (ops). Called by ops; numba is imported when a packed weight is first loaded.
"""
