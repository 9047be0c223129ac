"""Sizes that compiled code and its callers share."""

from __future__ import annotations

#: lanes of a vector: rows that they do not divide are NumPy's
LANES = 16
#: bytes of 32 columns of a quantised row, and where its parts lie (quantised_rows.py)
RECORD = 96
REST, SCALE, SUMS, SCALED = 32, 64, 68, 80
#: steps of the second int8 in one of the first
FINER = 254
#: rows of a KV page, as luce.runtime.step.PAGE
PAGE = 64
#: most elements of a head, and most query heads of a KV head, that compiled attention takes
MOST_HEAD, MOST_GROUP = 512, 64
#: most elements of a head of gated DeltaNet that compiled code takes
MOST_DELTA_HEAD = 256
#: rows of x that gated DeltaNet convolves at a time, the vectors that each has in the thread's memory, and the bytes of
#: its factors: keys, queries and 16 rows of a state of 128 take 24 KB
DELTA_BLOCK, DELTA_VECTORS, DELTA_FACTORS = 16, 5, 16
#: bytes of that memory: a state, vectors and factors of a block's rows, and two sums of 16 rows, lane by lane
DELTA_SCRATCH = 4 * MOST_DELTA_HEAD * (MOST_DELTA_HEAD + DELTA_BLOCK * DELTA_VECTORS)
DELTA_SCRATCH += DELTA_BLOCK * DELTA_FACTORS + 2 * LANES * 64
#: most rows of a draft tree, as luce.runtime.step.MAX_TREE_ROWS
TREE_ROWS = 16
#: rows of a part of what is computed row by row
ROWS = 8
#: most columns of 16 weight rows that are unpacked at a time; where their scales and minimums lie (unpack.py)
SLICE = 256
SCALES = SLICE * 16
MINIMUMS = SCALES + SLICE // 16 * 64
UNPACKED_BYTES = MINIMUMS + SLICE // 16 * 64
