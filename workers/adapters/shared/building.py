"""One model is built at a time.

transformers takes methods off its classes while it builds a model, for every thread, and imports its modules when they
are first asked for, which two threads at once may find half-imported. Weights come from the page cache by then, so the
threads that load would wait for the same memory anyway.
"""

from __future__ import annotations

import threading

BUILDING = threading.RLock()
"""Held while an adapter is imported and its model is built."""
