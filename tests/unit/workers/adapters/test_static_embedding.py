"""Static embeddings against sentence-transformers, and against model2vec's rules in numpy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from ipc.wire.messages import EncodeCall, InputItem
from tests.harness.calls import asked
from tests.harness.later import sentence_transformers
from tests.tiny import vocabularies
from tests.tiny.texts import mixed_lengths
from workers.adapters.base import LoadContext, Prepared
from workers.adapters.shared.checkpoint import CheckpointError
from workers.adapters.static_embedding import StaticEmbeddingAdapter

WIDTH = 12
TEXTS = [*mixed_lengths()[:6], "", "\u2603 river \u2603", "[SEP] [CLS] river"]
KINDS = "sentence_transformers.models."


def words(place: Path) -> int:
    """Write tokenizer.json, which puts special tokens around a text, and nothing else; the number of tokens."""
    size = vocabularies.wordpiece(place)
    for path in place.iterdir():
        if path.name != "tokenizer.json":
            path.unlink()
    return size


def modules(place: Path, *kinds: tuple[str, str]) -> None:
    """modules.json of these kinds, each with its path."""
    listed = [{"type": KINDS + kind, "path": path, "name": path or "0"} for kind, path in kinds]
    (place / "modules.json").write_text(json.dumps(listed))


def drawn(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(place: Path, batch_tokens: int = 16384, **options: Any) -> StaticEmbeddingAdapter:
    return StaticEmbeddingAdapter.load(
        LoadContext(
            directory=place,
            model_id="static",
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_sequence_length=None,
            options=options,
            progress=lambda phase, fraction: None,
            batch_tokens=batch_tokens,
        )
    )


def prepare(
    adapter: StaticEmbeddingAdapter, texts: list[str], call: EncodeCall | None = None
) -> list[Prepared]:
    found = adapter.prepare([InputItem(text=text) for text in texts], call or asked(is_query=None))
    return [one for one in found if isinstance(one, Prepared)]


def encode(adapter: StaticEmbeddingAdapter, texts: list[str], call: EncodeCall | None = None) -> np.ndarray:
    batch = adapter.collate(prepare(adapter, texts, call))
    vectors = adapter.encode(batch, frozenset({"dense"}))["dense"]
    assert isinstance(vectors, torch.Tensor)
    return vectors.numpy()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that sentence-transformers could have saved: a table below, a Normalize, prompts, a width."""
    place = tmp_path_factory.mktemp("theirs")
    (place / "0_StaticEmbedding").mkdir()
    size = words(place / "0_StaticEmbedding")
    save_file(
        {"embedding.weight": drawn(size, WIDTH)}, str(place / "0_StaticEmbedding" / "model.safetensors")
    )
    modules(place, ("StaticEmbedding", "0_StaticEmbedding"), ("Normalize", "1_Normalize"))
    stored = {"prompts": {"query": "river: "}, "truncate_dim": 8, "similarity_fn_name": "cosine"}
    (place / "config_sentence_transformers.json").write_text(json.dumps(stored))
    return place


def test_vectors_equal_those_of_sentence_transformers(theirs: Path) -> None:
    reference = sentence_transformers.SentenceTransformer(str(theirs), device="cpu")
    adapter = load(theirs)
    assert adapter.dims == {"dense": 8}
    assert np.abs(encode(adapter, TEXTS) - reference.encode(TEXTS)).max() < 1e-6
    queries = reference.encode(TEXTS, prompt_name="query")
    assert np.abs(encode(adapter, TEXTS, asked(is_query=True)) - queries).max() < 1e-6
    assert np.abs(queries - reference.encode(TEXTS)).max() > 0.1
    assert not encode(adapter, [""]).any(), "a text without tokens"


def test_a_text_of_any_length_is_read_whole_and_in_parts(theirs: Path) -> None:
    long = " ".join(mixed_lengths()) * 40
    reference = sentence_transformers.SentenceTransformer(str(theirs), device="cpu")
    adapter = load(theirs, batch_tokens=100)
    [item] = prepare(adapter, [long])
    assert item.cost > 5000 and not item.truncated
    assert np.abs(encode(adapter, ["water", long, "x"]) - reference.encode(["water", long, "x"])).max() < 1e-5


def model2vec(place: Path, table: torch.Tensor, **others: torch.Tensor) -> Path:
    """A directory as model2vec saves one, without modules.json."""
    words(place)
    save_file({"embeddings": table, **others}, str(place / "model.safetensors"))
    (place / "config.json").write_text(json.dumps({"normalize": True, "embedding_dtype": str(table.dtype)}))
    return place


