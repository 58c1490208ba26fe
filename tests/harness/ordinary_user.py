"""Runs tests once more as an ordinary user, from a process that is root.

1. The run has a mount namespace of its own. Where the Python, its packages or the tests lie below a directory that is
   closed to others, as `/root` is, an empty directory covers it there, with nothing but the needed directories below.
2. In the namespace the run becomes `nobody`, without groups and capabilities. Its paths are those of this process.
3. The mounts end with the run.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.conformance.required_tool import required_tool

NOBODY = 65534
_ROOT = Path(__file__).resolve().parents[2]


def needed() -> list[Path]:
    """Directories that tests read: the tests and sources, the environment, the Python below it."""
    found = (_ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
    return [
        each for each in dict.fromkeys(found) if not any(each.is_relative_to(p) for p in found if p != each)
    ]


def closed_above(place: Path) -> Path | None:
    """The topmost directory on the way to `place` that others may not pass."""
    for each in reversed((place, *place.parents)):
        if not each.stat().st_mode & stat.S_IXOTH:
            return each
    return None


def _mounts(holds: Path) -> Iterator[str]:
    """Lines of a shell that show the needed directories below those that are closed."""
    covers: dict[Path, list[tuple[Path, Path]]] = {}
    for number, place in enumerate(needed()):
        if (cover := closed_above(place)) is not None:
            hold = holds / str(number)
            hold.mkdir()
            covers.setdefault(cover, []).append((place, hold))
    for held in covers.values():
        yield from (f"mount --bind '{place}' '{hold}'" for place, hold in held)
    for cover, held in covers.items():
        yield f"mount -t tmpfs -o mode=755 cover '{cover}'"
        for place, hold in held:
            yield f"mkdir -p '{place}' && mount --move '{hold}' '{place}'"


def run_tests(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with these arguments as `nobody`; what it printed is in `stdout`."""
    for tool in ("unshare", "mount", "setpriv"):
        required_tool(tool)
    with tempfile.TemporaryDirectory(dir="/tmp") as place, tempfile.TemporaryDirectory(dir="/tmp") as holds:
        os.chown(place, NOBODY, NOBODY)
        become = f'exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --inh-caps=-all -- "$@"'
        pytest = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--basetemp={place}/tests")
        unshared = ("unshare", "--mount", "--propagation=private")
        script = "\n".join((*_mounts(Path(holds)), become))
        kept = {name: os.environ[name] for name in ("PATH", "CI", "LANG") if name in os.environ}
        return subprocess.run(
            [*unshared, "sh", "-euc", script, "sh", sys.executable, *pytest, *arguments],
            cwd=_ROOT,
            env={**kept, "HOME": place, "TMPDIR": place},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
