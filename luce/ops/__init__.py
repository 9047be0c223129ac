"""Operations on device arrays: one file per kernel topic with checks, launch shape and NumPy reference.

An op takes the device first. On a host device it runs its NumPy reference; elsewhere it launches kernels of the same
topic (`ops/norm.py` and `kernels/norm.cu`). Matrices are [rows, features] with unit stride along the features; the row
stride may be larger, so that a slice of a fused product can be passed without a copy. Rows are independent: no op's
sum for one row depends on how many rows there are, except where a docstring says so.
"""
