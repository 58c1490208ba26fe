"""Which class a failed load belongs to, and what its message shows."""

from __future__ import annotations

import httpx
import pytest
import torch
from huggingface_hub import constants, errors

from workers.loading.failure import classify
from workers.loading.source import DownloadFailed, SourceError


def hub_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """An error of the hub client as a server's answer makes it."""
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/x"))
    return kind(f"{status} Client Error", response=response)  # type: ignore[arg-type]  # the client vendors httpx


def refused() -> httpx.ConnectError:
    """An error of the hub client with the system's reason behind it."""
    error = httpx.ConnectError("[Errno 111] Connection refused")
    error.__cause__ = ConnectionRefusedError(111, "Connection refused")
    return error


@pytest.mark.parametrize(
    ("error", "error_class", "retry_after_s"),
    [
        (hub_error(errors.GatedRepoError, 403), "GATED", None),
        (hub_error(errors.HfHubHTTPError, 403), "GATED", None),
        (hub_error(errors.RepositoryNotFoundError, 404), "NOT_FOUND", None),
        (hub_error(errors.RevisionNotFoundError, 404), "NOT_FOUND", None),
        (hub_error(errors.HfHubHTTPError, 503), "NETWORK", 30.0),
        (hub_error(errors.HfHubHTTPError, 429), "NETWORK", 30.0),
        (FileNotFoundError("no such file"), "NOT_FOUND", None),
        (SourceError("no package", "DEPENDENCY"), "DEPENDENCY", None),
        (ModuleNotFoundError("No module named 'sentencepiece'"), "DEPENDENCY", None),
        (ValueError("Transformers does not recognize this architecture"), "DEPENDENCY", None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "OOM", 60.0),
        (MemoryError(), "OOM", 60.0),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            "OOM",
            60.0,
        ),
        (ConnectionResetError("reset"), "NETWORK", 30.0),
        (TimeoutError("timed out"), "NETWORK", 30.0),
        (httpx.ConnectError("no route"), "NETWORK", 30.0),
        (RuntimeError("size mismatch"), "UNKNOWN", None),
    ],
)
def test_the_class_of_a_failure(error: Exception, error_class: str, retry_after_s: float | None) -> None:
    found = classify(error)
    assert (found.error_class, found.retry_after_s, found.permanent) == (
        error_class,
        retry_after_s,
        retry_after_s is None,
    )


@pytest.mark.parametrize(("offline", "error_class"), [(True, "NOT_FOUND"), (False, "NETWORK")])
def test_a_file_missing_from_the_cache_is_temporary_only_with_a_network(
    monkeypatch: pytest.MonkeyPatch, offline: bool, error_class: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    assert classify(errors.LocalEntryNotFoundError("not in the cache")).error_class == error_class


def test_the_cause_behind_a_wrapping_error_decides() -> None:
    wrapped = OSError("could not load the model")
    wrapped.__cause__ = hub_error(errors.GatedRepoError, 403)
    assert classify(wrapped).error_class == "GATED"


def test_a_ring_of_causes_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert classify(first).message == "first"


def test_the_message_is_one_short_line_without_directories() -> None:
    text = (
        "cannot read /srv/models/secret-place/model.safetensors: bad\nsecond line with a stack " + "x" * 999
    )
    found = classify(RuntimeError(text))
    assert found.message == "cannot read model.safetensors: bad"
    assert len(classify(RuntimeError("y" * 999)).message) == 300
    assert classify(RuntimeError()).message == "RuntimeError"


@pytest.mark.parametrize(
    ("cause", "error_class", "told"),
    [
        (hub_error(errors.GatedRepoError, 403), "GATED", "hub.example:8443 refuses org/m: accept its terms"),
        (hub_error(errors.HfHubHTTPError, 401), "GATED", "set HF_TOKEN"),
        (hub_error(errors.RepositoryNotFoundError, 401), "NOT_FOUND", "hub.example:8443 has no such"),
        (hub_error(errors.HfHubHTTPError, 503), "NETWORK", "hub.example:8443 (it answers 503)"),
        (hub_error(errors.HfHubHTTPError, 407), "NETWORK", "HTTPS_PROXY"),
        (httpx.ConnectError("no route"), "NETWORK", "hub.example:8443 (ConnectError); ways out: HTTPS_PROXY"),
        (refused(), "NETWORK", "hub.example:8443 (Connection refused); ways out: HTTPS_PROXY"),
        (OSError(28, "No space left on device"), "UNKNOWN", "No space left on device"),
    ],
)
def test_a_failed_download_names_the_host_and_the_ways_out_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, error_class: str, told: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://me:secret@hub.example:8443/path")
    failed = DownloadFailed("org/m")
    failed.__cause__ = cause
    found = classify(failed)
    assert (found.error_class, told in found.message) == (error_class, True), found
    assert "secret" not in found.message and "path" not in found.message


def test_messages_of_transformers_are_told_by_what_to_do() -> None:
    code = ValueError(
        "The repository m contains custom code which must be executed to load the model.\nYou can"
    )
    assert (classify(code).error_class, classify(code).permanent) == ("DEPENDENCY", True)
    assert classify(code).message.endswith("which runs only with worker.trust_remote_code")
    sizes = classify(RuntimeError("You set `ignore_mismatched_sizes` to `False`, thus raising an error."))
    assert sizes.message == "config.json does not fit the weights: it describes tensors of other sizes"
    layer, weights = torch.nn.Linear(2, 3), torch.nn.Linear(4, 3).state_dict()
    with pytest.raises(RuntimeError) as unfitting:
        layer.load_state_dict(weights)
    assert classify(unfitting.value).message == (
        "the configuration does not fit the weights: weight is [3, 4] in the weights and [3, 2] by it"
    )


def test_a_message_keeps_no_secret_of_an_address_or_a_token() -> None:
    found = classify(RuntimeError("401 for url https://me:secret@mirror.example/x with hf_abcdefghijklmn"))
    assert found.message == "401 for url https://mirror.example/x with "
