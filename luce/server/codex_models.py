"""The model in the form of Codex's catalogue of models."""

from __future__ import annotations

from typing import Any

from luce.api import Model
from luce.server.prepare import names
from luce.text.effort import efforts

# Efforts that Codex knows.
_EFFORTS = {
    "none": "Replies without reasoning",
    "minimal": "Hardly any reasoning",
    "low": "Short reasoning",
    "medium": "Reasoning of medium length",
    "high": "Long reasoning",
    "xhigh": "The longest reasoning",
}
_INSTRUCTIONS = (
    "You are a coding agent that works in the user's repository through the tools of this session. Read the code "
    "before you change it, make the smallest change that does what the user asks, and run the project's checks where "
    "there are any. Keep going until the task is done; then say in a few sentences what you changed, and what is left "
    "open."
)
# Bytes of a command's output that Codex keeps, the figure of its own models.
_OUTPUT_BYTES = 10_000


def codex_entry(model: Model) -> dict[str, Any]:
    """The model as one of Codex's. Codex reads the whole list only if no field is missing."""
    name = names(model)[0]
    levels = [effort for effort in efforts(model.chat) if effort in _EFFORTS]
    reasons = len(levels) > 1
    return {
        "slug": name,
        "display_name": name,
        "description": f"{name}, served by Luce",
        "default_reasoning_level": "medium" if reasons else None,
        "supported_reasoning_levels": [
            {"effort": effort, "description": _EFFORTS[effort]} for effort in levels if reasons
        ],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "upgrade": None,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": reasons,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": _OUTPUT_BYTES},
        "supports_parallel_tool_calls": False,
        "context_window": model.context,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
