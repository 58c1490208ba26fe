"""Python and shell of the tool host in real sandboxes: results, state, bounds, files, ends."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import tempfile
import time
import venv
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from ipc.settings import Agent
from ipc.wire.tools import MAX_PRODUCED, ResetCall, SurfaceCall, Wanted
from tests.fakes.tool_host import until
from tests.harness.sandboxes import Box, found_layers, in_box
from workers.tools import layers
from workers.tools.processes import Broken, Process

T = TypeVar("T")

MODES = ("auto", "off")


async def gone(command: list[str]) -> None:
    """Wait until no process runs this command."""
    async with asyncio.timeout(30):
        while any(each.info["cmdline"] == command for each in psutil.process_iter(["cmdline"])):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def exists(root: Path, name: str) -> bool:
    """Whether a sandbox has left a file."""
    return bool(list((root / "work").glob(f"*/{name}")))


async def overstayed(root: Path, call: Coroutine[Any, Any, T]) -> T:
    """Run a call, and let its time pass once its code has made the file `begun`."""
    task = asyncio.create_task(call)
    await until(lambda: task.done() or exists(root, "begun"))
    loop = asyncio.get_running_loop()
    real = loop.time
    loop.time = lambda: real() + 1000  # type: ignore[method-assign]
    return await task


@pytest.mark.parametrize("mode", MODES)
def test_an_interpreter_keeps_its_state_and_tells_output_value_and_error(tmp_path: Path, mode: str) -> None:
    async def body(box: Box) -> None:
        first = await box.python("import sys\nx = 41\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
        assert (first.status, first.stdout, first.stderr) == ("success", "out\n", "err\n")
        assert (first.result, first.result_type, first.exception) == ("42", "int", "")
        assert (await box.python("x")).result == "41"
        failed = await box.python("def f():\n    return 1 / 0\nf()")
        assert failed.status == "error"
        assert failed.exception.endswith("ZeroDivisionError: division by zero")
        assert "return 1 / 0" in failed.exception
        assert "inner" not in failed.exception
        assert (await box.python("def f(:")).exception.endswith("SyntaxError: invalid syntax")
        assert (await box.python("input()")).exception.endswith("EOFError: EOF when reading a line")
        assert (await box.python("raise SystemExit(3)")).exception.endswith("SystemExit: 3")
        assert (await box.python("x")).result == "41"
        await box.run(ResetCall())
        assert "NameError" in (await box.python("x")).exception

    in_box(tmp_path / "work", found_layers(sandbox=mode), body)


def test_a_python_below_the_temp_directory_runs(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        venv.create(home, symlinks=True)
        chosen = found_layers(code_exec_python=f"{home}/bin/python")

        async def body(box: Box) -> None:
            assert (await box.python("import sys; sys.prefix")).result == repr(home)
            assert (await box.shell("echo x > /tmp/x && cat /tmp/x")).stdout == "x\n"

        in_box(tmp_path / "work", chosen, body)


@pytest.mark.parametrize("mode", MODES)
def test_a_shell_tells_output_and_exit_code_and_shares_files_with_python(tmp_path: Path, mode: str) -> None:
    async def body(box: Box) -> None:
        result = await box.shell("echo a", "echo b >&2", "cat", "exit 3")
        assert (result.status, result.stdout, result.stderr, result.exit_code) == ("error", "a\n", "b\n", 3)
        await box.python("open('from_python.txt', 'w').write('hello')")
        assert box.produced == {"from_python.txt": b"hello"}
        assert (await box.shell("cat from_python.txt; pwd")).stdout == f"hello{result.working_directory}\n"
        assert (await box.shell("kill -9 $$")).exit_code == 137
        assert (await box.shell("x" * 200_000)).exit_code == 126

    in_box(tmp_path / "work", found_layers(sandbox=mode), body)


def test_code_that_overstays_is_interrupted_and_the_interpreter_lives(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        await box.python("x = 1")
        code = "print('begun', flush=True)\nopen('begun', 'w').close()\nwhile True: pass"
        result = await overstayed(tmp_path, box.python(code))
        assert (result.status, result.interrupted, result.killed) == ("timeout", True, False)
        assert result.stdout == "begun\n"
        assert (await box.python("x")).result == "1"

    in_box(tmp_path / "work", found_layers(), body)


@pytest.mark.parametrize("mode", MODES)
def test_code_that_ignores_the_interrupt_is_killed_and_the_next_call_starts_anew(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.tools.interpreter.GRACE_S", 0.2)

    async def body(box: Box) -> None:
        code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('on', flush=True)\n"
        result = await overstayed(tmp_path, box.python(f"{code}open('begun', 'w').close()\nwhile 1: pass"))
        assert (result.status, result.interrupted, result.killed) == ("timeout", True, True)
        assert result.stdout == "on\n"
        assert "NameError" in (await box.python("signal")).exception

    in_box(tmp_path / "work", found_layers(sandbox=mode), body)


def test_a_shell_that_overstays_is_killed_and_keeps_its_output(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        result = await overstayed(tmp_path, box.shell("echo begun; touch begun; sleep 1000"))
        assert (result.status, result.exit_code, result.timed_out) == ("timeout", None, True)
        assert result.stdout == "begun\n"

    in_box(tmp_path / "work", found_layers(), body)


def test_children_in_sessions_of_their_own_end_with_the_call(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        await box.shell("setsid sleep 4711 & (setsid setsid sleep 4711 &) ; sleep 0.2")
        await gone(["sleep", "4711"])

    in_box(tmp_path / "work", found_layers(), body)


WRITE = "import os\nfor fd in range(3, 50):\n    try: os.write(fd, {})\n    except OSError: pass"
"""Writes to every descriptor that may be the channel."""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os\nfor fd in range(3, 50):\n    try: os.close(fd)\n    except OSError: pass", "error"),
        (WRITE.format("b'x' * 60_000"), "error"),
        (WRITE.format("b'\\xff\\xff\\xff\\x7f'"), "error"),
        ("import os\nos._exit(0)", "error"),
        ("import os\nif os.fork() == 0: 'child'\nelse: os.wait()", "success"),
        ("import sys\nsys.stdout.close(); sys.stderr = None", "success"),
        ("import os\nos.close(1); os.close(2)", "success"),
    ],
    ids=["closes", "floods", "lies", "exits", "forks", "closes streams", "closes outputs"],
)
def test_code_that_breaks_the_protocol_harms_its_own_interpreter_only(
    tmp_path: Path, code: str, status: str
) -> None:
    async def body(box: Box) -> None:
        assert (await box.python(code, timeout_s=20)).status == status
        assert (await box.python("1 + 1")).result == "2"
        assert (await box.python("2 + 2")).result == "4"

    in_box(tmp_path / "work", found_layers(), body)


def test_an_answer_that_nobody_asked_for_ends_the_interpreter_before_the_next_call(tmp_path: Path) -> None:
    forged = WRITE.format("bytes([21, 0, 0, 0]) + b'A' + bytes(16) + b'x'").replace("\n", "\n    ")
    code = "import threading, time\ndef f():\n    import os\n    while not os.path.exists('go'): time.sleep(0.001)\n"
    code += f"    {forged}\n    open('forged', 'w').close()"

    async def body(box: Box) -> None:
        await box.python(code + "\nt = threading.Thread(target=f); t.start()")
        await box.put("go", b"")
        await until(lambda: exists(tmp_path, "forged"))
        assert "NameError" in (await box.python("t")).exception

    in_box(tmp_path / "work", found_layers(), body)


def test_output_is_bounded_however_much_is_written(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        result = await box.python(
            "import os\nfor _ in range(1000): os.write(1, b'x' * 100_000)\nprint('end')"
        )
        assert result.status == "success"
        assert len(result.stdout) == 64 << 10
        shell = await box.shell("head -c 100000000 /dev/zero | tr '\\0' y", max_chars=100)
        assert (shell.status, shell.stdout) == ("success", "y" * 100)
        assert len((await box.python("'x' * 10_000_000")).result) == 64 << 10

    in_box(tmp_path / "work", found_layers(), body)


def test_figures_arrive_as_png_and_are_closed(tmp_path: Path) -> None:
    """A stand-in for matplotlib, which the test environment lacks, with the three functions that are called."""
    fake = """
