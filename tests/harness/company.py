"""Batches of uneven lengths for a family over a tiny model: items alone, in company, and by the model's own library.

Texts are drawn from words, long words, and the tokens that a model may treat apart: padding, ends, unknown and added
ones. Ids are drawn from the whole table of embeddings.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from ipc.wire.messages import Call, InputItem
from tests.tiny.models import build
from tests.tiny.texts import sentences
from workers.adapters.base import Adapter, LoadContext, Prepared
from workers.adapters.registry import resolve

Rows = list[np.ndarray]


class Family(NamedTuple):
    """A family over a tiny model: a call, what the adapter says of a batch, and what a library says of an item.

    `ids` tells whether items may be token ids, `marks` are tokens that the family refuses or rewrites in a text, `item`
    makes an item of a text, and `longest` is the most words of a text. A `twin` works as another family here does,
    and is left to the long variant.
    """

    name: str
    tiny: str
    call: Callable[[list[InputItem]], Call]
    said: Callable[[Any, Any], Rows]
    library: Callable[[Path, InputItem], np.ndarray]
    ids: bool = False
    limit: int = 250
    marks: tuple[str, ...] = ()
    item: Callable[[str], InputItem] = InputItem
    longest: int = 24
    twin: bool = False


def every(families: Sequence[Family]) -> list[Any]:
    """The families as parameters of a test."""
    return [
        pytest.param(
            one,
            id=f"{one.tiny}-{getattr(one.call, '__name__', '').strip('<>')}",
            marks=pytest.mark.long if one.twin else (),
        )
        for one in families
    ]


def built(root: Path, tiny: str) -> Path:
    """The tiny model below `root`, built once."""
    directory = root / tiny
    return directory if directory.is_dir() else build(tiny, directory)


@functools.cache
def load(family: str, directory: Path, limit: int | None = None) -> Adapter:
    """The adapter of a directory on CPU."""
    return resolve(family).load(
        LoadContext(directory, directory.name, torch.device("cpu"), torch.float32, limit, {}, lambda *_: None)
    )


def drawn_texts(draw: random.Random, tokenizer: Any, count: int, family: Family) -> list[str]:
    """Texts of uneven lengths with special tokens, without the family's marks, among their words."""
    apart = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), "\u2603\u2603", "zzqqj"]
    apart = [token for token in apart if token not in family.marks]
    words = " ".join(sentences()[:40]).split()
    texts = []
    for _ in range(count):
        length = min(draw.choice((1, 3, 6, 7, 20, 24)), family.longest)
        texts.append(" ".join(draw.choice(apart if draw.random() < 0.3 else words) for _ in range(length)))
    return texts


def drawn_ids(draw: random.Random, tokenizer: Any, rows: int, count: int) -> list[InputItem]:
    """Ids of uneven lengths, some of them special."""
    apart = [*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()]
    return [
        InputItem(
            ids=[
                draw.choice(apart) if draw.random() < 0.3 else draw.randrange(rows)
                for _ in range(draw.choice((1, 4, 40, 62, 68, 120)))
            ]
        )
        for _ in range(count)
    ]


@torch.inference_mode()
def said(family: Family, adapter: Adapter, items: Sequence[InputItem]) -> Rows:
    """What the adapter says of items in one batch."""
    prepared = adapter.prepare(items, family.call(list(items)))
    assert all(isinstance(one, Prepared) for one in prepared), prepared
    return family.said(adapter, adapter.collate(prepared))  # type: ignore[arg-type]


def compare(family: Family, directory: Path, seeds: Sequence[int], count: int) -> None:
    """Draw batches, and compare each item alone, in its batch, and by the library."""
    adapter = load(family.name, directory, family.limit)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rows = len(tokenizer)
    for seed in seeds:
        draw = random.Random(seed)
        items = [family.item(text) for text in drawn_texts(draw, tokenizer, count, family)]
        if family.ids:
            items += drawn_ids(draw, tokenizer, rows, count)
        for item, found in zip(items, said(family, adapter, items), strict=True):
            [alone] = said(family, adapter, [item])
            np.testing.assert_allclose(found, alone, rtol=0, atol=2e-5, err_msg=f"company: {item}")
            wanted = family.library(directory, item)
            np.testing.assert_allclose(alone, wanted, rtol=0, atol=5e-5, err_msg=f"library: {item}")


def captured(owner: Any, name: str, read: Callable[[Any], Any], run: Callable[[], Any]) -> list[Any]:
    """What `read` makes of each result of the method `name` of `owner` while `run` goes on."""
    method, found = getattr(owner, name), []

    def keep(*given: Any, **named: Any) -> Any:
        result = method(*given, **named)
        found.append(read(result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, keep)
        run()
    return found
