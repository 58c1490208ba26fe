"""Classify a failed load, for the state of the model.

    GATED       the hub refuses this token          permanent
    NOT_FOUND   no such model, revision or file     permanent
    DEPENDENCY  a package or version is missing     permanent
    OOM         not enough memory                   again after 60 s
    NETWORK     the hub cannot be reached           again after 30 s
    CHANGED     files changed while they were read  again after 2 s
    FINGERPRINT the model gives other values        permanent
    UNKNOWN     anything else                       permanent

Libraries wrap the real reason, so the whole chain of causes is examined, the outermost first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from workers import foreign
from workers.loading.source import DownloadFailed, SourceError

ErrorClass = Literal[
    "GATED", "NOT_FOUND", "DEPENDENCY", "OOM", "NETWORK", "CHANGED", "FINGERPRINT", "UNKNOWN"
]

RETRY_AFTER_S: dict[str, float] = {"OOM": 60.0, "NETWORK": 30.0, "CHANGED": 2.0}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
_OWN_CODE = ("contains custom code which must be executed", "requires you to execute")
_TOO_NEW = ("does not recognize this architecture", *_OWN_CODE)
_MEANINGS = (
    (_OWN_CODE, "the model needs code of its own repository, which runs only with worker.trust_remote_code"),
    (
        ("ignore_mismatched_sizes",),
        "config.json does not fit the weights: it describes tensors of other sizes",
    ),
)
"""The meaning of messages of transformers on this server."""
_SIZES = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\((\[[\d, ]*\])\) from checkpoint, "
    r"the shape in current model is torch\.Size\((\[[\d, ]*\])\)"
)
"""What torch says of tensors of a layer or of a model of other libraries."""
_COPY = (
    "a copied directory: `penstock models pull ID --to DIR` where there is a network, "
    "then `penstock serve DIR/ID` here"
)
_WAYS = f"HTTPS_PROXY (a proxy), HF_ENDPOINT (a mirror), or {_COPY}"
_DOWNLOAD = {
    "GATED": "{host} refuses {repo}: accept its terms there and set HF_TOKEN to a token of that account",
    "NOT_FOUND": "{host} has no such repository, revision or file of {repo}, or hides it from this HF_TOKEN",
    "NETWORK": "{repo} cannot be had from {host} ({reason}); ways out: " + _WAYS,
    "OFFLINE": "{repo} is not in the hub cache, and HF_HUB_OFFLINE forbids downloads; way out: " + _COPY,
}
"""Messages of failed downloads."""


class LoadFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a model is not loaded. `message` is one line for clients, without paths."""

    error_class: ErrorClass
    permanent: bool
    retry_after_s: float | None
    message: str


def classify(error: BaseException) -> LoadFailure:
    """The failure that `error` stands for."""
    error_class: ErrorClass = "UNKNOWN"
    reason = error.__cause__ or error if isinstance(error, DownloadFailed) else error
    for link in foreign.chain(error):
        known = next((name for name, matches in _RULES if matches(link)), None)
        if known is not None:
            error_class, reason = known, link
            break
    retry_after_s = RETRY_AFTER_S.get(error_class)
    return LoadFailure(
        error_class=error_class,
        permanent=retry_after_s is None,
        retry_after_s=retry_after_s,
        message=_download(error, error_class, reason) or _message(reason),
    )


def _download(error: BaseException, error_class: ErrorClass, reason: BaseException) -> str:
    """The message of a failed download with the ways out; empty for other failures."""
    failed = next((link for link in foreign.chain(error) if isinstance(link, DownloadFailed)), None)
    if failed is None:
        return ""
    kind = "OFFLINE" if error_class == "NOT_FOUND" and _offline() else error_class
    words = f"it answers {status}" if (status := _status(reason)) else _system_reason(error)
    return _DOWNLOAD.get(kind, "").format(host=failed.host, repo=failed.repo, reason=words)


def _system_reason(error: BaseException) -> str:
    """The system's words for a connection that failed, such as "Connection refused"; else the error's class."""
    links = list(foreign.chain(error))
    reasons = [link.strerror for link in links if isinstance(link, OSError) and link.strerror]
    return reasons[-1] if reasons else type(links[-1]).__name__


def _message(error: BaseException) -> str:
    """One line about an error, or its meaning on this server."""
    if sizes := _SIZES.search(foreign.text_of(error)):
        name, stored, built = sizes.groups()
        return (
            f"the configuration does not fit the weights: {name} is {stored} in the weights and {built} by it"
        )
    meaning = next((meaning for phrases, meaning in _MEANINGS if _says(error, *phrases)), None)
    return foreign.line_of(error) if meaning is None else meaning


def _named(error: BaseException, *names: str) -> bool:
    """Whether the error's class or one of its bases has one of the names; spares importing libraries."""
    return any(base.__name__ in names for base in type(error).__mro__)


def _says(error: BaseException, *phrases: str) -> bool:
    """Whether the message contains one of the phrases."""
    text = foreign.text_of(error).lower()
    return any(phrase in text for phrase in phrases)


def _status(error: BaseException) -> int:
    """HTTP status of a hub error, 0 for others."""
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _is_own(name: str) -> Callable[[BaseException], bool]:
    """Matches a SourceError of one class."""
    return lambda error: isinstance(error, SourceError) and error.error_class == name


def _is_gated(error: BaseException) -> bool:
    return _named(error, "GatedRepoError") or (
        _named(error, "HfHubHTTPError") and _status(error) in (401, 403) and not _is_missing(error)
    )


def _is_missing(error: BaseException) -> bool:
    if _named(error, "LocalEntryNotFoundError"):
        return _offline()
    names = ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "OfflineModeIsEnabled")
    return _named(error, *names) or isinstance(error, FileNotFoundError)


def _is_dependency(error: BaseException) -> bool:
    return isinstance(error, ImportError) or (isinstance(error, ValueError) and _says(error, *_TOO_NEW))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or _named(error, "OutOfMemoryError"):
        return True
    return isinstance(error, RuntimeError | OSError) and _says(error, *_OUT_OF_MEMORY)


def _is_network(error: BaseException) -> bool:
    names = ("LocalEntryNotFoundError", "TransportError", "RequestException", "ConnectError", "gaierror")
    refused = _named(error, "HfHubHTTPError") and (_status(error) in (407, 429) or _status(error) >= 500)
    return refused or _named(error, *names) or isinstance(error, ConnectionError | TimeoutError)


def _offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the hub client the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


# The first rule that matches decides.
_RULES: tuple[tuple[ErrorClass, Callable[[BaseException], bool]], ...] = (
    ("CHANGED", lambda error: _named(error, "FilesChanged")),
    ("DEPENDENCY", _is_own("DEPENDENCY")),
    ("NOT_FOUND", _is_own("NOT_FOUND")),
    ("UNKNOWN", _is_own("UNKNOWN")),
    ("DEPENDENCY", lambda error: _named(error, "UnknownAdapterError")),
    ("FINGERPRINT", lambda error: _named(error, "FingerprintMismatch")),
    ("GATED", _is_gated),
    ("OOM", _is_out_of_memory),
    ("NOT_FOUND", _is_missing),
    ("NETWORK", _is_network),
    ("DEPENDENCY", _is_dependency),
)
