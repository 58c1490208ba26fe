"""What became of a report: taken, lost because the listener is behind, or to nobody."""

from __future__ import annotations

from pathlib import Path

from ipc.processes.starting import Listener, Notifier


def test_reports_are_lost_only_to_a_listener_that_is_behind(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "notify.sock")
    notifier = Notifier(str(listener.path))
    sent = 0
    while notifier.send(status=f"report {sent}"):
        sent += 1
        assert sent < 100_000, "it takes any number"
    assert listener.receive() == {"STATUS": f"report {sent - 1}"}
    assert notifier.send(status="later") and listener.receive() == {"STATUS": "later"}
    listener.close()
    assert notifier.send(stopping=1), "nobody is there to miss it"
    assert Notifier("").send(stopping=1)
