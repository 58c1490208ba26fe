"""The gate: which request gets in with which key, whatever its head looks like."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.access import api_keys
from frontend.access.api_keys import KeyEntry
from frontend.access.gate import Gate, Grant, decision_of
from frontend.protocols.registry import protocols
from ipc.errors import AccessRefused, Forbidden, RateLimited, Unauthenticated

INFER, ADMIN, BOTH, SLOW, STRANGER = (api_keys.fresh() for _ in range(5))
ENTRIES = (
    KeyEntry("infer", api_keys.hashed(INFER), share=3),
    KeyEntry("admin", api_keys.hashed(ADMIN), ("admin",)),
    KeyEntry("both", api_keys.hashed(BOTH), ("infer", "admin")),
    KeyEntry("slow", api_keys.hashed(SLOW), requests_per_s=0.01),
)
need_of = protocols().need_of
Headers = list[tuple[bytes, bytes]]


def granted(gate: Gate, scope: dict[str, Any]) -> Grant:
    """Who calls the path of a scope."""
    return gate.grant_for(scope, need_of(scope["path"], gate.open_metrics))


def scope(
    path: str, headers: Headers | None = None, kind: str = "http", client: Any = ("10.0.0.1", 9)
) -> dict[str, Any]:
    """An ASGI scope."""
    return {"type": kind, "path": path, "headers": headers or [], "client": client}


def bearer(key: str) -> Headers:
    """The header that sends a key."""
    return [(b"authorization", f"Bearer {key}".encode())]


def outcome(path: str, headers: Headers) -> type[AccessRefused] | None:
    """The error that refuses a request, or None."""
    asked = scope(path, headers)
    Gate(ENTRIES).admit(asked, need_of(path))
    refusal = decision_of(asked).refusal
    return type(refusal) if refusal else None


PATHS = {
    "open": (
        "/",
        "/healthz",
        "/livez",
        "/readyz",
        "/ping",
        "/health",
        "/metrics",
        "/docs",
        "/docs/",
        "/docs/swagger-ui.css",
        "/redoc",
        "/openapi.json",
        "/api-doc/openapi.json",
    ),
    "infer": (
        "/v1/encode/m",
        "/v1/models",
        "/v1/embeddings",
        "/v1/rerank",
        "/ws/status",
        "/nowhere",
        "/v1/admin",
        "*",
    ),
    "admin": ("/v1/admin/load/m", "/v1/admin/"),
}
WRONG = bearer(STRANGER)
EXPECTED: dict[str, tuple[tuple[Headers, type[AccessRefused] | None], ...]] = {
    "open": (([], None), (WRONG, None), (bearer(ADMIN), None), ([(b"authorization", b"Basic eA==")], None)),
    "infer": (
        ([], Unauthenticated),
        (WRONG, Unauthenticated),
        (bearer(INFER), None),
        (bearer(BOTH), None),
        (bearer(ADMIN), Forbidden),
    ),
    "admin": (
        ([], Unauthenticated),
        (WRONG, Forbidden),
        (bearer(INFER), Forbidden),
        (bearer(ADMIN), None),
        (bearer(BOTH), None),
    ),
}


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [(path, *case) for need, cases in EXPECTED.items() for path in PATHS[need] for case in cases],
)
def test_each_path_asks_for_its_scope(
    path: str, headers: Headers, expected: type[AccessRefused] | None
) -> None:
    assert outcome(path, headers) is expected


def test_metrics_need_a_key_when_they_are_not_open() -> None:
    assert need_of("/metrics", open_metrics=False) == "infer"


def test_the_grant_says_who_calls_and_nothing_of_the_secret() -> None:
    grant = granted(Gate(ENTRIES), scope("/v1/models", bearer(INFER)))
    assert (grant.name, grant.caller, grant.share, grant.admin) == ("infer", api_keys.id_of(INFER), 3, False)
    assert INFER.split("_", 2)[2] not in repr(grant)


SECRET = INFER.split("_", 2)[2]
HOSTILE: list[Headers] = [
    [(b"authorization", b"")],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"Bearer ")],
    [(b"authorization", INFER.encode())],
    [(b"authorization", b"Basic " + INFER.encode())],
    [(b"authorization", b"Bearer " + INFER.encode() + b"x")],
    [(b"authorization", b"Bearer " + INFER[:-1].encode())],
    [(b"authorization", b"Bearer " + INFER.upper().encode())],
    [(b"authorization", b"Bearer " + INFER.encode() + b", Bearer " + INFER.encode())],
    [(b"authorization", b"Bearer " + SECRET.encode())],
    [(b"authorization", b"Bearer pk_" + b"0" * 16 + b"_" + SECRET.encode())],
    [(b"authorization", b"Bearer " + b"x" * 10_000)],
    [(b"authorization", b"Bearer \xff\xfe")],
    [(b"authorization", "Bearer pk_ü".encode())],
    [(b"authorization", b"Bearer \x00")],
    [*bearer(INFER), *bearer(STRANGER)],
    [*bearer(STRANGER), *bearer(INFER)],
    [*bearer(INFER), (b"x-api-key", STRANGER.encode())],
    [*bearer(INFER), (b"authorization", b"Basic eA==")],
    [(b"sec-websocket-protocol", b"penstock.key." + INFER.encode())],
    [(b"proxy-authorization", b"Bearer " + INFER.encode())],
    [(b"cookie", b"token=" + INFER.encode())],
]


@pytest.mark.parametrize("headers", HOSTILE)
def test_a_head_that_is_not_exactly_one_good_key_lets_nobody_in(headers: Headers) -> None:
    asked = scope("/v1/models", headers)
    with pytest.raises(Unauthenticated) as caught:
        granted(Gate(ENTRIES), asked)
    assert SECRET not in caught.value.message
    assert len(caught.value.message) < 200
    assert outcome("/v1/admin/load/m", headers) in (Unauthenticated, Forbidden)


@pytest.mark.parametrize(
    "headers",
    [
        WRONG,
        [(b"authorization", b"Basic eA==")],
        [(b"authorization", b"Bearer " + b"x" * 10_000)],
        [*bearer(INFER), *bearer(STRANGER)],
        [*bearer(ADMIN), (b"x-api-key", STRANGER.encode())],
    ],
)
def test_a_key_that_was_sent_and_is_wrong_is_told_from_no_key(headers: Headers) -> None:
    with pytest.raises(Unauthenticated) as caught:
        granted(Gate(ENTRIES), scope("/v1/models", headers))
    assert caught.value.presented and not caught.value.detail
    assert outcome("/v1/admin/load/m", headers) is Forbidden


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"bearer " + INFER.encode())],
        [(b"authorization", b"BEARER   " + INFER.encode() + b" ")],
        [(b"x-api-key", INFER.encode())],
        [*bearer(INFER), (b"x-api-key", INFER.encode())],
    ],
)
def test_the_same_key_in_other_spellings_lets_in(headers: Headers) -> None:
    assert outcome("/v1/models", headers) is None


def test_a_websocket_may_offer_the_key_as_a_subprotocol() -> None:
    gate = Gate(ENTRIES)
    offer = f"penstock.status, penstock.key.{INFER}".encode()
    assert (
        granted(gate, scope("/ws/status", [(b"sec-websocket-protocol", offer)], "websocket")).name == "infer"
    )
    assert granted(gate, scope("/ws/status", bearer(INFER), "websocket")).name == "infer"
    for headers in (
        [],
        [(b"sec-websocket-protocol", b"penstock.status")],
        [(b"sec-websocket-protocol", b"penstock.key.")],
    ):
        with pytest.raises(Unauthenticated):
            granted(gate, scope("/ws/status", headers, "websocket"))


def test_an_exhausted_rate_refuses_that_key_alone_and_still_names_it() -> None:
    gate = Gate(ENTRIES)
    assert granted(gate, scope("/v1/models", bearer(SLOW))).name == "slow"
    asked = scope("/v1/models", bearer(SLOW))
    assert not gate.admit(asked, need_of(asked["path"]))
    found = decision_of(asked)
    assert isinstance(found.refusal, RateLimited) and found.grant.name == "slow"
    assert found.refusal.retry_after_s is not None and 90 < found.refusal.retry_after_s <= 100
    assert granted(gate, scope("/v1/models", bearer(INFER))).name == "infer"
    assert granted(gate, scope("/healthz", bearer(SLOW))).name == "", "open paths are not counted"


def test_a_request_that_lacks_the_scope_uses_up_no_rate() -> None:
    gate = Gate(ENTRIES)
    for _ in range(3):
        with pytest.raises(Forbidden):
            granted(gate, scope("/v1/admin/load/m", bearer(SLOW)))
    assert granted(gate, scope("/v1/models", bearer(SLOW)))


def test_a_scope_that_was_never_checked_is_refused() -> None:
    assert isinstance(decision_of(scope("/v1/models")).refusal, Unauthenticated)


@pytest.mark.parametrize(
    "path", ["register/r//key/0/4", "cudaregister/r/64/0", "unregister/r", "unregisterall"]
)
def test_shared_memory_of_trtis_needs_admin_but_for_its_status(path: str) -> None:
    assert need_of(f"/api/sharedmemorycontrol/{path}", open_metrics=True) == "admin"
    assert need_of("/api/sharedmemorycontrol/status", open_metrics=True) == "infer"
