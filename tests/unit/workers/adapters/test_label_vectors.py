"""Labels of a bi-encoder are encoded in slices of bounded size, each as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.errors import InvalidInput
from tests.conformance.extractors import required_library
from tests.tiny.models import build
from workers.adapters.shared import label_vectors


def test_labels_are_encoded_in_slices_and_as_the_library_does(tmp_path: Path, monkeypatch: Any) -> None:
    required_library("gliner")
    from gliner import GLiNER

    monkeypatch.setattr(label_vectors, "_SLICE_TOKENS", 16)
    model = GLiNER.from_pretrained(str(build("gliner_bi", tmp_path / "model")))
    encoder = label_vectors.LabelEncoder(model)
    sizes: list[int] = []
    layer = model.model.token_rep_layer
    encode = layer.encode_labels
    layer.encode_labels = lambda ids, mask: sizes.append(ids.numel()) or encode(ids, mask)
    rows = [["person", "city of the river"], ["b", "person", "a", "a camera in Paris " * 4, "c"], ["d"]]
    with torch.inference_mode():
        found = encoder.inputs([encoder.tokenize(row) for row in rows])
    assert found["prompts_embedding_mask"].sum(dim=1).tolist() == [2, 5, 1]
    assert len(sizes) > 2 and sum(size > 16 for size in sizes) == 1, sizes
    layer.encode_labels = encode
    tokenizer = model.data_processor.labels_tokenizer
    for row, vectors in zip(rows, found["labels_embeds"], strict=True):
        for label, vector in zip(row, vectors, strict=False):
            alone = encode(**tokenizer([label], return_tensors="pt", return_token_type_ids=False))
            assert (vector - alone[0]).abs().max() <= 1e-5


def test_a_label_longer_than_the_encoder_is_cut(tmp_path: Path) -> None:
    required_library("gliner")
    from gliner import GLiNER

    encoder = label_vectors.LabelEncoder(GLiNER.from_pretrained(str(build("gliner_bi", tmp_path / "model"))))
    [ids] = encoder.tokenize(["a b " * 400])
    assert len(ids) == 512


def test_a_label_with_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    required_library("gliner")
    from gliner import GLiNER

    model = GLiNER.from_pretrained(str(build("gliner_bi", tmp_path / "model")))
    model.data_processor.labels_tokenizer.add_tokens([f"zzneu{number}" for number in range(6)])
    encoder = label_vectors.LabelEncoder(model)
    assert len(encoder.tokenize(["city", "river"])) == 2
    with pytest.raises(InvalidInput, match=r"params\.labels: the token 'zzneu5' has the id \d+"):
        encoder.tokenize(["city", "zzneu5 bank"])
