"""The first program in a sandbox: shuts the rest of the sandbox behind itself, then runs what the host asks for.

1. Enter the control group of the sandbox. Set resource limits, then Landlock rules, then the seccomp filter. If one of
   them fails, tell the host and end.
2. Mode `shell`: wait for a command, and become the shell that runs the command. Mode `python`: run pieces of code, with
   their state kept between the pieces. Mode `program`: become the program. Mode `probe`: end; the host has seen which
   layers work.

The program needs nothing but the standard library, since the interpreter may be any. The program must not import our
modules. PERF: the shell waits for this start, so the program imports no `re` and no `json`.

The channel is a stream socket. Frames to the host: 4 bytes of length, 1 byte of kind, fields. `R` is ready, `F` is a
failure with a text, `A` an answer with status, exception, result, type of the result and figures. A frame from the host
is 4 bytes of length and the code or the command. Integers are little-endian.

Arguments: mode, channel descriptor, descriptor of the control group or empty, limits (name=value, by commas), readable
paths and writable paths (by colons), "1" to forbid TCP by Landlock, the seccomp program in hexadecimal digits, and what
the mode needs.
"""

import os
import sys

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_SCOPES = 3
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
MAX_FIELD_NBYTES = 64 << 10
MAX_FIGURES = 16
MAX_FIGURE_NBYTES = 2 << 20


def main(arguments: list[str]) -> int:
    """Close the sandbox and run the mode; returns the exit code."""
    mode, number, group, limits, readable, writable, no_tcp, program, *rest = arguments
    channel = int(number)
    os.set_inheritable(channel, False)
    try:
        # Without bubblewrap the parent is the host, whose death must end this process.
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        if group:
            enter_group(int(group))
        set_limits(limits)
        if readable or writable:
            restrict_paths(readable.split(":"), writable.split(":"), no_tcp == "1")
        if program:
            filter_calls(bytes.fromhex(program))
        send(channel, b"R", [])
        if mode == "shell":
            command = receive(channel)
            if command is not None:
                os.execv(rest[0], [rest[0], "-c", command.decode()])
        elif mode == "program":
            os.execvp(rest[0], rest)
        elif mode == "python":
            Interpreter(channel).serve()
    except OSError as error:
        send(channel, b"F", [str(error).encode()])
        return 125
    return 0


def enter_group(entry: int) -> None:
    """Move this process to a control group; `entry` is a descriptor of the group's `cgroup.procs`."""
    os.write(entry, b"0")
    os.close(entry)


def set_limits(text: str) -> None:
    """`as=1,cpu=2,...`: names of `resource.RLIMIT_*` in lower case."""
    if text:
        import resource

        for pair in text.split(","):
            name, value = pair.split("=")
            number = getattr(resource, "RLIMIT_" + name.upper())
            hard = resource.getrlimit(number)[1]
            limit = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
            resource.setrlimit(number, (limit, limit))


def _syscall(number: int, *arguments: object) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.syscall(ctypes.c_long(number), *arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return found


def landlock_version() -> int:
    """ABI of the kernel's Landlock; raises OSError where there is none."""
    import ctypes

    return _syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))


def restrict_paths(readable: list[str], writable: list[str], no_tcp: bool) -> None:
    """Allow reading and running below `readable`, everything below `writable`, nothing else."""
    import ctypes

    version = landlock_version()
    handled = (1 << 13) - 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL)):
        handled |= right if version >= since else 0
    tcp = 3 if no_tcp and version >= 4 else 0
    scopes = _SCOPES if version >= 6 else 0
    fields = [handled, tcp, scopes][: 1 + (version >= 4) + (version >= 6)]
    attributes = (ctypes.c_uint64 * len(fields))(*fields)
    ruleset = _syscall(
        LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(8 * len(fields)), ctypes.c_uint(0)
    )
    for paths, rights in ((readable, _EXECUTE | _READ | _LIST), (writable, handled)):
        for path in paths:
            if path and os.path.exists(path):
                _allow(ruleset, path, rights)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _syscall(LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    import ctypes
    import struct

    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("<Qi", rights, fd), 12)
        _syscall(LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0))
    finally:
        os.close(fd)


