"""Tokens that attention does not see (filled-up queries): packed, padded and by hand they give the same vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from tests.tiny.models import build
from workers.adapters.shared.encoder import TextEncoder
from workers.adapters.shared.packing import TokenSequence

LENGTHS = ((32, 7), (32, 32), (32, 1), (32, None), (40, 25), (9, None), (40, None), (5, 2))


def sequences() -> list[TokenSequence]:
    """Sequences of several lengths, some of whose last tokens are not seen."""
    random = np.random.default_rng(5)
    return [TokenSequence(random.integers(10, 100, length), seen=seen) for length, seen in LENGTHS]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["dense_mean", "dense_modernbert", "dense_xlmr", "dense_mpnet"])
def test_unseen_tokens_get_vectors_and_give_none_to_others(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(build(name, tmp_path / name)).eval()
    encoder = TextEncoder(model, pad_id=1)
    assert encoder.packed == (name != "dense_mpnet")
    given = sequences()
    batch = encoder.pack(given)
    with torch.inference_mode():
        rows = encoder.token_rows(batch)
        padded = encoder._padded_rows(batch, encoder._cut) if not encoder.packed else None
    plain = AutoModel.from_pretrained(tmp_path / name).eval()
    for number, sequence in enumerate(given):
        place = int(batch.restore[number])
        first, last = int(batch.layout.first[place]), int(batch.layout.last[place])
        ids = torch.from_numpy(sequence.ids)[None]
        seen = len(sequence.ids) if sequence.seen is None else sequence.seen
        mask = (torch.arange(len(sequence.ids)) < seen).long()[None]
        with torch.inference_mode():
            positions = torch.arange(len(sequence.ids))[None] + encoder.positions.offset
            expected = plain(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state[0]
        torch.testing.assert_close(rows[first : last + 1], expected, rtol=0, atol=2e-5)
        if padded is not None:
            torch.testing.assert_close(padded[first : last + 1], expected, rtol=0, atol=2e-5)


def test_a_batch_without_unseen_tokens_has_no_masks() -> None:
    from workers.adapters.shared.packing import pack

    layout = pack([TokenSequence(np.arange(1, 5)), TokenSequence(np.arange(1, 5), seen=4)]).layout
    assert layout.partial == frozenset()
    assert pack([TokenSequence(np.arange(1, 5))]).layout.seen is None
