"""Paths: run directory, sockets, locks, arenas, and the files that come with the package.

Every path is derived from one `RunPaths`, so that two servers on one host never meet unless they share a run directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ipc.errors import ConfigError
from ipc.processes.starting import TOP

SHM_ROOT = Path("/dev/shm")
TOOLS = "tools-0"
"""Name of the slot of the tool host in locks, metrics and logs."""
INPUT_OWNERS = {"f": "frontend", "b": "bridge"}
"""Names of processes that have an arena for inputs, by the letter that stands for the name in file names."""
SERVER = "server"
"""Name of the lock that the arbiter holds as the owner of the run directory."""
_SUN_PATH_MAX = 107
_MAX_LEVELS = 64
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class RunPaths:
    """File names of one server instance. `root` is a 0700 directory; `shm` holds the arenas."""

    root: Path
    instance: str
    shm: Path = SHM_ROOT

    def worker_socket(self, slot: int) -> Path:
        """ZeroMQ ROUTER socket of a worker slot."""
        return self.root / f"worker-{slot}.sock"

    def notify_socket(self, slot: int) -> Path:
        """Datagram socket on which the embedded supervisor receives notices of a worker slot."""
        return self.root / f"notify-{slot}.sock"

    def tools_socket(self) -> Path:
        """Unix stream socket of the tool host (`ipc.wire.tools`)."""
        return self.root / f"{TOOLS}.sock"

    def tools_notify_socket(self) -> Path:
        """Datagram socket on which the embedded supervisor receives notices of the tool host."""
        return self.root / f"notify-{TOOLS}.sock"

    def tools_work(self) -> Path:
        """Directory of the work directories of sandboxes: on disk, and outside of the run directory.

        Code of models works below, and nothing of this server lies there.
        """
        digest = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / _user_directory() / f"tools-{digest}"

    def lock(self, name: str) -> Path:
        """Lock file that proves that the owner of `name` (`server`, `worker-0`, `frontend-1`, `supervisor`) lives."""
        return self.root / f"{name}.lock"

    def metrics(self) -> Path:
        """Directory of the per-slot metric files."""
        return self.root / "metrics"

    def announced(self, stage: str = "ready") -> Path:
        """File that exists once a frontend has printed the block of a stage of the start (`frontend.lifespan`)."""
        return self.root / ("announced" if stage == "ready" else f"announced-{stage}")

    def store(self) -> Path:
        """Directory of the small state that the processes of this server share (`ipc.store`)."""
        return self.root / "store"

    def control(self) -> Path:
        """Directory of the file that numbers requests (`frontend.protocols.trtis_v1.statuses`)."""
        return self.root / "control"

    def wishes(self) -> Path:
        """Directory of files that loads by name brought (`ipc.store.wishes`)."""
        return self.root / "wishes"

    def own_models(self) -> Path:
        """Directory of the catalog entries of models that the command line names (`penstock.own_models`)."""
        return self.root / "own-models"

    def configurations(self) -> Path:
        """Directory of the models that gateways of the cluster gave to this box (`frontend.bridge.configs`)."""
        return self.root / "configurations"

    def arena(self, slot: int, epoch: str) -> Path:
        """Shared-memory file of one worker life."""
        return self.shm / f"penstock.{self.instance}.{slot}.{epoch}"

    def input_arena(self, name: str, epoch: str) -> Path:
        """Shared-memory file for the inputs of one life of `frontend-0`, `bridge-0` or another."""
        return self.shm / f"penstock.{self.instance}.{arena_owner(name)}.{epoch}"

    def is_input_arena(self, file_name: str) -> bool:
        """Whether a file of that name can be the arena of a frontend or bridge of this instance."""
        before = f"penstock.{self.instance}."
        return file_name.startswith(tuple(before + letter for letter in INPUT_OWNERS))

    def arenas(self, slot: int | str = "*") -> list[Path]:
        """Arenas of all lives of a slot (or of all slots) that still have a name; slots as `arena_owner` names them."""
        return sorted(self.shm.glob(f"penstock.{self.instance}.{slot}.*"))


def arena_owner(name: str) -> str:
    """The owner of an input arena as file names have it: `f0` for `frontend-0`, `b0` for `bridge-0`."""
    kind, _, slot = name.rpartition("-")
    return f"{kind[0]}{int(slot)}"


def prepare_run_dir(paths: RunPaths) -> None:
    """Create the run directory with mode 0700, or check that it is ours and private.

    So is the directory of this user in the temp directory, where all users may make directories of any name. Raises
    `ConfigError` when a directory cannot be there, belongs to someone else, or is too long for a socket name.
    """
    above = paths.root.parent
    if above.name == _user_directory():
        _prepare_private(above, follow_links=False)
    _prepare_private(paths.root, follow_links=True)
    if not _fits(paths.root):
        raise ConfigError(f"run.dir {paths.root} is too long: a socket name may have {_SUN_PATH_MAX} bytes")
    make_private(paths.metrics(), paths.store(), paths.control(), paths.wishes())


def _prepare_private(directory: Path, follow_links: bool) -> None:
    """Create a directory with mode 0700, or check its owner and close it to others.

    Without `follow_links` the owner of a link counts, not that of its target.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"run.dir {directory} cannot be a directory: {error.strerror}") from error
    status = directory.stat(follow_symlinks=follow_links)
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"run.dir {directory} belongs to uid {status.st_uid}, not to this user ({os.geteuid()})"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)


