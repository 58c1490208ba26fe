"""The layers of a sandbox: which of them this machine has, and the command line that applies them.

1. `find` looks for bubblewrap, builds the seccomp filter, and tries real starts: with a fresh `/proc`, else with an
   empty one, else without namespaces. Each layer is "active", or a text says why the layer is missing.
2. `Layers.take_groups` takes the control groups (`workers.tools.cgroups`). `Layers.command` gives the command line of
   one start. `workers.tools.inner` is the first program inside: limits, Landlock and seccomp apply there, after
   bubblewrap has made its mounts.

Inside there are system directories, the Python of the sandbox, an empty `/tmp`, and the work directory as `WORK`. No
start binds the run directory, the state directory, `/run`, `/tmp`, or the host's `/proc`: a socket file in view can be
connected to in spite of an own network namespace.

bubblewrap follows the death of the thread that started it, so starts belong to the thread of the event loop.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ipc.errors import MachineUnfit
from ipc.settings import Agent
from workers.tools import cgroups
from workers.tools.cgroups import Groups

WORK = "/mnt/data"
"""The work directory as sandboxed programs see it."""
INNER = Path(__file__).with_name("inner.py")
_INNER_INSIDE = "/opt/penstock-inner.py"
ACTIVE = "active"
REQUIRED = ("namespaces", "network", "seccomp", "landlock", "limits", "processes")
"""Layers without which `agent.sandbox: on` does not start."""
LAYERS = (*REQUIRED, "proc", "cgroup")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32")
_ETC = (
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/fonts", "/etc/mime.types"),
    *("/etc/ssl/certs", "/etc/ca-certificates", "/etc/pki/tls/certs"),
)
_ETC_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""Devices of the host that a program may open where bubblewrap does not make a `/dev`."""
_TOOLCHAINS = ("GOROOT", "JAVA_HOME", "RUSTUP_HOME")
"""Variables of toolchains that the profile `developer` passes on, with their directories. None holds a token."""
_SCRATCH_NBYTES = 256 << 20
MAX_OPEN_FILES = 1024
MAX_FILE_NBYTES = 256 << 20
_TRY_S = 20.0

DENIED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise"),
    *("mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "mount_setattr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "open_by_handle_at", "name_to_handle_at"),
    *("unshare", "setns", "bpf", "perf_event_open", "userfaultfd", "fanotify_init"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("keyctl", "add_key", "request_key", "init_module", "finit_module", "delete_module"),
    *("kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "acct", "quotactl", "syslog"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname"),
    *("iopl", "ioperm", "lookup_dcookie", "vhangup", "personality"),
)
"""System calls that a sandboxed program has no use for; they fail with EPERM."""
_FAMILIES = (1, 2, 10, 16)
"""Families of sockets that a program may open: Unix, IPv4, IPv6, netlink. A vsock would reach the hypervisor."""
_NEW_USER, _PUSH_INPUT = 0x10000000, 0x5412
_NO_PYSECCOMP = "the package pyseccomp is not installed: pip install 'penstock-server[sandbox]'"


@dataclass(frozen=True, slots=True)
class Python:
    """The interpreter of the sandbox: its path, and the directories it needs."""

    path: str
    roots: tuple[str, ...]


