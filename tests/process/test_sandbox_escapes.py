"""Escapes tried from inside of a sandbox.

1. With all layers none of them works, for Python and for the shell, which both start by the same program.
2. `ALONE` has attempts that each layer stops without any other.
3. `TAKEN_AWAY` has an attempt for each layer that works once the layer is taken away, and SECURITY.md shows the list.
4. Where this process is root, all of these tests run once more as an ordinary user.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.ordinary_user import run_tests
from tests.harness.sandboxes import Box, found_layers, in_box
from workers.tools import layers
from workers.tools.inner import landlock_version
from workers.tools.layers import ACTIVE, Layers

SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What lies outside: a key file, a run directory with a listening socket file, and a listening port."""
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "keys.yaml").write_text("secret-key")
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(str(run / "worker-0.sock"))
        unix.listen()
        with abstract_listener() as name:
            yield {
                "KEYS": str(tmp_path / "keys.yaml"),
                "RUN": str(run),
                "SOCKET": str(run / "worker-0.sock"),
                "PORT": str(tcp.getsockname()[1]),
                "PID": str(os.getpid()),
                "ABSTRACT": name,
                "WORK": str(tmp_path / "work"),
            }


@contextmanager
def abstract_listener() -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"penstock-escape-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.listen()
        yield name


SYSCALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CHECK = "\nif r < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"
ATTEMPTS = {
    "read the key file": "open('KEYS').read()",
    "list the run directory": "import os; os.listdir('RUN')",
    "read the sources of the server": f"open({str(Path(layers.__file__))!r}).read()",
    "list work directories of other sessions": "import os; os.listdir('WORK')",
    "read /etc/shadow": "open('/etc/shadow').read()",
    "read /etc/passwd": "open('/etc/passwd').read()",
    "list home": f"import os; os.listdir({str(Path.home())!r})",
    "write into system directories": "open('/usr/bin/evil', 'w')",
    "write into the root": "open('/evil', 'w')",
    "write into /etc": "open('/etc/evil', 'w')",
    "write a device": "open('/dev/evil', 'w')",
    "make a device": "import os, stat; os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))",
    "see a process of the host": "import os; os.kill(PID, 0)",
    "read memory of a process of the host": "open('/proc/PID/mem', 'rb').read(1)",
    "reach the root of the host by proc": "import os; os.listdir('/proc/PID/root')",
    "connect to a socket file of the server": "import socket; socket.socket(socket.AF_UNIX).connect('SOCKET')",
    "connect to an abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + 'ABSTRACT')",
    "connect to a port of loopback": "import socket; socket.create_connection(('127.0.0.1', PORT), 2)",
    "connect to a metadata service": "import socket; socket.create_connection(('169.254.169.254', 80), 2)",
    "resolve a name": "import socket; socket.create_connection(('example.org', 80), 2)",
    "open a vsock": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "open a raw socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "open a socket of the kernel's ciphers": "import socket; socket.socket(38, socket.SOCK_SEQPACKET)",
    "raise a limit": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (4096, 4096))",
    "run before all others": "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "outlive a lack of memory": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "open a packet socket": "import socket; socket.socket(17, socket.SOCK_RAW)",
    "ptrace": SYSCALL + "r = libc.ptrace(0, 0, 0, 0)" + CHECK,
    "mount": SYSCALL + "r = libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)" + CHECK,
    "unmount": SYSCALL + "r = libc.umount2(b'/usr', 2)" + CHECK,
    "new user namespace": SYSCALL + "r = libc.unshare(0x10000000)" + CHECK,
    "new user namespace by clone": SYSCALL + "r = libc.syscall(CLONE, 0x10000000 | 17, 0, 0, 0, 0)" + CHECK,
    "change the root": "import os; os.chroot('/tmp')",
    "become root": "import os; os.setuid(0)",
    "join a namespace": SYSCALL + "r = libc.setns(os.open('/proc/1/ns/net', os.O_RDONLY), 0)" + CHECK,
    "bpf": SYSCALL + "r = libc.syscall(BPF, 0, 0, 0)" + CHECK,
    "io_uring": SYSCALL + "r = libc.syscall(425, 1, ctypes.create_string_buffer(256))" + CHECK,
    "the kernel's keys": SYSCALL + "r = libc.syscall(KEYCTL, 0, -3, 0)" + CHECK,
    "write a sysctl": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')",
    "push input into a terminal": "import fcntl, os; fcntl.ioctl(os.open('/dev/ptmx', 2), 0x5412, b'x')",
    "allocate 10 GB": "bytearray(10 << 30)",
    "write a file of 1 GB": "f = open('big', 'wb')\nimport signal\nf.truncate(1 << 30)",
    "open 5000 files": "kept = [open('/dev/null') for _ in range(5000)]",
    "fill /tmp": "for name in 'ab': open(f'/tmp/{name}', 'wb').write(bytes(200 << 20))",
    "fill shared memory": "for name in 'ab': open(f'/dev/shm/{name}', 'wb').write(bytes(200 << 20))",
}
"""Code that raises if the escape fails. Capital words stand for what the fixture `outside` has."""