def _prctl(option: int, value: int, address: int = 0) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    values = (ctypes.c_ulong(each) for each in (value, address, 0, 0))
    if libc.prctl(ctypes.c_int(option), *values):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def filter_calls(program: bytes) -> None:
    """Load a seccomp program: an array of the kernel's `struct sock_filter`, 8 bytes each."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.c_char_p))

    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    filters = Program(len(program) // 8, program)
    _prctl(_PR_SET_SECCOMP, _FILTER, ctypes.addressof(filters))


def send(channel: int, kind: bytes, fields: list[bytes]) -> None:
    """One frame to the host."""
    parts = [len(field).to_bytes(4, "little") + field for field in fields]
    body = kind + b"".join(parts)
    data = memoryview(len(body).to_bytes(4, "little") + body)
    while data:
        data = data[os.write(channel, data) :]


def receive(channel: int) -> "bytes | None":
    """The code or the command of the next call; None when the host is gone."""
    head = _read(channel, 4)
    return None if head is None else _read(channel, int.from_bytes(head, "little"))


def _read(channel: int, nbytes: int) -> "bytes | None":
    data = bytearray()
    while len(data) < nbytes:
        more = os.read(channel, nbytes - len(data))
        if not more:
            return None
        data += more
    return bytes(data)


class Interpreter:
    """Runs pieces of code in one namespace."""

    def __init__(self, channel: int) -> None:
        import types

        self._channel, self._pid, self._cells = channel, os.getpid(), 0
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module
        sys.argv = [""]
        sys.path.insert(0, os.getcwd())

    def serve(self) -> None:
        """Answer calls until the host closes the channel."""
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            code = receive(self._channel)
            if code is None:
                return
            fields = self._run(code.decode("utf-8", "replace"))
            if os.getpid() != self._pid:
                # Code has forked, and the copy has returned: only one process answers.
                os._exit(0)
            send(self._channel, b"A", fields)

    def _run(self, code: str) -> list[bytes]:
        """Status, exception, result, type of the result, then figures, all as bytes."""
        import signal

        exception = result = kind = ""
        figures: list[bytes] = []
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                value = self._execute(code)
                if value is not None:
                    result, kind = repr(value), type(value).__name__
                figures = take_figures()
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except BaseException as error:
            exception = told(error)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                # Code may have closed or replaced its streams.
                pass
        status = b"error" if exception else b"success"
        return [status, *(bounded(text) for text in (exception, result, kind)), *figures]

    def _execute(self, code: str) -> object:
        """Run the statements; the value of the last one if the last one is an expression."""
        import ast
        import linecache

        self._cells += 1
        name = f"<call {self._cells}>"
        linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
        # Not `ast.parse`, whose frame would stand in the traceback of a SyntaxError.
        tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST)  # type: ignore[assignment]
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        space = self._module.__dict__
        exec(compile(tree, name, "exec"), space)
        if isinstance(last, ast.Expr):
            return eval(compile(ast.Expression(last.value), name, "eval"), space)
        return None


def told(error: BaseException) -> str:
    """The traceback of an error of the code, without the frames of this program."""
    import traceback

    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip("\n")
    except BaseException:
        return type(error).__name__


def bounded(text: str) -> bytes:
    """The text as UTF-8, cut to the size of a field."""
    return text[:MAX_FIELD_NBYTES].encode("utf-8", "replace")[:MAX_FIELD_NBYTES]


def take_figures() -> list[bytes]:
    """The open figures of matplotlib as PNG, closed afterwards; none where matplotlib was not used."""
    plots = sys.modules.get("matplotlib.pyplot")
    if plots is None:
        return []
    import io

    found = []
    for number in plots.get_fignums()[:MAX_FIGURES]:
        buffer = io.BytesIO()
        plots.figure(number).savefig(buffer, format="png")
        if len(buffer.getvalue()) <= MAX_FIGURE_NBYTES:
            found.append(buffer.getvalue())
    plots.close("all")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
