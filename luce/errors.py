"""The error tree. A class carries the HTTP status, the API's error type and code, and the process exit code.

    LuceError
    ├── UsageError             a flag, a configuration key, a command line  exit 2
    ├── ModelError             a GGUF file or the model in it               exit 3
    │   ├── FormatError        the bytes are not a valid GGUF file
    │   ├── NotDownloadedError the name is known, its file is not here yet
    │   └── UnsupportedError   valid, but Luce cannot run it; or it does not fit
    ├── DeviceError            driver, device, memory, kernel               exit 4
    │   └── OutOfMemoryError   a device has too little memory               exit 3
    ├── ListenError            the address to listen on is taken            exit 5
    ├── BackendError           a shard failed while a step ran              HTTP 500, exit 6
    │   └── ShardLostError     a shard's process is gone, with all its state
    ├── ServerError            the server of a command failed              exit 7
    │   └── UnreachableError   where a model comes from does not answer
    └── RequestError           an invalid request                           HTTP 400
        ├── MalformedError     not HTTP/1.1
        ├── ContextError       the prompt does not fit the context
        ├── AuthError          missing or wrong key                         HTTP 401
        ├── ForbiddenError     this client may not do it                    HTTP 403
        ├── NotFoundError      unknown path or model                        HTTP 404
        ├── MethodError        wrong method for the path                    HTTP 405
        ├── BodyTimeoutError   the body did not arrive in time              HTTP 408
        ├── TooLargeError      the body exceeds the limit                   HTTP 413
        ├── GrammarLimitError  a reply's grammar leaves no token in time    HTTP 422
        ├── MediaTypeError     the body is not JSON, or encoded differently HTTP 415
        ├── ExpectationError   an Expect header that Luce does not know     HTTP 417
        ├── NotSupportedError  a part of HTTP that Luce does not do         HTTP 501
        ├── QueueFullError     the bounded queue is full                    HTTP 503
        ├── UnavailableError   loading or draining                          HTTP 503
        ├── DeadlineError      deadline passed before the first token       HTTP 504
        └── VersionError       neither HTTP/1.0 nor HTTP/1.1                HTTP 505

Every message names the flag, field, file or tensor. Code decides by class and attributes, never by the message.
"""

from __future__ import annotations

# Files and clients may be quoted: a message stays readable, and a log small, whatever they hold.
_LONGEST, _HEAD, _TAIL = 2000, 1500, 400


class LuceError(Exception):
    """Base of all errors that Luce raises on purpose; `str(error)` is one line for the user.

    A message of more than 2000 characters loses its middle.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    exit_code = 1

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_HEAD]} ... {message[-_TAIL:]}")
        self.param = param
        if code is not None:
            self.code = code


class UsageError(LuceError):
    """A flag, an environment variable or a configuration key has no valid value."""

    status = 400
    type = "invalid_request_error"
    exit_code = 2


class ModelError(LuceError):
    """A model file cannot be served."""

    exit_code = 3


class FormatError(ModelError):
    """The bytes of a file violate the GGUF format."""


class NotDownloadedError(ModelError):
    """The file of a model has not been downloaded yet."""


class UnsupportedError(ModelError):
    """The file is valid, but Luce cannot run the model, or the model does not fit."""


class DeviceError(LuceError):
    """A driver, a device or a kernel failed."""

    code = "engine_error"
    exit_code = 4


class OutOfMemoryError(DeviceError):
    """A device has too little free memory."""

    # It happens at the start, if the model does not fit: like a ModelError, a retry does not help.
    exit_code = ModelError.exit_code


class BackendError(LuceError):
    """A shard failed while a step ran."""

    code = "engine_error"
    exit_code = 6


class ShardLostError(BackendError):
    """The process of a shard is gone, with the state of every sequence in it."""


class RequestError(LuceError):
    """The request cannot be answered as it is."""

    status = 400
    type = "invalid_request_error"


class MalformedError(RequestError):
    """What the client sent is not HTTP/1.1."""

    code = "malformed_http"


class ContextError(RequestError):
    """The prompt, or the prompt with its reply, exceeds the context length.

    `tokens` of the prompt (or more) exceed a `context` of so many; None where they are not known.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, tokens: int | None = None, context: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.context = context


class AuthError(RequestError):
    """The key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """The path or the model does not exist."""

    status = 404
    type = "not_found_error"


class TooLargeError(RequestError):
    """The request body exceeds the limit."""

    status = 413
    type = "request_too_large"
    code = "request_too_large"


class MediaTypeError(RequestError):
    """The body is not JSON, or in an unknown encoding; `accepted` lists those that Luce knows if that is the reason."""

    status = 415
    code = "unsupported_media_type"

    def __init__(self, message: str, *, accepted: str = "") -> None:
        super().__init__(message)
        self.accepted = accepted


class ExpectationError(RequestError):
    """The Expect header asks for something that Luce does not know."""

    status = 417
    code = "expectation_failed"


class GrammarLimitError(RequestError):
    """The grammar that a reply follows has become too large or too slow, or allows no token any more."""

    status = 422
    code = "grammar_limit"


class QueueFullError(RequestError):
    """The waiting queue is full; try again after `retry_after` seconds."""

    status = 503
    type = "server_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(RequestError):
    """The server is loading or draining, or a shard is lost for good; try again after `retry_after` seconds."""

    status = 503
    type = "server_error"
    code = "loading"

    def __init__(self, message: str, *, code: str = "loading", retry_after: int = 1) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class ForbiddenError(RequestError):
    """The client may not make this request."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class MethodError(RequestError):
    """The path does not support this method; `allow` lists those that it supports."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTimeoutError(RequestError):
    """The body did not arrive in time."""

    status = 408
    type = "timeout_error"
    code = "body_timeout"


class NotSupportedError(RequestError):
    """A part of HTTP that Luce does not do: proxies and other protocols."""

    status = 501
    code = "not_supported"


class DeadlineError(RequestError):
    """The deadline of the request passed before its first token."""

    status = 504
    type = "timeout_error"
    code = "deadline"


class VersionError(RequestError):
    """The request is neither HTTP/1.0 nor HTTP/1.1."""

    status = 505
    code = "http_version_not_supported"


class ListenError(LuceError):
    """The server cannot listen on the address."""

    exit_code = 5


class ServerError(LuceError):
    """The server that a command talks with cannot be reached, or reports an error."""

    exit_code = 7


class UnreachableError(ServerError):
    """Where the file of a model comes from does not answer now, or not this often; what is on this machine can still be
    used, and a retry may help."""