def by_hand(place: Path, texts: list[str], tensors: dict[str, torch.Tensor], most: int = 512) -> np.ndarray:
    """Vectors by the rules of model2vec."""
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    median = int(np.median([len(token) for token in tokenizer.get_vocab()]))
    table = tensors["embeddings"].numpy()
    found = []
    for text in texts:
        ids = tokenizer.encode(text[: most * median], add_special_tokens=False).ids[:most]
        kept = [number for number in ids if number != tokenizer.token_to_id("[UNK]")]
        rows = table[tensors["mapping"].numpy()[kept] if "mapping" in tensors else kept].astype(np.float32)
        if "weights" in tensors:
            rows = rows * tensors["weights"].numpy()[kept][:, None]
        mean = rows.sum(axis=0) / max(1, len(kept))
        found.append(mean / max(float(np.linalg.norm(mean)), 1e-12))
    return np.array(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_a_table_of_model2vec_leaves_the_unknown_token_out(dtype: torch.dtype, tmp_path: Path) -> None:
    size = words(tmp_path)
    place = model2vec(tmp_path, (drawn(size, WIDTH) * 40).to(dtype))
    stored = {"embeddings": (drawn(size, WIDTH) * 40).to(dtype)}
    adapter = load(place)
    assert np.abs(encode(adapter, TEXTS) - by_hand(place, TEXTS, stored)).max() < 1e-6
    assert [item.cost for item in prepare(adapter, ["river", "\u2603 river", "\u2603"])] == [1, 1, 1]
    assert adapter.memory_bytes == size * WIDTH * dtype.itemsize


def test_tokens_that_share_a_row_have_weights(tmp_path: Path) -> None:
    size = words(tmp_path)
    stored = {
        "embeddings": (drawn(20, WIDTH) * 40).to(torch.int8),
        "mapping": torch.arange(size) % 20,
        "weights": drawn(size, seed=6).abs(),
    }
    place = model2vec(tmp_path, stored["embeddings"], mapping=stored["mapping"], weights=stored["weights"])
    adapter = load(place)
    assert np.abs(encode(adapter, TEXTS) - by_hand(place, TEXTS, stored)).max() < 1e-6
    assert np.linalg.norm(encode(load(place, normalize=False), ["water"])) > 2, "an entry may say otherwise"


def test_a_table_of_model2vec_cuts_by_tokens_and_by_characters(tmp_path: Path) -> None:
    size = words(tmp_path)
    place = model2vec(tmp_path, drawn(size, WIDTH))
    (place / "config.json").write_text(json.dumps({"normalize": True, "max_length": 6}))
    texts = ["a b c d e f g h", "a " * 5 + "river " * 30, " " * 200 + "river"]
    adapter = load(place)
    assert adapter.max_sequence_length == 6
    assert [item.truncated for item in prepare(adapter, [*texts, "a b"])] == [True, True, True, False]
    assert (
        np.abs(encode(adapter, texts) - by_hand(place, texts, {"embeddings": drawn(size, WIDTH)}, 6)).max()
        < 1e-6
    )
    shorter = EncodeCall([], ["dense"], options={"max_tokens": 2})
    assert np.allclose(encode(adapter, ["a b c d"], shorter), encode(adapter, ["a b"]))
    chunked = EncodeCall([], ["dense"], overflow="chunk")
    (place / "config.json").write_text(json.dumps({"normalize": True, "max_length": None}))
    assert np.allclose(encode(adapter, texts, chunked), encode(load(place), texts), atol=1e-6)


def test_token_ids_of_a_caller_are_rows(theirs: Path) -> None:
    adapter = load(theirs)
    ids = adapter.tokenizer.convert_tokens_to_ids(["river", "engine"])
    [given] = adapter.prepare([InputItem(ids=ids)], asked())
    assert isinstance(given, Prepared)
    vector = adapter.encode(adapter.collate([given]), frozenset({"dense"}))["dense"]
    assert isinstance(vector, torch.Tensor)
    assert np.array_equal(vector.numpy(), encode(adapter, ["river engine"]))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"other": drawn(4, 2)}, "model.safetensors: neither embedding.weight nor embeddings"),
        ({"embeddings": drawn(4)}, "the table is torch.float32 [4], expected two dimensions"),
        (
            {"embeddings": drawn(4, 2), "mapping": torch.arange(5)},
            "mapping names rows beyond the 4 of embeddings",
        ),
        (
            {"embeddings": drawn(4, 2), "mapping": torch.zeros(5, 2, dtype=torch.int64)},
            "mapping is torch.int64 [5, 2], expected one row number for each token id",
        ),
        (
            {"embeddings": drawn(4, 2), "mapping": torch.zeros(0, dtype=torch.int64)},
            "mapping is torch.int64 [0], expected one row number for each token id",
        ),
        (
            {"embeddings": drawn(4, 2), "weights": drawn(3)},
            "weights has the shape [3], expected [4]: one for each token id",
        ),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_shape(
    tensors: dict[str, torch.Tensor], why: str, tmp_path: Path
) -> None:
    words(tmp_path)
    save_file(tensors, str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=re.escape(why)):
        load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load(tmp_path)
