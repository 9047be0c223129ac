"""Kernels of the CPU, compiled at run time by numba: products on packed weights, what lies between two of them, and
their threads.

    catalogue       all kernels, with what their callers need to know
    product         products of quantised or float rows with 16 weight rows at a time
    one_row         products of one row, as most steps of a reply have
    unpack          16 weight rows of a quant block to bytes, scales and minimums; unpack_grid: with a grid
    quantised_rows  rows of activations as two int8 for each value
    attention       attention; heads: norms and rotation in front of it; elementwise: norms and activations
    kv_page         keys and values of a page to float32, and rows to the pools' types
    deltanet        gated DeltaNet between its products
    vectors         vectors of 16 lanes in compiled code; vector_rows: one for each of several rows of x; narrow:
                    numbers of 8 and 16 bits; gather: elements of a table
    lowering        the LLVM instructions behind vectors
    jobs            the parts of a kernel, computed by threads; thread_pool: these threads, for Python
    memory          memory of compiled functions
    jit             decorators of compiled functions, and their compilation
    machine_code    compiled functions on disk and in memory, and their calls from Python
    dimensions      sizes that compiled code and its callers share

Not here: which product a weight gets (ops). Called by ops and runtime. catalogue, machine_code, thread_pool and
dimensions are all that a start with a filled cache imports: the others import numba.
"""
