"""Devices: what holds arrays and runs kernels.

Here: the Device interface (device.py), NumPy behind it (host.py), CuPy for CUDA and HIP behind it (gpu.py), the
driver's few calls by ctypes (driver.py), captured graphs (graph.py), copies from a file's memory to a device
(staging.py) and from device to device (transfer.py), kernel sources and their variants (kernels.py), the vendors'
run-time compilers (compiler.py) and libraries (library.py), names to devices (open.py), a step's arrays (step.py). Not
here: what a kernel computes (ops) and where layers go (backend). Called by ops, layers, backend, bench and
`luce doctor`.
"""
