"""What a reference opens: a model's files, its entry, and the conditions of the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from ipc.catalog.entries import ModelEntry
from workers.adapters.shared.prompting import Prompts


class Opening(msgspec.Struct, frozen=True):
    """A model's files and the conditions of the comparison; `length` is in tokens, the reference runs in float32."""

    entry: ModelEntry
    directory: Path
    device: torch.device
    length: int
    trust_remote_code: bool

    @property
    def place(self) -> str:
        """The directory as text."""
        return str(self.directory)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that the model classes of sentence-transformers share."""
        return {
            "device": str(self.device),
            "local_files_only": True,
            "trust_remote_code": self.trust_remote_code,
            "model_kwargs": {"dtype": torch.float32},
        }

    def prompted(self, texts: list[str], *, is_query: bool) -> list[str]:
        """The texts with the catalog's prompts, for models without stored prompts."""
        options = self.entry.runtime
        prompts = Prompts(
            named=options.get("prompts", {}),
            query_template=options.get("query_template"),
            document_template=options.get("document_template"),
            default_instruction=options.get("default_instruction"),
        )
        before, after = prompts.affixes(None, is_query)
        return [f"{before}{text}{after}" for text in texts]
