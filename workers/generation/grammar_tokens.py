"""The tokenizer of a model as llguidance reads the tokenizer: no text becomes a control token.

1. llguidance tokenizes the text that a grammar forces. The model's own tokenizer would make a control token of letters
   such as `<think>`, which a grammar of text does not take.
2. `without_marks` gives control tokens other names, which no text has. All ids stay what they are.
3. Grammars in Lark may name control tokens. `with_ids` writes ids in place of these names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

_HIDDEN = "\U0010ffff"
"""A character that no text has."""
_LARK_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*|(?P<token><[^<>\s\[\]]+>)'
)


def is_control(token: Any, marks: Collection[str]) -> bool:
    """Whether an added token controls the model, as llguidance sees it, or is part of one of the `marks`."""
    text: str = token.content
    return bool(token.special) or (text[:1] + text[-1:]) == "<>" or any(text in mark for mark in marks)


def without_marks(text: str, control: Collection[str]) -> str:
    """JSON text of a tokenizer in which the `control` tokens are special and have names that no text has."""
    tokenizer = msgspec.json.decode(text)
    names = {name: f"{name[:-1]}{_HIDDEN}{name[-1:]}" for name in control}
    for token in tokenizer["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": True}
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        _rename_pieces(model, names)
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    return msgspec.json.encode(tokenizer).decode()


def with_ids(lark: str, special: Mapping[str, int]) -> str:
    """A grammar in Lark with `<[id]>` in place of the names of control tokens."""

    def written(part: re.Match[str]) -> str:
        token = special.get(part["token"] or "")
        return part[0] if token is None else f"<[{token}]>"

    return _LARK_PART.sub(written, lark)


def _rename_pieces(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename pieces of a vocabulary, and leave out merges that would make one of them."""
    known = names.keys() & model["vocab"].keys()
    if not known:
        return
    model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    unknown = model.get("unk_token") or ""
    if unknown in names:
        model["unk_token"] = names[unknown]
    model["merges"] = [
        merge
        for merge in model.get("merges", ())
        if ("".join(merge) if isinstance(merge, list) else merge.replace(" ", "")) not in known
    ]
