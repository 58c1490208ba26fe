"""`python3 -m tools.package_index [URL]`: whether pip can reach its index, told in seconds instead of pip's minutes.

Only the standard library is used, since no environment may exist yet.

1. pip itself says which index its configuration names. An index that is a directory, and `no-index`, need no network.
2. One request goes to each index, through the proxies of the environment. Any answer of any host counts.
3. A failure ends with one sentence, which names the way without internet.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

PATIENCE_S = 5.0
"""How long an index may take to answer at all."""
_DEFAULT = "https://pypi.org/simple"


def configured() -> dict[str, str]:
    """pip's options by name, those of the environment last. Without pip only the environment is read."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {
        name.rpartition(".")[2]: value.strip("'\"")
        for name, _, value in (line.partition("=") for line in done.stdout.splitlines())
    }
    prefix = "PIP_"
    by_variable = {
        name.removeprefix(prefix).lower().replace("_", "-"): value
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }
    return found | by_variable


def indexes(options: Mapping[str, str], further: Sequence[str]) -> list[str]:
    """Addresses over HTTP that an installation with these options asks."""
    if options.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
        return []
    named = (options.get("index-url") or _DEFAULT, *further)
    return [url for url in named if url.startswith(("http://", "https://"))]


def failure(url: str, patience_s: float = PATIENCE_S) -> str:
    """Why `url` gives no answer within `patience_s`, or ""."""
    found = [f"no answer within {patience_s:g} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")):
                found[0] = ""
        except urllib.error.HTTPError:
            found[0] = ""
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            # NOTE: a certificate that this Python does not trust may be one that pip is told to trust.
            found[0] = "" if "CERTIFICATE" in str(reason) else str(getattr(reason, "strerror", "") or reason)

    # NOTE: a look-up of a name has no time limit, so the thread that asks is left behind.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience_s)
    return found[0]


def main(further: Sequence[str]) -> int:
    """Ask pip's index and `further` ones; returns 1 and prints one sentence where one cannot be reached."""
    for url in indexes(configured(), further):
        if why := failure(url):
            print(
                f"penstock: the package index {url} cannot be reached ({why}): "
                "docs/install.md#without-internet says how packages come from a directory",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
