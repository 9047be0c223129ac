"""Error bodies in OpenAI's and Anthropic's form, and the errors that requests raise most."""

from __future__ import annotations

from typing import Any

from luce.errors import ContextError, LuceError, NotFoundError, RequestError

_ANTHROPIC_TYPES = {400: "invalid_request_error", 413: "request_too_large", 503: "overloaded_error"}


def openai_error(error: LuceError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    message = str(error)
    if isinstance(error, ContextError):
        # langchain-openai looks for the code in the message, which is all that openai 3 puts into the error's text.
        message += f" ({error.code})"
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_error(error: LuceError, request_id: str) -> dict[str, Any]:
    """The error body of the paths that Anthropic's clients use."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else error.type)
    message = str(error)
    if isinstance(error, ContextError) and error.tokens is not None:
        # Claude Code recognises these words, and reads both numbers.
        message = f"prompt is too long: {error.tokens} tokens > {error.context} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def unsupported(param: str, why: str) -> RequestError:
    """400 for a known field with a value that Luce does not support."""
    return RequestError(f"{param}: {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> RequestError:
    """400 for a field with an invalid value."""
    return RequestError(f"{param}: {why}", param=param, code="invalid_value")


def unknown_model(name: str) -> NotFoundError:
    """404 for a model that this server does not serve."""
    return NotFoundError(f"this server does not serve the model {name!r}", param="model", code="model_not_found")
