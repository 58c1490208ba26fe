"""Hostile sessions at a real server: kept ones, a round of new ones, and with `make test-fuzz` many rounds.

After each round good requests are answered right and in time, the processes are the same, their descriptors and memory
are what they were, no lease is left, the log has no trouble, and no request got an answer that requests may not get.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import corpus, grpc_sessions, http_sessions
from tests.fuzz.exploring import SEED
from tests.fuzz.playing import Played, play, statuses_of
from tests.fuzz.session import Session, load
from tests.fuzz.watching import DOCUMENTED, Watch
from tests.harness.rpc import address_of, grpc_settings
from tests.harness.server import Server, serving, wait_until
from tests.tiny.programs import SCRIPTED, write_repository

MODELS = ("add_sub", "add_sub_string", "identity_bytes", "classifier_nhwc")
ROUNDS = int(os.environ.get("TEST_FUZZ_ROUNDS", "20"))
FIRST = int(os.environ.get("TEST_FUZZ_FIRST_ROUND", "1"))
"""Rounds of `make test-fuzz`, and the number of the first: a round follows from the seed and its number alone."""
SESSIONS, FEW = 300, 60
"""Sessions of a round, there and in the default suite."""
PATIENT_S = 3.0
"""How long the answer to a kept session may take."""
TARGET = "sessions"
MOST_KEPT = 5
SETTINGS = {
    "repository.allow_python": "true",
    "shared_memory.enabled": "true",
    "server.admin": "false",
    "server.header_deadline_s": 6,
    "server.keepalive_s": 8,
    "server.body_floor_after_s": 5,
    "server.write_stall_s": 3,
    "limits.max_body_bytes": 4 << 20,
    "limits.request_timeout_s": 20,
    "arena.inline_bytes": 64,
    "arena.input_inline_bytes": 512,
}
"""Short deadlines, and tensors of a few hundred bytes in shared memory already."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Watch]]:
    """A server that has seen all kept sessions, and what it was like then."""
    place = tmp_path_factory.mktemp("sessions")
    restricted = place / "restricted.yaml"
    restricted.write_text("[{apis: [logging], header: x-log-secret, value: nobody-knows-this-one}]")
    restricted.chmod(0o600)
    settings = grpc_settings(**SETTINGS) | {
        "repository.dirs": write_repository(place / "models", MODELS, SCRIPTED),
        "kserve.restricted_file": restricted,
    }
    with serving(place, ("fake/echo", "fake/score"), settings) as server:
        play([session for _, session in kept()], ports(server))
        yield server, Watch(server)


def kept() -> list[tuple[Path, Session]]:
    """The sessions of the corpus."""
    return [(path, load(path.read_bytes())) for path in corpus.files(TARGET)]


def ports(server: Server) -> dict[str, int]:
    """Where each door is."""
    return {"http": server.port, "grpc": int(address_of(server).rpartition(":")[2])}


def drawn(number: int, count: int) -> list[Session]:
    """The sessions of a round."""
    chance = Random(f"{SEED}/{number}")
    made = [(http_sessions if chance.random() < 0.6 else grpc_sessions).drawn(chance) for _ in range(count)]
    doors = {"http": "grpc", "grpc": "http"}
    return [Session(doors[one.door], one.steps) if chance.random() < 0.04 else one for one in made]


def wrong(session: Session, played: Played) -> str:
    """What is wrong with the answers to a session at the HTTP port; "" when nothing is."""
    if session.door != "http":
        return ""
    try:
        statuses = statuses_of(played.received, bodies=b"HEAD" not in session.sent)
    except ValueError as error:
        return str(error)
    return next((f"answered {code}" for code in statuses if code >= 500 and str(code) not in DOCUMENTED), "")


def smallest(session: Session, server: Server) -> Session:
    """The session with as few steps and bytes as still have a wrong answer."""

    def fails(parts: list[bytes]) -> bool:
        tried = load(b"\n".join(parts)) if any(part.startswith(b"door") for part in parts) else None
        return tried is not None and bool(wrong(tried, play([tried], ports(server))[0]))

    return load(b"\n".join(corpus.reduced(session.dump().splitlines(), fails)))


def run_round(server: Server, watch: Watch, sessions: Sequence[Session], where: str) -> Counter[int]:
    """Play the sessions and look at the server; statuses over HTTP. A session with a wrong answer is kept."""
    counts: Counter[int] = Counter()
    for session, played in zip(sessions, play(sessions, ports(server)), strict=True):
        if reason := wrong(session, played):
            path = corpus.keep(TARGET, smallest(session, server).dump())
            raise AssertionError(f"{where}: {reason}, kept as {path}: {played.received[-2000:]!r}")
        if session.door == "http":
            counts.update(statuses_of(played.received, bodies=b"HEAD" not in session.sent))
    if trouble := watch.trouble():
        raise AssertionError(f"{where}: {trouble}, kept as {keep_guilty(server, watch, sessions)}")
    try:
        watch.check()
    except BaseException as error:
        error.add_note(f"{where}; TEST_FUZZ_SEED and TEST_FUZZ_FIRST_ROUND play it again")
        raise
    return counts


def keep_guilty(server: Server, watch: Watch, sessions: Sequence[Session]) -> list[Path]:
    """Keep the fewest sessions found after which the log has trouble again."""

    def fails(some: list[Session]) -> bool:
        play(some, ports(server))
        return bool(watch.trouble())

    guilty = corpus.reduced(list(sessions), fails, tries=60)
    return [corpus.keep(TARGET, one.dump()) for one in guilty[:MOST_KEPT]]


@pytest.mark.timeout(180)
def test_kept_sessions_do_no_harm(watched: tuple[Server, Watch]) -> None:
    server, watch = watched
    found = kept()
    outcomes = play([one for _, one in found], ports(server), PATIENT_S)
    for (path, session), played in zip(found, outcomes, strict=True):
        assert not (reason := wrong(session, played)), f"{path}: {reason}"
        if session.door == "http" and not path.name.startswith(("found-", "preface", "websocket")):
            if not statuses_of(played.received):
                # A busy machine may be silent for longer than a client waits.
                wait_until(
                    lambda one=session: is_good(*play([one], ports(server), PATIENT_S)),  # type: ignore[misc]
                    what=f"a good answer to {path}",
                )
            else:
                assert is_good(played), (path, played.received[:300])
    watch.check()


def is_good(played: Played) -> bool:
    """Whether one request, or two, got what a good request gets."""
    return statuses_of(played.received) in ([200], [200, 200])


@pytest.mark.timeout(180)
def test_a_round_of_sessions_does_no_harm(watched: tuple[Server, Watch]) -> None:
    run_round(*watched, drawn(0, FEW), "round 0")


@pytest.mark.fuzz
@pytest.mark.timeout(24 * 3600)
def test_many_rounds_of_sessions_do_no_harm(watched: tuple[Server, Watch]) -> None:
    server, watch = watched
    for number in range(FIRST, FIRST + ROUNDS):
        began, where = time.monotonic(), f"seed {SEED}, round {number}"
        counts = run_round(server, watch, drawn(number, SESSIONS), where)
        took_s = time.monotonic() - began
        print(f"{where}: {SESSIONS} sessions in {took_s:.0f} s; {dict(counts)}; {watch.report()}", flush=True)
