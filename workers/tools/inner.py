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
        Library().prctl(_PR_SET_PDEATHSIG, _SIGKILL)
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


class Library:
    """Two functions of the C library, which take words, and the addresses of bytes.

    Both raise OSError for a result below 0. PERF: `ctypes` around this module takes 4 ms of processor time, a fifth of
    the start of a shell.
    """

    def __init__(self) -> None:
        import _ctypes

        class Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
            _type_ = "l"

        class Function(_ctypes.CFuncPtr):
            _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
            _restype_ = Long

        library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
        self._errno, self._word = _ctypes.get_errno, Long
        self._functions = {name: Function(_ctypes.dlsym(library, name)) for name in ("syscall", "prctl")}

    def syscall(self, number: int, *arguments: "int | bytes | None") -> int:
        """A system call by its number."""
        return self._call("syscall", number, *arguments)

    def prctl(self, option: int, value: int, address: "int | bytes" = 0) -> None:
        """Change something about this process."""
        self._call("prctl", option, value, address, 0, 0)

    def _call(self, name: str, number: int, *arguments: "int | bytes | None") -> int:
        words = (self._word(each) if isinstance(each, int) else each for each in (number, *arguments))
        status = int(self._functions[name](*words))
        if status < 0:
            error = self._errno()
            raise OSError(error, f"{name} {number}: {os.strerror(error)}")
        return status


def landlock_version() -> int:
    """ABI of the kernel's Landlock; raises OSError where there is none."""
    return Library().syscall(LANDLOCK_CREATE, None, 0, 1)


def restrict_paths(readable: list[str], writable: list[str], no_tcp: bool) -> None:
    """Allow reading and running below `readable`, everything below `writable`, nothing else."""
    library, version = Library(), landlock_version()
    handled = (1 << 13) - 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL)):
        handled |= right if version >= since else 0
    tcp = 3 if no_tcp and version >= 4 else 0
    scopes = _SCOPES if version >= 6 else 0
    fields = [handled, tcp, scopes][: 1 + (version >= 4) + (version >= 6)]
    attributes = b"".join(field.to_bytes(8, sys.byteorder) for field in fields)
    ruleset = library.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0)
    for paths, rights in ((readable, _EXECUTE | _READ | _LIST), (writable, handled)):
        for path in paths:
            if path and os.path.exists(path):
                _allow(library, ruleset, path, rights)
    library.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    library.syscall(LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(library: Library, ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = rights.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        library.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0)
    finally:
        os.close(fd)


def filter_calls(program: bytes) -> None:
    """Load a seccomp program: an array of the kernel's `struct sock_filter`, 8 bytes each."""
    import _ctypes

    class Char(_ctypes._SimpleCData):  # type: ignore[type-arg]
        _type_ = "c"

    class Filters(_ctypes.Array):  # type: ignore[type-arg]
        _type_ = Char
        _length_ = len(program)

    filters = Filters.from_buffer_copy(program)
    # The kernel's `struct sock_fprog`: the number of filters, padded to a word, and their address.
    words = len(program) // 8, _ctypes.addressof(filters)
    library = Library()
    library.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    library.prctl(_PR_SET_SECCOMP, _FILTER, b"".join(word.to_bytes(8, sys.byteorder) for word in words))


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

    figures = []
    for number in plots.get_fignums()[:MAX_FIGURES]:
        buffer = io.BytesIO()
        plots.figure(number).savefig(buffer, format="png")
        if len(buffer.getvalue()) <= MAX_FIGURE_NBYTES:
            figures.append(buffer.getvalue())
    plots.close("all")
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