NUMBERS = {
    "x86_64": {"CLONE": "56", "BPF": "321", "KEYCTL": "250"},
    "aarch64": {"CLONE": "220", "BPF": "280", "KEYCTL": "219"},
}
"""Numbers of system calls by machine; all machines of the table share that of io_uring_setup."""


def filled(code: str, outside: dict[str, str]) -> str:
    """The code with what `outside` has; skips a test whose system calls have no known number on this machine."""
    machine = platform.machine()
    if "libc.syscall" in code and machine not in NUMBERS:
        pytest.skip(f"no numbers of system calls are known for {machine}")
    for name, value in (outside | NUMBERS.get(machine, {})).items():
        code = code.replace(name, value)
    return code


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_escape_fails_inside_of_the_whole_sandbox(
    tmp_path: Path, outside: dict[str, str], attempt: str
) -> None:
    async def body(box: Box) -> None:
        result = await box.python(filled(ATTEMPTS[attempt], outside), timeout_s=30)
        assert result.status == "error", f"{attempt} worked: {result}"
        assert "AttributeError" not in result.exception
        assert "NameError" not in result.exception

    in_box(tmp_path / "work", found_layers(), body)


def test_the_shell_is_in_the_same_sandbox(tmp_path: Path, outside: dict[str, str]) -> None:
    async def body(box: Box) -> None:
        for command in (
            f"cat {outside['KEYS']}",
            f"ls {outside['RUN']}",
            "cat /etc/passwd",
            "touch /usr/bin/evil",
            "touch /evil",
            f"kill -0 {outside['PID']}",
            "ls /",
            "mount -t tmpfs none /tmp",
            "unshare -U true",
            "ls /root/*",
        ):
            assert (await box.shell(command)).exit_code != 0, command
        seen = (await box.shell("ls -d /proc/[0-9]* | wc -l")).stdout
        assert int(seen) < 8, "processes of the host are seen"
        assert "lo" in (await box.shell("cat /proc/net/dev")).stdout
        assert "NoNewPrivs:\t1" in (await box.shell("cat /proc/self/status")).stdout
        assert "CapEff:\t0000000000000000" in (await box.shell("cat /proc/self/status")).stdout

    in_box(tmp_path / "work", found_layers(), body)


