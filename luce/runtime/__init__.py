"""Devices: what holds arrays and runs kernels.

Here: the Device interface (device.py), NumPy behind it (host.py), CuPy for CUDA and HIP behind it (gpu.py), the
driver's few calls by ctypes (driver.py), copies from device to device (transfer.py), kernel sources and their
variants (kernels.py), the vendors' run-time compilers (compiler.py), names to devices (open.py). Not here: what a
kernel computes (ops) and where layers go (backend). Called by ops, layers, backend and `luce doctor`.
"""
