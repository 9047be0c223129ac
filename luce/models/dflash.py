"""Names that published DFlash draft files have in common with the families of their targets."""

from __future__ import annotations

#: `general.architecture` of draft files, and whether rows of the target's embedding get the target's own factor before
#: they enter the draft: the one implementation that reads gemma4-dflash-draft files multiplies them, rows of other
#: drafts are plain
ARCHITECTURES = {
    "qwen35-dflash-draft": False,
    "dflash-draft": False,
    "gemma4-dflash-draft": True,
}

#: keys of single families that change nothing of what a draft computes
IGNORED_KEYS = frozenset({"dflash.laguna"})
