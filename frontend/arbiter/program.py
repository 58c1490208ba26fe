"""`python -P -m frontend.arbiter.program -c gunicorn.conf.py`: Gunicorn as `penstock serve` starts it.

Gunicorn's own command puts the current directory first among the places of modules; this one leaves them alone.
"""

from __future__ import annotations

import os

from gunicorn.app.wsgiapp import WSGIApplication


class Server(WSGIApplication):  # type: ignore[misc]
    """Gunicorn with our modules and libraries only."""

    def chdir(self) -> None:
        """Go to the configured directory, without importing from it."""
        os.chdir(self.cfg.chdir)


if __name__ == "__main__":
    Server(prog="penstock serve").run()
