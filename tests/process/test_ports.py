"""The ports of tests: another process never gets those of a block that somebody has."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator

from tests.harness import ports
from tests.harness.ports import BLOCK, blocks
from tests.harness.server import ROOT

ABOVE, COUNT = 9000, 3
"""A few blocks that no free port is looked for in."""
OTHER = f"""
import itertools
from tests.harness.ports import BLOCK, blocks
found = blocks({ABOVE}, {COUNT})
print(*itertools.islice(found, BLOCK + 1), flush=True)
input()
"""


def taken(found: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(found, count))


def test_two_processes_share_no_port_and_one_that_has_ended_leaves_its_own() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().split()))
        assert len(theirs) == BLOCK + 1
        mine = blocks(ABOVE, COUNT)
        ours = set(taken(mine, 3 * BLOCK))
        assert len(ours) == BLOCK, "one block of three is left, which is given again and again"
        assert not ours & theirs
        assert taken(blocks(ABOVE, COUNT), 1) == [], "no block is left"
        other.communicate("\n")
    assert other.returncode == 0
    assert set(taken(mine, COUNT * BLOCK)) > theirs


def test_a_port_that_somebody_listens_on_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", ports.free_port())) as listening:
        given = [ports.free_port() for _ in range(BLOCK)]
        assert listening.getsockname()[1] not in given
        assert len(set(given)) == BLOCK
