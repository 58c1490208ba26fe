"""Run a command as systemd's SystemCallFilter= would: `syscall_filter.py ALLOWED_FILE COMMAND...`.

Every system call whose name is not in the file (one a line) fails with EPERM, in the command and all its children.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_ALLOW = 0x7FFF0000  # SCMP_ACT_ALLOW
_REFUSE = 0x00050000 | 1  # SCMP_ACT_ERRNO(EPERM)
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS


def confine(allowed: list[str]) -> None:
    """Load the filter into this process. Names that this machine does not know are left out, as systemd does."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    seccomp.seccomp_load.argtypes = [ctypes.c_void_p]
    add = seccomp.seccomp_rule_add_array
    add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    context = seccomp.seccomp_init(_REFUSE)
    for name in allowed:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            add(context, _ALLOW, number, 0, None)
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if seccomp.seccomp_load(context) != 0:
        raise OSError("the system call filter was not accepted")


if __name__ == "__main__":
    confine(Path(sys.argv[1]).read_text().split())
    os.execv(sys.argv[2], sys.argv[2:])