@dataclass(slots=True)
class Layers:
    """What `find` has found. `states` has each layer of `LAYERS`."""

    config: Agent
    python: Python
    states: dict[str, str] = field(default_factory=dict)
    bwrap: str = ""
    fresh_proc: bool = True
    program: bytes = b""
    groups: Groups | None = None

    @property
    def isolated(self) -> bool:
        """Whether bubblewrap makes namespaces: its death then ends every process of the sandbox."""
        return bool(self.bwrap)

    def seen(self, directory: Path) -> str:
        """The work directory as a program of the sandbox sees it."""
        return WORK if self.bwrap else str(directory)

    def take_groups(self) -> None:
        """Make the delegated control group ready for sandboxes; a failure costs the layer.

        Raises `MachineUnfit` as `require`, since the limit of processes may need the group.
        """
        if self.groups is not None:
            try:
                self.groups.take()
            except OSError as error:
                self.groups, self.states["cgroup"] = None, f"the kernel refuses: {error.strerror}"
                self.judge_processes()
                self.require()

    def require(self) -> None:
        """Raise `MachineUnfit` with `agent.sandbox: on` if one of `REQUIRED` is missing."""
        if self.config.sandbox != "on":
            return
        needed = {*REQUIRED} - ({"network"} if self.config.sandbox_network == "full" else set())
        states = ((name, self.states[name]) for name in REQUIRED if name in needed)
        missing = [f"{name} ({state})" for name, state in states if state != ACTIVE]
        if missing:
            raise MachineUnfit(f"agent.sandbox = on: layers are missing: {'; '.join(missing)}")

    def judge_processes(self) -> None:
        """Set the state of the limit of processes, which needs a group or namespaces of an ordinary user."""
        state = ACTIVE
        if self.groups is None and not self.bwrap:
            state = "needs namespaces"
        elif self.groups is None and os.geteuid() == 0:
            state = "the limit does not bind root: run the tool host as an ordinary user"
        self.states["processes"] = state

    def command(
        self, directory: Path, channel: int, mode: str, cpu_s: float, *more: str, entry: int | None = None
    ) -> list[str]:
        """The command line of one start: `mode` of `workers.tools.inner` in the work directory, with `more` to say.

        `entry` is the descriptor by which the start enters a control group.
        """
        readable, writable = "", ""
        if self.states["landlock"] == ACTIVE:
            readable = ":".join((*self._readable(), "/proc", self._inner()))
            # Without bubblewrap `/dev` is the host's, and `/dev/shm` has the memory of other processes.
            devices = ("/tmp", "/dev") if self.bwrap else _DEVICES
            writable = ":".join((self.seen(directory), *devices))
        no_tcp = "1" if not self.bwrap and self.config.sandbox_network != "full" else ""
        ends = (mode, str(channel), "" if entry is None else str(entry))
        arguments = (*ends, self._limits(cpu_s), readable, writable, no_tcp, self.program.hex())
        # The shell needs nothing of `site`, which takes time.
        flags = ("-I",) if mode == "python" else ("-I", "-S")
        inner = [self.python.path, *flags, self._inner(), *arguments, *more]
        return [*self._bwrap(directory), *inner] if self.bwrap else inner

    def _inner(self) -> str:
        return _INNER_INSIDE if self.bwrap else str(INNER)

    def _limits(self, cpu_s: float) -> str:
        config = self.config
        if self.states["limits"] != ACTIVE:
            return ""
        limits = {
            "as": config.max_memory_bytes,
            "cpu": int(max(config.max_cpu_s, cpu_s)) + 1,
            "nofile": MAX_OPEN_FILES,
            "fsize": MAX_FILE_NBYTES,
            "core": 0,
        }
        if self.bwrap:
            # NOTE: without a user namespace this counts all processes of the user, those of the server as well.
            limits["nproc"] = config.max_procs
        return ",".join(f"{name}={value}" for name, value in limits.items())

    def _readable(self) -> Iterator[str]:
        yield from (*_SYSTEM, *_ETC, *self.python.roots)
        if self.config.sandbox_network == "full":
            yield from _ETC_NETWORK
        if self.config.sandbox_profile == "developer":
            yield from (os.environ[name] for name in _TOOLCHAINS if os.environ.get(name))

    def _bwrap(self, directory: Path) -> Iterator[str]:
        yield from (self.bwrap, "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc")
        yield from ("--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox")
        if self.config.sandbox_network != "full":
            yield "--unshare-net"
        yield from (
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--uid",
            "1000",
            "--gid",
            "1000",
        )
        # The Python of a machine may lie below `/tmp`, so the empty `/tmp` comes before the bound directories.
        yield from ("--size", str(_SCRATCH_NBYTES), "--tmpfs", "/tmp")
        for path in self._readable():
            yield from _bind(path)
        yield from ("--ro-bind", str(INNER), _INNER_INSIDE)
        yield from ("--proc", "/proc") if self.fresh_proc else ("--size", "4096", "--tmpfs", "/proc")
        yield from (
            "--dev",
            "/dev",
            "--size",
            str(_SCRATCH_NBYTES),
            "--tmpfs",
            "/dev/shm",
            "--remount-ro",
            "/dev",
        )
        yield from ("--bind", str(directory), WORK, "--chdir", WORK, "--remount-ro", "/", "--")


def _bind(path: str) -> Iterator[str]:
    link = Path(path)
    if link.is_symlink() and path in _SYSTEM:
        yield from ("--symlink", str(link.readlink()), path)
    elif link.exists():
        yield from ("--ro-bind", path, path)


def environment(config: Agent, seen: str) -> dict[str, str]:
    """All variables of a sandboxed program. The host's own never pass, apart from those of toolchains."""
    scratch = "/tmp" if seen == WORK else seen
    variables = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "PWD": seen,
        "LANG": "C.UTF-8",
        "MPLBACKEND": "agg",
        "MPLCONFIGDIR": scratch,
        # Threads of numeric libraries reserve address space, which is bounded.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if config.sandbox_profile == "developer":
        variables |= {name: os.environ[name] for name in _TOOLCHAINS if os.environ.get(name)}
    return variables


