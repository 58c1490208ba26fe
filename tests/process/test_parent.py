"""A run of tests that is killed leaves no process behind that it started by `ends_with_parent`."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from tests.harness.server import ROOT

START = """
import subprocess, sys, time
from tests.harness.parent import ends_with_parent
child = subprocess.Popen(["sleep", "600"], preexec_fn=ends_with_parent())
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_the_killed_one_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", START], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        death = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
        try:
            assert select.select([death], [], [], 30)[0]
        finally:
            if not select.select([death], [], [], 0)[0]:
                os.kill(pid, signal.SIGKILL)
            os.close(death)
