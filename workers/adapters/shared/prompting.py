"""Prompts around a text, by the first rule that applies.

1. The stored prompt that the request names. The names "query" and "document" choose a side, and so the rules below.
2. A template (`query_template`, `document_template`), which holds {text} and may hold {instruction}.
3. An instruction before the text, with a space in between unless the instruction ends in whitespace.
4. The stored prompt of the side: "query", or for documents the first of "document", "passage" and "corpus".
5. The stored default prompt (`default_prompt_name`), for texts of a request that states no side. Such texts are
   documents, and have the prompt of documents where the model stores one.

A query without an instruction has `default_instruction`. Rules 4 and 5 are those of `encode_query`, `encode_document`
and `encode` of sentence-transformers. A document never has the default prompt, which is mostly that of queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_DOCUMENT_NAMES = ("document", "passage", "corpus")
SIDES = ("query", "document")
"""Names of prompts that choose a side of the model."""


class Affixes(NamedTuple):
    """Text before and after every item."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts and templates of one model.  Raises ValueError for a template without {text}."""

    named: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    query_template: str | None = None
    document_template: str | None = None
    default_instruction: str | None = None

    def __post_init__(self) -> None:
        for template in (self.query_template, self.document_template):
            if template is not None and template.count("{text}") != 1:
                raise ValueError(f"a template needs {{text}} once: {template!r}")

    @property
    def names(self) -> list[str]:
        """The names that a request may give."""
        return list(dict.fromkeys((*SIDES, *self.named)))

    def affixes(self, instruction: str | None, is_query: bool | None, name: str = "") -> Affixes:
        """The text before and after each text of a request; `name` is one of `names`, or "".

        `is_query` is the side that the request states, None where the request states none.
        """
        if name in self.named and name not in SIDES:
            return Affixes(self.named[name], "")
        instruction = instruction or (self.default_instruction if is_query else None)
        template = self.query_template if is_query else self.document_template
        if template is not None:
            before, _, after = template.partition("{text}")
            filled = instruction or ""
            return Affixes(before.replace("{instruction}", filled), after.replace("{instruction}", filled))
        if instruction:
            return Affixes(instruction if instruction[-1].isspace() else instruction + " ", "")
        return Affixes(self._stored(is_query), "")

    def _stored(self, is_query: bool | None) -> str:
        """The stored prompt, or ""."""
        for name in ("query",) if is_query else _DOCUMENT_NAMES:
            if name in self.named:
                return self.named[name]
        return self.default if is_query is None else ""