def test_a_kill_of_everything_ends_the_sandbox_at_most(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        await box.shell("kill -9 -1")
        await box.python("import os, signal\nos.kill(-1, signal.SIGKILL)")
        await box.python("import os, signal\nos.kill(1, signal.SIGKILL)")
        assert (await box.python("1 + 1")).result == "2"
        assert (await box.shell("echo here")).stdout == "here\n"

    in_box(tmp_path / "work", found_layers(), body)


def without(layer: str) -> Layers:
    """The layers of this machine but one."""
    full = found_layers()
    states = full.states | {layer: "taken away by a test"}
    if layer == "namespaces":
        return replace(full, states=states, bwrap="")
    return replace(full, states=states, program=b"" if layer == "seccomp" else full.program)


def alone(layer: str) -> Layers:
    """One layer of this machine. Landlock and limits work in the view of the host then."""
    off = found_layers(sandbox="off")
    full = found_layers()
    states = off.states | {layer: ACTIVE}
    return replace(
        full,
        states=states,
        bwrap=full.bwrap if layer == "namespaces" else "",
        program=full.program if layer == "seccomp" else b"",
    )


ALONE = {
    "namespaces": (
        "read the key file",
        "see a process of the host",
        "connect to a socket file of the server",
    ),
    "landlock": ("read the key file", "read /etc/shadow", "write into /etc", "connect to a port of loopback"),
    "seccomp": ("ptrace", "io_uring", "open a vsock", "bpf"),
    "limits": ("allocate 10 GB", "open 5000 files", "write a file of 1 GB"),
}
"""Attempts that a layer stops without any other."""
HARMLESS = {"write into /etc": "import os\nopen('/etc/evil', 'w').close()\nos.remove('/etc/evil')"}
"""Forms of attempts that may work on the host."""
WORK_ON_THE_HOST = (
    *("read the key file", "see a process of the host", "connect to a socket file of the server"),
    *("connect to a port of loopback", "ptrace", "open 5000 files", "write a file of 1 GB", "io_uring"),
)
"""Attempts that succeed on any host without a sandbox, so that a layer that stops them is seen to do so."""


@pytest.mark.parametrize(
    ("layer", "attempt"), [(name, each) for name, found in ALONE.items() for each in found]
)
def test_each_layer_alone_stops_its_attempts(
    tmp_path: Path, outside: dict[str, str], layer: str, attempt: str
) -> None:
    code = filled(HARMLESS.get(attempt, ATTEMPTS[attempt]), outside)

    async def body(box: Box) -> None:
        assert (await box.python(code)).status == "error", f"{layer} alone lets this through: {attempt}"

    chosen = alone(layer)
    if (layer, attempt) == ("landlock", "connect to a port of loopback") and landlock_version() < 4:
        pytest.skip("Landlock of this kernel has no rules for TCP, which came with Linux 6.7")
    (tmp_path / "work").mkdir()
    in_box(tmp_path / "work", chosen, body)


@pytest.mark.parametrize("attempt", WORK_ON_THE_HOST)
def test_the_attempts_work_without_any_layer(tmp_path: Path, outside: dict[str, str], attempt: str) -> None:
    async def body(box: Box) -> None:
        result = await box.python(filled(ATTEMPTS[attempt], outside))
        assert result.status == "success", result.exception

    in_box(tmp_path / "work", found_layers(sandbox="off"), body)


TAKEN_AWAY = {
    "namespaces": "connect to a socket file of the server",
    "network": "connect to a port of loopback",
    "seccomp": "ptrace",
    "landlock": "list the root",
    "limits": "open 5000 files",
    "processes": "fork 100 processes",
}
"""An attempt that works once the layer is taken away, while all others stay."""


def test_the_page_of_security_tells_what_works_without_each_layer() -> None:
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    rows = re.findall(r"^\| (\w+)(?: \\\*)? \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    assert {name: attempt for name, attempt in rows if name in TAKEN_AWAY} == TAKEN_AWAY
    assert {*TAKEN_AWAY} == {*layers.REQUIRED}


@pytest.mark.parametrize("layer", ["namespaces", "seccomp", "landlock", "limits"])
def test_an_attempt_works_once_its_layer_is_taken_away(
    tmp_path: Path, outside: dict[str, str], layer: str
) -> None:
    """Tests of their own below take away the network and the limit of processes."""
    code = filled((ATTEMPTS | {"list the root": "import os; os.listdir('/')"})[TAKEN_AWAY[layer]], outside)

    async def stopped(box: Box) -> None:
        assert (await box.python(code)).status == "error"

    async def works(box: Box) -> None:
        result = await box.python(code)
        assert result.status == "success", result.exception

    in_box(tmp_path / "work", found_layers(), stopped)
    in_box(tmp_path / "work", without(layer), works)


def test_the_network_of_the_machine_is_reached_with_full_only(
    tmp_path: Path, outside: dict[str, str]
) -> None:
    code = filled(ATTEMPTS[TAKEN_AWAY["network"]], outside)
    for network, status in (("none", "error"), ("loopback", "error"), ("full", "success")):

        async def body(box: Box, status: str = status) -> None:
            assert (await box.python(code)).status == status

        in_box(tmp_path / "work", found_layers(sandbox_network=network), body)


def test_a_server_of_the_code_is_reached_by_the_loopback_of_the_sandbox(tmp_path: Path) -> None:
    code = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\nsocket.create_connection(s.getsockname())"
    )

    async def body(box: Box) -> None:
        assert (await box.python(code)).status == "success"

    in_box(tmp_path / "work", found_layers(), body)


@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason="no Python that an ordinary user may run")
@pytest.mark.parametrize("layer", ["processes", "none"])
def test_an_ordinary_user_cannot_fork_beyond_the_limit(tmp_path: Path, layer: str) -> None:
    """The test drops to another user where it runs as root, which no limit of processes binds."""
    found = found_layers(code_exec_python=SYSTEM_PYTHON)
    chosen = found if layer == "processes" else replace(found, states=found.states | {"limits": "taken away"})
    fork = "import os, signal\nn = 0\ntry:\n  while n < 100:\n    os.fork() or signal.pause()\n    n += 1\n"
    fork += "except OSError: pass\nprint(n)"
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        work = Path(place)
        work.chmod(0o777)
        near, far = socket.socketpair()
        ends = {"user": 65534, "group": 65534} if os.geteuid() == 0 else {}
        with (
            near,
            far,
            subprocess.Popen(
                chosen.command(work, far.fileno(), "shell", 60, "/bin/sh"),
                pass_fds=(far.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=layers.environment(chosen.config, layers.WORK),
                cwd=place,
                **ends,
            ) as process,
        ):
            command = f"{SYSTEM_PYTHON} -I -c '{fork}'".encode()
            near.sendall(len(command).to_bytes(4, "little") + command)
            printed, _ = process.communicate(timeout=60)
    assert (int(printed) < 100) == (layer == "processes")


@pytest.mark.long
@pytest.mark.skipif(
    os.geteuid() != 0, reason="this user is no root: the tests above have run as an ordinary user"
)
@pytest.mark.timeout(1200)
def test_all_of_this_finds_nothing_as_an_ordinary_user() -> None:
    found_layers()
    here = Path(__file__)
    closed = "test_closed_folders_are_removed_and_what_an_ordinary_user_cannot_count_ends_the_session"
    emptied = "test_an_emptied_directory_can_be_used_again_and_a_shared_one_keeps_its_files"
    run = run_tests(
        str(here),
        f"{here.with_name('test_sandboxes.py')}::{closed}",
        f"{here.parents[1] / 'unit/workers/tools/test_work_dir.py'}::{emptied}",
    )
    if "refuses namespaces" in run.stdout:
        pytest.skip("the kernel of this machine refuses namespaces to ordinary users")
    assert run.returncode == 0, run.stdout
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None and int(passed[1]) > len(ATTEMPTS), run.stdout