import os
os.makedirs('matplotlib', exist_ok=True)
open('matplotlib/__init__.py', 'w').close()
open('matplotlib/pyplot.py', 'w').write('''
png = b"\\\\x89PNG\\\\r\\\\n\\\\x1a\\\\n"
open_ = {1: png + b" one", 2: b"no picture", 3: png + bytes(3 << 20)}
def get_fignums(): return list(open_)
def figure(number):
    class Figure:
        def savefig(self, file, format): file.write(open_[number])
    return Figure()
def close(which): open_.clear()
''')
"""

    async def body(box: Box) -> None:
        await box.python(fake)
        assert (await box.python("import matplotlib.pyplot as plt")).images_png == [b"\x89PNG\r\n\x1a\n one"]
        assert (await box.python("plt.get_fignums()")).images_png == []

    in_box(tmp_path / "work", found_layers(), body)


def test_only_plain_files_of_their_own_are_produced(tmp_path: Path) -> None:
    code = """
import os, socket
open('plain.txt', 'w').write('1'); os.makedirs('a/b'); open('a/b/deep.txt', 'w').write('2')
for folder in ('skills', '__pycache__', '.hidden'):
    os.mkdir(folder); open(folder + '/x.txt', 'w').close()
for name in ('.dot', 'x.pyc', 'y.so', 'new\\nline', 'bell\\a'): open(name, 'w').close()
os.symlink('/etc/passwd', 'link'); os.symlink('a', 'folder-link'); os.mkfifo('fifo')
open('one', 'w').write('x'); os.link('one', 'two')
socket.socket(socket.AF_UNIX).bind('socket')
with open('sparse', 'wb') as f: f.truncate(200 << 20)
"""

    async def body(box: Box) -> None:
        assert (await box.python(code)).status == "success"
        sparse = box.produced.pop("sparse")
        assert len(sparse) == 1 << 20
        assert box.produced == {"plain.txt": b"1", "a/b/deep.txt": b"2", "one": "refused", "two": "refused"}
        await box.python("open('plain.txt', 'w').write('1')")
        assert box.produced == {"plain.txt": b"1"}
        wanted = (
            "plain.txt",
            "link",
            "folder-link/b/deep.txt",
            "fifo",
            "../x",
            "/etc/passwd",
            "gone",
            "a",
            "",
        )
        await box.run(SurfaceCall([Wanted(name) for name in wanted]))
        assert box.produced == {
            "plain.txt": b"1",
            "gone": "not_produced",
            **dict.fromkeys(("link", "fifo", "../x", "/etc/passwd", "a", ""), "refused"),
            "folder-link/b/deep.txt": "not_produced",
        }

    in_box(tmp_path / "work", found_layers(), body)


def test_files_beyond_the_number_of_a_call_stay_and_are_counted(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        await box.python(f"for n in range({MAX_PRODUCED + 10}): open(f'{{n:03}}.txt', 'w').write(str(n))")
        assert (len(box.produced), box.left) == (MAX_PRODUCED, 10)
        await box.run(SurfaceCall([Wanted(f"{MAX_PRODUCED + 5:03}.txt")]))
        assert box.produced == {f"{MAX_PRODUCED + 5:03}.txt": str(MAX_PRODUCED + 5).encode()}

    in_box(tmp_path / "work", found_layers(), body)


def test_mounted_files_are_seen_are_not_produced_and_replace_no_link_target(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")

    async def body(box: Box) -> None:
        await box.put("input.csv", b"a,b")
        await box.put("skills/greet/SKILL.md", b"hello")
        assert (await box.shell("cat input.csv skills/greet/SKILL.md")).stdout == "a,bhello"
        assert box.produced == {}
        await box.python(f"import os\nos.remove('input.csv'); os.symlink({str(victim)!r}, 'input.csv')")
        await box.put("input.csv", b"new")
        assert (await box.shell("cat input.csv")).stdout == "new"
        await box.python(f"import os\nos.symlink({str(tmp_path)!r}, 'folder')")
        for path in ("folder/victim", "../victim", "a//b", "/x"):
            await box.put(path, b"bad")
            with pytest.raises(Broken, match="could not be put into the sandbox"):
                await box.shell("true")
        assert victim.read_text() == "untouched"

    in_box(tmp_path / "work", found_layers(), body)


TOO_BIG = (
    "the work directory takes [0-9]+ bytes, agent.max_workdir_bytes allows 1048576; .* its files are removed"
)
TOO_MANY = r"the work directory has more than 50 files and folders \(agent.max_workdir_files\)"
FILL = {
    "a large file": ("open('big', 'wb').write(bytes(3_000_000))", TOO_BIG),
    "files with several links": (
        "open('big', 'wb').write(bytes(3_000_000))\nimport os; os.link('big', 'b')",
        TOO_BIG,
    ),
    "files that are left out": (
        "import os; os.mkdir('.x'); open('.x/y.so', 'wb').write(bytes(3_000_000))",
        TOO_BIG,
    ),
    "many files": ("for n in range(60): open(f'{n}', 'w').close()", TOO_MANY),
    "many folders": ("import os\nfor n in range(60): os.mkdir(f'{n}')", TOO_MANY),
    "many links": ("import os; open('f', 'w').close()\nfor n in range(60): os.link('f', f'{n}')", TOO_MANY),
    "many symbolic links": ("import os\nfor n in range(60): os.symlink('f', f'{n}')", TOO_MANY),
    "a deep tree": (
        "import os; os.makedirs('d/' * 40)",
        "the work directory has more than 32 levels of folders",
    ),
}
STAY = "\nopen('stays', 'w').close()\nimport time; time.sleep(1000)"


def small(**settings: Any) -> layers.Layers:
    return found_layers(max_workdir_bytes=1 << 20, max_workdir_files=50, **settings)


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", FILL)
def test_a_session_that_fills_its_work_directory_loses_its_processes_and_files_and_no_other_does(
    tmp_path: Path, what: str
) -> None:
    code, message = FILL[what]

    async def body(box: Box) -> None:
        other = Box(box.sandboxes, "other")
        await other.python("x = 1; open('mine', 'w').close()")
        # A call that ends before the first look, and one that goes on.
        for call in (code, code + STAY):
            await box.python("kept = 1")
            with pytest.raises(Broken, match=message):
                await box.python(call)
            assert (await box.shell("ls -A")).stdout == ""
            assert "NameError" in (await box.python("kept")).exception
        assert (await other.python("import os; x, os.listdir()")).result == "(1, ['mine'])"

    in_box(tmp_path / "work", small(), body)


def test_a_shell_that_fills_its_work_directory_is_ended(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        with pytest.raises(Broken, match="the work directory takes"):
            await box.shell("head -c 3000000 /dev/zero > big; sleep 4716")
        await gone(["sleep", "4716"])
        assert (await box.shell("ls -A")).stdout == ""

    in_box(tmp_path / "work", small(), body)


def test_sparse_files_and_links_within_the_bounds_are_no_error(tmp_path: Path) -> None:
    code = "import os\nopen('a', 'wb').write(bytes(500_000))\nfor n in range(10): os.link('a', f'{n}')\n"
    code += "with open('sparse', 'wb') as f: f.truncate(100 << 20)"

    async def body(box: Box) -> None:
        assert (await box.python(code)).status == "success"

    in_box(tmp_path / "work", small(), body)


def test_a_thread_that_fills_the_work_directory_between_calls_is_ended(tmp_path: Path) -> None:
    code = "import threading, os, time\ndef f():\n  while not os.path.exists('go'): time.sleep(0.001)\n"
    code += "  open('big', 'wb').write(bytes(3_000_000))\n  open('full', 'w').close()\n"
    code += "threading.Thread(target=f).start()"

    async def body(box: Box) -> None:
        await box.python(code)
        await box.put("go", b"")
        await until(lambda: exists(tmp_path, "full"))
        sandbox = await box.sandboxes.get(None, "one")
        await sandbox.check()
        assert not exists(tmp_path, "big")
        with pytest.raises(Broken, match="the work directory takes"):
            await box.python("1")
        assert (await box.python("1")).result == "1"

    in_box(tmp_path / "work", small(), body)


def test_input_beyond_the_bytes_of_the_work_directory_is_refused(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        await box.put("small", bytes(500_000))
        await box.put("big", bytes(600_000))
        with pytest.raises(Broken, match=r"could not be put .* more than agent\.max_workdir_bytes, 1048576"):
            await box.shell("true")
        assert (await box.shell("ls")).stdout == "small\n"

    in_box(tmp_path / "work", small(), body)


def test_a_disk_that_is_almost_full_ends_the_session_that_has_written_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is deleted and held open: no look at the work directory sees its bytes."""
    hidden = "import os\nf = open('f', 'wb'); os.remove('f'); f.write(bytes(3_000_000)); f.flush()"

    async def body(box: Box) -> None:
        other = Box(box.sandboxes, "other")
        await other.python("x = 1")
        await box.python(hidden)
        await box.sandboxes.keep_free()
        assert (await box.python("f.closed")).result == "False", "the disk has room"
        full = os.statvfs_result((4096, 4096, *[0] * 8))
        monkeypatch.setattr("workers.tools.sandboxes.os.statvfs", lambda _: full)
        await box.sandboxes.keep_free()
        with pytest.raises(
            Broken, match=r"the disk of the work directories has 0 bytes free, agent\.min_free"
        ):
            await box.python("1")
        assert "NameError" in (await box.python("f")).exception
        assert (await other.python("x")).result == "1"

    in_box(tmp_path / "work", found_layers(min_free_disk_bytes=1), body)


