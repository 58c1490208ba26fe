"""Whose the run directory and the addresses are: settled by the arbiter before it sweeps, writes or starts anything.

1. `take` locks the run directory: a second server with the same one changes nothing and says who runs. The lock is the
   arbiter's alone and goes with it, `kill -9` included.
2. It then finds every address free. Frontends of a dead arbiter close theirs within seconds; they are waited for.
3. `check` asks the same without taking anything, for `penstock check` and `penstock doctor`.
"""

from __future__ import annotations

import os
import time

from frontend.http import listeners
from ipc.addresses import ensure_free
from ipc.errors import ConfigError
from ipc.processes.liveness import SlotLock, SlotTaken, is_held
from ipc.processes.paths import SERVER, prepare_run_dir
from ipc.settings import Settings

_LOOK_EVERY_S = 0.1


def take(config: Settings) -> SlotLock:
    """The lock of this server's run directory. Raises `ConfigError` when a server runs, or an address is taken."""
    paths = config.paths
    prepare_run_dir(paths)
    try:
        lock = SlotLock(paths.lock(SERVER))
    except SlotTaken as error:
        raise ConfigError(
            f"a server runs with these settings: {error.message} in {paths.root}; nothing was changed. "
            "Stop that one first, or choose another server.bind, and another run.dir if that is set"
        ) from None
    until = time.monotonic() + config.server.graceful_timeout_s
    while True:
        try:
            return _addresses_free(config, lock)
        except ConfigError:
            if not _has_old_frontends(config) or time.monotonic() > until:
                lock.release()
                raise
            time.sleep(_LOOK_EVERY_S)


def check(config: Settings) -> None:
    """Raise `ConfigError` for an address that another program has; a running server with these settings may have it."""
    if not is_held(config.paths.lock(SERVER)):
        for bind, setting in listeners.binds(config).items():
            ensure_free(bind, setting)


def _addresses_free(config: Settings, lock: SlotLock) -> SlotLock:
    # NOTE: systemd's socket units listen already; Gunicorn takes those sockets in place of server.bind.
    activated = os.environ.get("LISTEN_PID") == str(os.getpid())
    for bind, setting in listeners.binds(config).items():
        if not (activated and setting.startswith("server.")):
            ensure_free(bind, setting)
    return lock


def _has_old_frontends(config: Settings) -> bool:
    """Whether frontends live whose arbiter is dead, since this process holds the lock of the arbiter."""
    return any(is_held(path) for path in config.paths.root.glob("frontend-*.lock"))
