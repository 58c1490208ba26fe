"""Packages that take about a second to import and that few tests use; the first use of one imports the package.

Every process of a test run collects all tests, and an import at the head of a module is paid for by all of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["anthropic", "ollama", "openai", "sentence_transformers", "stats"]

if TYPE_CHECKING:
    import anthropic
    import ollama
    import openai
    import sentence_transformers
    from scipy import stats
else:

    class _Later:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            # pytest asks every name of a module for marks and wrappers.
            if attribute.startswith("_"):
                raise AttributeError(attribute)
            return getattr(importlib.import_module(self._name), attribute)

    anthropic = _Later("anthropic")
    ollama = _Later("ollama")
    openai = _Later("openai")
    sentence_transformers = _Later("sentence_transformers")
    stats = _Later("scipy.stats")