def prepare_tools_dir(paths: RunPaths) -> Path:
    """Create the directory of work directories with mode 0700. Raises `ConfigError` as `prepare_run_dir` does."""
    root = paths.tools_work()
    _prepare_private(root.parent, follow_links=False)
    _prepare_private(root, follow_links=False)
    return root


def remove_tree(path: Path) -> None:
    """Remove a directory of any depth, also where its owner has closed parts of the tree to himself. Follows no link.

    A tree of hostile code may be deeper than recursion and open descriptors reach: folders beyond some levels are moved
    up to `path` before their turn. What cannot be removed stays, without an error.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    with contextlib.suppress(OSError):
        path.chmod(0o700)
        root = os.open(path, _FOLDER)
        try:
            # Folders of the second round on are those of the round before that were moved up.
            while _empty(root, root, 0):
                pass
        finally:
            os.close(root)
        path.rmdir()


def _empty(folder: int, root: int, level: int) -> bool:
    """Remove everything below a folder; returns whether folders were moved to `root`. Raises `OSError`."""
    moved = False
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        with contextlib.suppress(OSError):
            try:
                os.unlink(name, dir_fd=folder)
                continue
            except IsADirectoryError:
                os.chmod(name, 0o700, dir_fd=folder)
            if level == _MAX_LEVELS:
                # PERF: a folder is moved in milliseconds, so only where the tree is deep.
                os.rename(name, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=root)
                moved = True
                continue
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                moved |= _empty(inner, root, level + 1)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)
    return moved


def make_private(*directories: Path) -> None:
    """Make the directories that are missing, each with mode 0700; directories above them get the usual mode."""
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)


def default_run_root(instance: str) -> Path:
    """`$XDG_RUNTIME_DIR/penstock/<instance>`, or a per-user directory below `temp_root`."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "penstock" / instance
    below = Path(_user_directory()) / instance
    return temp_root(below) / below


def _user_directory() -> str:
    """The name of the directory of this user in the temp directory."""
    return f"penstock-{os.geteuid()}"


def temp_root(run_dir: Path) -> Path:
    """The temp directory; `/tmp` where the sockets of the run directory `run_dir`, below, would have too long names."""
    root = Path(tempfile.gettempdir())
    return root if _fits(root / run_dir) else Path("/tmp")


def _fits(run_dir: Path) -> bool:
    """Whether the longest socket of a run directory has a name that the kernel accepts."""
    return len(os.fsencode(RunPaths(run_dir, "").notify_socket(999))) <= _SUN_PATH_MAX


def default_state_root(instance: str) -> Path | None:
    """What outlives a start: `$STATE_DIRECTORY` of systemd, else `penstock` in the user's state, `~/.local/state`.

    Machines may share a home, but neither the files of SQLite nor process ids: below a home each machine has a
    directory of its name. None where this user can have no such directory.
    """
    given = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    try:
        base = Path(given or os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    except RuntimeError:
        return None
    root = (base if given else base / "penstock" / _machine()) / instance
    existing = next((path for path in (root, *root.parents) if path.exists()), root)
    return root if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) else None


def _machine() -> str:
    """The name of this machine as the name of a directory."""
    return re.sub("[^A-Za-z0-9_-]", "-", platform.node()) or "localhost"


def default_cache_root() -> Path:
    """What may be removed at any time: `$CACHE_DIRECTORY` of systemd, else `penstock` in the user's cache."""
    given = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given)
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return base.expanduser() / "penstock"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"penstock-cache-{os.geteuid()}"


def asset(name: str) -> Path:
    """A file that ships with Penstock (`gunicorn.conf.py`, `config/models`), in the source tree or installed."""
    path = TOP / name
    if not path.exists():
        raise ConfigError(f"{name} is missing from this installation")
    return path
