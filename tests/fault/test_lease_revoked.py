"""A lease older than `arena.lease_max_age_s` is taken back; its late reader never sees another request's data."""

from __future__ import annotations

from pathlib import Path

from tests.fault import serving
from tests.harness.raw import RawClient
from tests.harness.server import wait_until

MODEL = "fake/large"
ITEMS = 16
ITEM_NBYTES = 1 << 20
STEP_NBYTES = 1 << 16


def until_the_end(client: RawClient) -> bytes:
    """What still arrives before the connection is cut."""
    parts = []
    try:
        while True:
            parts.append(client.read(STEP_NBYTES))
    except OSError:
        return b"".join(parts)


def test_a_late_reader_is_cut_off_before_it_gets_bytes_of_another_request(tmp_path: Path) -> None:
    # No private copy is made for the slow reader, so its lease grows too old.
    settings = {"arena.lease_copy_after_s": 600, "arena.lease_max_age_s": 5, "arena.bytes": 32 << 20}
    own, others = [f"own {n}" for n in range(ITEMS)], [f"other {n}" for n in range(30)]
    with serving(tmp_path, models=(MODEL,), settings=settings, supervised=False) as server:
        with RawClient(server.port) as fast:
            fast.encode(MODEL, own)
            status, _, whole = fast.answer()
            assert status == 200
        wait_until(lambda: server.metric("penstock_shm_leases") == 0, what="the end of the lease")
        with RawClient(server.port, 4096) as slow:
            slow.encode(MODEL, own)
            assert slow.head()[0] == 200
            wait_until(lambda: server.metric("penstock_shm_leases_revoked_total") == 1, what="the revocation")
            wait_until(lambda: server.metric("penstock_shm_bytes_used") == 0, what="a free arena")
            with RawClient(server.port) as other:
                other.encode(MODEL, others)
                assert other.answer()[0] == 200
            received = until_the_end(slow)
        assert STEP_NBYTES <= len(received) < ITEMS * ITEM_NBYTES
        assert whole.startswith(received)
        assert server.encode(MODEL, ["afterwards"]).status == 200
        assert "older than arena.lease_max_age_s" in server.log
