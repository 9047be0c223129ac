"""What the name of a model means."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from luce.config.environment import environment
from luce.errors import UsageError
from luce.hub.packaged import ALIASES, PackagedModel

_DEFAULT_REVISION = "main"
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(.+))?")
_HOSTS = ("huggingface.co", "hf.co")


@dataclass(frozen=True)
class RepositoryName:
    """GGUF files of one repository of the Hugging Face hub."""

    #: ORG/REPO
    repository: str
    #: a quant (`Q4_K_M`) or the name of a file in the repository; empty: a default
    wanted: str = ""
    #: a branch, a tag or a commit
    revision: str = _DEFAULT_REVISION

    def __str__(self) -> str:
        return self.repository + (f":{self.wanted}" if self.wanted else "")


@dataclass(frozen=True)
class WebName:
    """A GGUF file behind a URL that is not the hub's."""

    url: str

    @property
    def file(self) -> str:
        """The name of the file."""
        return Path(urlsplit(self.url).path).name


def parse_name(text: str) -> Path | WebName | RepositoryName | PackagedModel:
    """What a name means, in this order: a file that exists; a URL, or hf.co/ORG/REPO[:QUANT]; an alias; a path; and
    ORG/REPO[:QUANT], whose QUANT may also be the name of a file there.

    Raises UsageError if it is none of them.
    """
    path = Path(os.path.expanduser(text))
    if path.is_file():
        return path
    if text.startswith(("http://", "https://")):
        return _of_url(text)
    host, _, rest = text.partition("/")
    if host in _HOSTS:
        if match := _REPOSITORY.fullmatch(rest):
            return RepositoryName(match[1], match[2] or "")
        return _of_hub_url(text, f"https://{text}")
    if alias := ALIASES.get(text.lower()):
        return alias
    match = _REPOSITORY.fullmatch(text)
    explicit = text.startswith(("/", "./", "../", "~")) or (text.endswith(".gguf") and ":" not in text)
    if explicit or (text and path.exists()) or (os.sep in text and match is None):
        return path
    if match is not None:
        return RepositoryName(match[1], match[2] or "")
    known = ", ".join(sorted(ALIASES))
    raise UsageError(
        f"model {text!r}: no such file, and neither an alias ({known}) nor ORG/REPO of the Hugging Face hub",
        param="model",
    )


def _of_url(text: str) -> WebName | RepositoryName:
    try:
        parts = urlsplit(text)
        endpoint = urlsplit(environment("HF_ENDPOINT") or "")
    except ValueError as error:
        raise UsageError(f"model {text!r}: {error}", param="model") from None
    if not parts.hostname:
        raise UsageError(f"model {text!r}: the URL names no host", param="model")
    if parts.hostname in _HOSTS or parts.netloc == endpoint.netloc:
        return _of_hub_url(text, text)
    if not parts.path.endswith(".gguf"):
        raise UsageError(f"model {text!r}: the URL of a model ends in .gguf", param="model")
    return WebName(text)


def _of_hub_url(text: str, url: str) -> RepositoryName:
    """The repository, and perhaps the file, of a page of the hub."""
    from huggingface_hub import parse_hf_uri
    from huggingface_hub.errors import HfUriError

    try:
        found = parse_hf_uri(url, environment("HF_ENDPOINT"))
    except HfUriError as error:
        raise UsageError(f"model {text!r}: {error}", param="model") from None
    if found.type != "model":
        raise UsageError(f"model {text!r}: is a {found.type} of the hub, not a model", param="model")
    if found.path_in_repo and not found.path_in_repo.endswith(".gguf"):
        raise UsageError(f"model {text!r}: {found.path_in_repo} is not a .gguf file", param="model")
    return RepositoryName(found.id, found.path_in_repo, found.revision or _DEFAULT_REVISION)
