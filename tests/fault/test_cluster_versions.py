"""Two versions of the protocol between hosts at once: gateways and boxes of both, while boxes are upgraded."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.broker import broker
from tests.harness.cluster import Box, gateway, living, serves
from tests.harness.load import Load
from tests.harness.server import ROOT, wait_until

NEWER = "import ipc.wire.cluster as wire\nwire.VERSION += 1\n"
pytestmark = pytest.mark.long


class Upgraded(Box):
    """A box whose bridge is of the version that its environment gives it."""

    later: dict[str, str] | None = None

    def start_bridge(self) -> None:
        """Start the bridge; the next version is one of a process that is executed anew."""
        if self.later is None:
            super().start_bridge()
            return
        told = {"NOTIFY_SOCKET": f"@{self._told.getsockname()[1:].decode()}"}
        with self._log_path.open("ab") as log:
            process: Any = subprocess.Popen(
                [sys.executable, "-m", "frontend.bridge"],
                cwd=ROOT,
                env=self.server.environment | told | self.later,
                stdout=log,
                stderr=log,
            )
        self.bridge = process


def test_gateways_use_the_boxes_of_their_version_while_boxes_are_upgraded_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each box takes items of the one queue, also those of gateways whose version it does not speak."""
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "sitecustomize.py").write_text(NEWER)
    later = {"PYTHONPATH": f"{tmp_path / 'newer'}:{ROOT}"}
    with broker(tmp_path / "broker") as one:
        a, b = (Upgraded(tmp_path / name, name, [one.url]) for name in "ab")
        b.later = later
        try:
            a.start()
            b.start()
            with gateway(tmp_path / "old", [one.url]) as old, monkeypatch.context() as patch:
                patch.setenv("PYTHONPATH", later["PYTHONPATH"])
                with gateway(tmp_path / "new", [one.url]) as new:
                    for server, name in ((old, "a"), (new, "b")):
                        wait_until(lambda server=server: serves(server), what="the first answer")  # type: ignore[misc]
                        assert living(server) == {name}
                    with Load(old.port, 3) as olds, Load(new.port, 3) as news:
                        wait_until(lambda: min(olds.done, news.done) > 60, what="traffic of both versions")
                        wait_until(
                            lambda: all("of the protocol between hosts" in each.log for each in (a, b)),
                            what="items of the other version at both boxes",
                        )
                        for outcome in (olds.stop(), news.stop()):
                            assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies)
                    assert a.end(signal.SIGTERM) == 0
                    a.later = later
                    a.start_bridge()
                    wait_until(lambda: living(new) == {"a", "b"}, what="the upgraded box")
                    assert serves(new) and living(old) == set()
                    refused = old.post(
                        "/v1/encode/fake/echo", {"items": [{"text": "x"}]}, x_request_timeout="1"
                    )
                    assert refused.status in (503, 504), refused.body
            a.stop()
            b.stop()
        finally:
            a.kill()
            b.kill()
