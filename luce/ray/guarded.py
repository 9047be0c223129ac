"""The program that a child begins as: `python -m luce.ray.guarded PARENT COMMAND...` becomes COMMAND, which the kernel
kills when the thread of PARENT that started it ends."""

from __future__ import annotations

import os
import sys

from luce.ipc.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
