"""Devices, which hold arrays and run kernels.

Here: the Device interface, its implementations on NumPy and on CuPy, the few driver and library calls by ctypes,
kernel sources and their compilation, copies between devices, and the arrays of a step. Not here: what a kernel computes
(luce.ops) and which device gets which layers (luce.backend). Called by luce.ops, luce.layers, luce.shard, luce.remote,
luce.backend, luce.bench and `luce doctor`.

device        the interface: arrays, copies, events, kernel launches
host          the interface on NumPy
cpu           the same with compiled kernels (luce.cpu_kernels); cpu_graph captures its steps
gpu           the interface on CuPy, for CUDA and HIP; with gpu_kernels, gpu_stream, cupy_module, graph (CUDA graphs),
              staging (file to device), pinned (host memory), blas (cublaslt, hipBLAS)
driver        the vendors' drivers by ctypes; library finds shared libraries
power         power limits of GPUs
kernels       kernel sources, their variants and options; compiler compiles and caches them
switch_interval  how long threads that read or decode hold the interpreter
transfer      copies of activations from device to device
open          device names to devices
simulated     devices for tests, of which simulated_file says how fast they are
step, draws   the arrays of a step; how tokens are drawn
"""
