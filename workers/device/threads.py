"""Threads whose unexpected end ends the process: a worker without one of them would look alive and answer nothing."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from ipc import logs

log = logging.getLogger(__name__)

EXIT_BUG = 70


def vital_thread(name: str, body: Callable[[], None]) -> threading.Thread:
    """A daemon thread (not started) that runs `body`; anything that escapes it ends the process with code 70."""

    def run() -> None:
        try:
            body()
        except BaseException:
            log.critical("the %s thread failed; this process ends", name, exc_info=True)
            logs.flush()
            os._exit(EXIT_BUG)

    return threading.Thread(target=run, name=name, daemon=True)