def find(config: Agent) -> Layers:
    """The layers of this machine under the settings. Raises `MachineUnfit` with `sandbox: on` if one is missing."""
    python = _python(config.code_exec_python or sys.executable)
    layers = Layers(config, python, dict.fromkeys(LAYERS, ACTIVE))
    states = layers.states
    if config.sandbox == "off":
        states.update(dict.fromkeys(LAYERS, "off by agent.sandbox"))
        _require_start(layers)
        return layers
    layers.program, states["seccomp"] = _filter(config.sandbox_network == "none")
    layers.bwrap, states["namespaces"] = shutil.which("bwrap") or "", "bubblewrap (bwrap) is not installed"
    if layers.bwrap:
        _try_namespaces(layers)
    if not layers.bwrap:
        states["proc"] = states["network"] = "needs namespaces"
        _drop_what_fails(layers)
    if config.sandbox_network == "full":
        states["network"] = "off by agent.sandbox_network"
    layers.groups, why_not = cgroups.find(config)
    states["cgroup"] = why_not or ACTIVE
    layers.judge_processes()
    layers.require()
    return layers


def _python(path: str) -> Python:
    """The interpreter at `path`. Raises `MachineUnfit` for a file that does not run as one."""
    ask = "import sys; print(sys.prefix); print(sys.base_prefix)"
    try:
        run = subprocess.run(
            [path, "-I", "-c", ask], capture_output=True, text=True, timeout=_TRY_S, check=True, env={}
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineUnfit(f"agent.code_exec_python: {path} does not run: {error}") from error
    roots = tuple(dict.fromkeys(root for root in run.stdout.split("\n")[:2] if root and not _is_system(root)))
    real = str(Path(path).resolve())
    path = path if _is_below(path, roots) else real
    if not _is_below(real, roots):
        raise MachineUnfit(
            f"agent.code_exec_python: {real} lies outside of its own prefix, {' and '.join(roots)}"
        )
    return Python(path, roots)


def _is_system(path: str) -> bool:
    return any(Path(path).is_relative_to(each) for each in _SYSTEM)


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return _is_system(path) or any(Path(path).is_relative_to(root) for root in roots)


def _try_namespaces(layers: Layers) -> None:
    """Keep bubblewrap if a start works, with what the start shows to work; else note why none does."""
    reasons: list[str] = []
    for layers.fresh_proc in (True, False):
        reason = _drop_what_fails(layers)
        if not reason:
            layers.states["namespaces"] = ACTIVE
            if not layers.fresh_proc:
                layers.states["proc"] = f"empty, as no fresh one can be mounted: {reasons[0]}"
            return
        reasons.append(reason)
    layers.bwrap = ""
    layers.states["namespaces"] = reasons[0]


def _drop_what_fails(layers: Layers) -> str:
    """Try a start; drop Landlock if that alone is the obstacle. Returns why no start works."""
    layers.states["landlock"] = ACTIVE
    reason = _try(layers)
    if reason:
        layers.states["landlock"] = f"the kernel refuses: {reason}"
        if _try(layers):
            return reason
    return ""


def _require_start(layers: Layers) -> None:
    if reason := _try(layers):
        raise MachineUnfit(f"no program can be started: {reason}")


def _try(layers: Layers) -> str:
    """Start the inner program once; empty if it came through, else the reason."""
    near, far = socket.socketpair()
    with near, far, tempfile.TemporaryDirectory(prefix="penstock-try-") as directory:
        place = Path(directory)
        command = layers.command(place, far.fileno(), "probe", 1.0)
        try:
            run = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TRY_S,
                check=False,
                pass_fds=(far.fileno(),),
                cwd=place,
                env=environment(layers.config, layers.seen(place)),
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        far.close()
        near.settimeout(_TRY_S)
        answer = near.recv(4096)
    if run.returncode == 0 and answer[4:5] == b"R":
        return ""
    reason = answer[9:].decode("utf-8", "replace") if answer[4:5] == b"F" else run.stderr.strip()
    return reason.splitlines()[-1][:300] if reason else f"exit code {run.returncode}"


def _filter(no_sockets: bool) -> tuple[bytes, str]:
    """The seccomp program as the kernel takes it, and the state of the layer."""
    try:
        import pyseccomp
    except ImportError:
        return b"", _NO_PYSECCOMP
    except (OSError, RuntimeError) as error:
        return b"", f"libseccomp cannot be used: {error}"
    refuse = pyseccomp.ERRNO(1)
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in DENIED:
        try:
            pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
            rules.add_rule(refuse, name)
        except (OSError, ValueError, RuntimeError):
            # The library or the architecture does not know the call.
            continue
    # Flags of `clone3` are behind a pointer. With ENOSYS libraries fall back to `clone`.
    rules.add_rule(pyseccomp.ERRNO(38), "clone3")
    rules.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, _NEW_USER, _NEW_USER))
    rules.add_rule(refuse, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, _PUSH_INPUT))
    if no_sockets:
        rules.add_rule(refuse, "socket", pyseccomp.Arg(0, pyseccomp.NE, _FAMILIES[0]))
    else:
        for family in set(range(_FAMILIES[-1])) - set(_FAMILIES):
            rules.add_rule(refuse, "socket", pyseccomp.Arg(0, pyseccomp.EQ, family))
        rules.add_rule(refuse, "socket", pyseccomp.Arg(0, pyseccomp.GT, _FAMILIES[-1]))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read(), ACTIVE