def test_an_end_whose_waiter_is_cancelled_still_ends_the_sandbox(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        await box.python("x = 1")
        sandbox = await box.sandboxes.get(None, "one")
        async with sandbox.turn():
            ending = asyncio.create_task(box.sandboxes.end(None, "one"))
            await until(lambda: len(box.sandboxes) == 0)
            ending.cancel()
        await asyncio.wait([ending])
        assert not list((tmp_path / "work").iterdir())

    in_box(tmp_path / "work", found_layers(), body)


def test_a_cancelled_call_ends_its_shell_and_leaves_the_sandbox_usable(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        await box.python("x = 7")
        python = box.python("import time; open('python', 'w').close(); time.sleep(4712)")
        for name, call in (("shell", box.shell("touch shell; sleep 4712")), ("python", python)):
            task = asyncio.create_task(call)
            await until(lambda name=name: exists(tmp_path, name))  # type: ignore[misc]
            task.cancel()
            await asyncio.wait([task])
        await gone(["sleep", "4712"])
        assert (await box.python("x")).result == "7"

    in_box(tmp_path / "work", found_layers(), body)


def test_the_first_process_of_a_namespace_ends_although_it_has_not_asked_to_die_with_bubblewrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = "import os, time; os.setsid(); open('begun', 'w').close(); time.sleep(4719)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {late!r}])"
    inside = dataclasses.replace(found_layers(), bwrap="bwrap")
    monkeypatch.setattr(layers.Layers, "command", lambda *_, **__: [sys.executable, "-c", outer])

    async def run() -> None:
        process = Process(inside, tmp_path, "shell", 60.0, (), 1 << 10)
        await until((tmp_path / "begun").exists)
        await process.end()
        await gone([sys.executable, "-c", late])

    asyncio.run(run())


def test_idle_sandboxes_end_and_the_longest_idle_one_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(box: Box) -> None:
        boxes = [Box(box.sandboxes, name) for name in "abc"]
        for number, each in enumerate(boxes[:2]):
            await each.python(f"x = {number}")
        await boxes[2].shell("true")
        assert len(box.sandboxes) == 2
        assert "NameError" in (await boxes[0].python("x")).exception, "the first sandbox was idle for longest"
        now = time.monotonic()
        monkeypatch.setattr("workers.tools.sandboxes.time.monotonic", lambda: now + 3601)
        await box.sandboxes.end_idle()
        assert len(box.sandboxes) == 0

    in_box(tmp_path / "work", found_layers(max_sandboxes=2), body)


def test_closed_folders_are_removed_and_what_an_ordinary_user_cannot_count_ends_the_session(
    tmp_path: Path,
) -> None:
    async def body(box: Box) -> None:
        call = box.shell("mkdir -p shut/inner && touch shut/inner/x && chmod 000 shut/inner shut")
        if os.geteuid() == 0:
            await call
        else:
            with pytest.raises(Broken, match="the work directory has folders that are closed to the host"):
                await call
            assert (await box.shell("ls -A")).stdout == ""

    in_box(tmp_path / "work", found_layers(), body)


def test_a_shell_that_is_not_there_fails_the_sandbox_and_not_the_command(tmp_path: Path) -> None:
    async def body(box: Box) -> None:
        with pytest.raises(Broken, match="the shell cannot be started"):
            await box.shell("true")

    in_box(tmp_path / "work", found_layers(shell_path="/nowhere/sh"), body)


def test_the_environment_of_a_tool_has_nothing_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    monkeypatch.setenv("GOROOT", "/nonexistent/go")

    async def body(box: Box) -> None:
        shown = (await box.shell("env; cat /proc/self/environ /proc/1/environ")).stdout
        assert "secret-token" not in shown
        assert "PENSTOCK" not in shown
        assert ("GOROOT" in shown) == (box.sandboxes._config.sandbox_profile == "developer")

    for profile in ("developer", "restricted"):
        in_box(tmp_path / "work", found_layers(sandbox_profile=profile), body)


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(layers.MachineUnfit, match=r"agent\.code_exec_python: /bin/false does not run"):
        layers.find(Agent(code_execution=True, code_exec_python="/bin/false"))
