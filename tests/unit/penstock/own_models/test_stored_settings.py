"""What a model's own files state is obeyed as the model's library obeys it, or refused at load in words.

Each row changes a few stored keys of a tiny model. The model is then described and loaded as `penstock serve` does, and
compared with sentence-transformers or with transformers' pipelines on the same files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from ipc.catalog.reading import read_entry
from ipc.settings import Settings, Worker
from ipc.wire.messages import InputItem
from penstock.own_models.files import CannotTell
from penstock.own_models.places import find
from penstock.verification.ours import Ours
from tests.harness.later import sentence_transformers
from tests.tiny.models import SIZES, build, save, write_layout
from tests.tiny.texts import sentences
from tests.tiny.vocabularies import byte_level

PROMPTS, LAYOUT = "config_sentence_transformers.json", "sentence_bert_config.json"
TOKENIZER, CONFIG, METADATA = "tokenizer_config.json", "config.json", "artifact.metadata"
QUERY, LONG = sentences()[17], " ".join(sentences()[:4])
TEXTS = [LONG, "Marie built THE river in Paris; and: so on!", sentences()[5]]
Changes = Mapping[str, Mapping[str, Any]]
SHORT_LEFT: Changes = {TOKENIZER: {"truncation_side": "left", "model_max_length": 14}}
ASIDE = {"query": "find: ", "document": "about: ", "web": "web: "}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models by name, each built once; `NAME as saved` is the model as sentence-transformers saves it again."""
    root = tmp_path_factory.mktemp("stored")

    def get(name: str) -> Path:
        place, (tiny, _, again) = root / name, name.partition(" as ")
        if not place.is_dir():
            if again:
                kind = "CrossEncoder" if tiny.startswith("rr") else "MultiVectorEncoder"
                getattr(sentence_transformers, kind)(str(get(tiny)), device="cpu").save_pretrained(str(place))
            else:
                build(tiny, place)
        return place

    return get


def changed(directory: Path, place: Path, changes: Changes) -> Path:
    """A copy of a model with some keys of its files changed."""
    shutil.copytree(directory, place)
    for name, keys in changes.items():
        [path] = [place / name] if "*" not in name else place.glob(name)
        stored = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**stored, **keys}))
    return place


def ours(place: Path) -> Ours:
    """The model as a worker loads the entry that describes the directory."""
    entry = place.parent / "entry.yaml"
    entry.write_text(find(str(place), "tiny").text)
    return Ours(read_entry(entry), Settings(worker=Worker(torch_threads=1)), place)


def vectors(kind: str, output: str, place: Path) -> None:
    """Queries and documents equal those of a class of sentence-transformers, each text alone."""
    library = getattr(sentence_transformers, kind)(str(place), device="cpu")
    mine, items = ours(place), [InputItem(text) for text in TEXTS]
    for is_query, encode in ((True, library.encode_query), (False, library.encode_document)):
        found = mine.encode(items, output, is_query=is_query)
        for got, text in zip(found, TEXTS, strict=True):
            wanted = encode([text])[0]
            dense = wanted.to_dense() if output == "sparse" else wanted
            np.testing.assert_allclose(got, np.asarray(dense), rtol=1e-4, atol=2e-5)
    if output == "multivector":
        documents = [library.encode_document([text])[0] for text in TEXTS]
        wanted = library.similarity(library.encode_query([QUERY]), documents)[0]
        np.testing.assert_allclose(mine.score(QUERY, TEXTS), wanted, rtol=1e-5, atol=1e-5)


def pairs(place: Path) -> None:
    """Scores equal those of CrossEncoder, also where the query alone is too long."""
    library, mine = sentence_transformers.CrossEncoder(str(place), device="cpu"), ours(place)
    for query in (QUERY, LONG):
        wanted = [library.predict([(query, text)])[0] for text in TEXTS]
        np.testing.assert_allclose(mine.score(query, TEXTS), wanted, atol=1e-5)


def classes(task: str, place: Path) -> None:
    """Classes and their scores equal those of a pipeline."""
    pipe, labels = transformers.pipeline(task, str(place), device="cpu"), ["river", "a city of light"]
    zero = task == "zero-shot-classification"
    for text, found in zip(TEXTS, ours(place).extract(TEXTS, labels if zero else []), strict=True):
        if zero:
            answer = pipe(text, candidate_labels=labels)
            wanted = dict(zip(answer["labels"], answer["scores"], strict=True))
        else:
            wanted = {one["label"]: one["score"] for one in pipe([text], top_k=None, truncation=True)[0]}
        got = {one.label: one.score for one in found.classifications}
        assert got == pytest.approx(wanted, abs=1e-5)


def entities(place: Path) -> None:
    """Entities equal those of a pipeline."""
    pipe = transformers.pipeline(
        "token-classification", str(place), device="cpu", aggregation_strategy="simple"
    )
    for text, found in zip(TEXTS, ours(place).extract(TEXTS, []), strict=True):
        wanted = [(one["entity_group"], one["start"], one["end"]) for one in pipe(text)]
        assert [(one.label, one.start, one.end) for one in found.entities] == wanted


dense = partial(vectors, "SentenceTransformer", "dense")
sparse = partial(vectors, "SparseEncoder", "sparse")
late = partial(vectors, "MultiVectorEncoder", "multivector")
ROWS: list[tuple[Callable[[Path], None], str, Changes]] = [
    (dense, "dense_mean", {PROMPTS: {"prompts": {"query": "find: "}, "default_prompt_name": "query"}}),
    (dense, "dense_mean", {LAYOUT: {"processor_kwargs": {"model_max_length": 12}}}),
    (dense, "dense_mean", {LAYOUT: {"query_length": 8, "document_length": 11}}),
    (sparse, "splade", {PROMPTS: {"max_active_dims": 8}}),
    (late, "colbert_pylate", {PROMPTS: {"prompts": {"query": "find: ", "document": "about: "}}}),
    (late, "colbert_pylate", {PROMPTS: {"similarity_fn_name": "meanmaxsim"}}),
    (late, "colbert_pylate", {PROMPTS: {"query_expansion": {"strategy": "min", "length": 20}}}),
    (
        late,
        "colbert_pylate as saved",
        {"*_MultiVectorMask/config.json": {"skiplist_tasks": ["query", "document"]}},
    ),
    (pairs, "rr_bert", SHORT_LEFT),
    (pairs, "rr_bert as saved", {LAYOUT: {"processing_kwargs": {"text": {"max_length": 16}}}}),
    (partial(classes, "text-classification"), "classifier", SHORT_LEFT),
    (
        partial(classes, "zero-shot-classification"),
        "nli",
        {TOKENIZER: {"truncation_side": "left", "model_max_length": 24}},
    ),
    (entities, "ner", SHORT_LEFT),
]
MORE: list[tuple[Callable[[Path], None], str, Changes]] = [
    (dense, "dense_mean", {PROMPTS: {"prompts": ASIDE, "default_prompt_name": "web"}}),
    (dense, "dense_last", {PROMPTS: {"prompts": {"web": "web: "}, "default_prompt_name": "web"}}),
    (dense, "dense_last", {**SHORT_LEFT, LAYOUT: {"max_seq_length": None}}),
    (dense, "dense_mean", {LAYOUT: {"tokenizer_args": {"model_max_length": 12, "truncation_side": "left"}}}),
    (dense, "dense_mean", {LAYOUT: {"processing_kwargs": {"text": {"max_length": 9}}}}),
    (dense, "dense_mean", {TOKENIZER: {"padding_side": "left"}}),
    (dense, "dense_mean", {PROMPTS: {"truncate_dim": 20}}),
    (sparse, "splade", {PROMPTS: {"prompts": {"query": "find: "}, "default_prompt_name": "query"}}),
    (
        sparse,
        "splade",
        {LAYOUT: {"query_length": 9}, "1_SpladePooling/config.json": {"activation_function": "log1p_relu"}},
    ),
    (late, "colbert_pylate", {PROMPTS: {"query_expansion": None}}),
    (late, "colbert_pylate", {PROMPTS: {"model_type": "MultiVectorEncoder"}}),
    (
        late,
        "colbert_pylate",
        {PROMPTS: {"model_type": "MultiVectorEncoder", "attend_to_expansion_tokens": True}},
    ),
    (
        late,
        "colbert_pylate",
        {
            PROMPTS: {
                "model_type": "MultiVectorEncoder",
                "query_expansion": {"strategy": "min", "length": 20},
            }
        },
    ),
    (late, "colbert_pylate", {PROMPTS: {"model_type": "MultiVectorEncoder", "query_length": 8}}),
    (
        late,
        "colbert_pylate",
        {LAYOUT: {"query_expansion": {"strategy": "fixed", "length": 12, "token": "river"}}},
    ),
    (
        late,
        "colbert_pylate",
        {TOKENIZER: {"truncation_side": "left"}, PROMPTS: {"document_length": 12, "query_length": 10}},
    ),
    (
        late,
        "colbert_pylate",
        {TOKENIZER: {"padding_side": "left"}, PROMPTS: {"attend_to_expansion_tokens": True}},
    ),
    (
        late,
        "colbert_pylate as saved",
        {"*_MultiVectorMask/config.json": {"keep_only_token_ids": list(range(60))}},
    ),
    (late, "colbert_stanford", {METADATA: {"query_maxlen": 20, "doc_maxlen": 12, "mask_punctuation": False}}),
    (pairs, "rr_xlmr", SHORT_LEFT),
    (pairs, "rr_bert as saved", {LAYOUT: {"processor_kwargs": {"model_max_length": 16}}}),
    (pairs, "rr_bert as saved", {LAYOUT: {"config_kwargs": {"num_hidden_layers": 1}}}),
    (dense, "dense_mean", {LAYOUT: {"config_args": {"num_hidden_layers": 1}}}),
    (sparse, "splade", {LAYOUT: {"config_kwargs": {"num_hidden_layers": 1}}}),
    (late, "colbert_pylate", {LAYOUT: {"config_kwargs": {"num_hidden_layers": 1}}}),
    (pairs, "rr_bert as saved", {PROMPTS: {"prompts": {"query": "find: "}, "default_prompt_name": "query"}}),
    (
        pairs,
        "rr_bert as saved",
        {PROMPTS: {"prompts": ASIDE, "activation_fn": "torch.nn.modules.activation.Tanh"}},
    ),
    (partial(classes, "text-classification"), "classifier_single", {CONFIG: {"problem_type": "regression"}}),
]
"""Further keys, for the long suite."""


def row(compare: Callable[[Path], None], name: str, changes: Changes, *marks: Any) -> Any:
    """A row as pytest takes it."""
    return pytest.param(compare, name, changes, id=f"{name}-{json.dumps(changes)[:90]}", marks=marks)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("compare", "name", "changes"),
    [*(row(*one) for one in ROWS), *(row(*one, pytest.mark.long) for one in MORE)],
)
def test_a_stored_key_counts_as_in_the_library(
    built: Callable[[str], Path],
    tmp_path: Path,
    compare: Callable[[Path], None],
    name: str,
    changes: Changes,
) -> None:
    compare(changed(built(name), tmp_path / "model", changes))


def test_a_filling_that_nothing_masks_and_attention_does_not_see_gives_no_vectors(
    built: Callable[[str], Path], tmp_path: Path
) -> None:
    lengths = []
    for model_type in ("ColBERT", "MultiVectorEncoder"):
        stored = {PROMPTS: {"model_type": model_type}}
        mine = ours(changed(built("colbert_pylate"), tmp_path / model_type / "model", stored))
        [query] = mine.encode([InputItem("river")], "multivector", is_query=True)
        [document] = mine.encode([InputItem("river.")], "multivector", is_query=False)
        lengths.append((len(query), len(document)))
    assert lengths == [(32, 4), (4, 5)], "nor is punctuation left out, which the mask would do"


HIDDEN = {"text": {"method": "forward", "method_output_name": ["hidden_states", -2]}}
REFUSED: list[tuple[str, Changes, str]] = [
    (
        "dense_mean",
        {PROMPTS: {"default_prompt_name": "web"}},
        "default_prompt_name: 'web' is no stored prompt",
    ),
    (
        "dense_mean",
        {LAYOUT: {"modality_config": HIDDEN, "module_output_name": "token_embeddings"}},
        "modality_config",
    ),
    (
        "dense_mean",
        {LAYOUT: {"processing_kwargs": {"text": {"add_special_tokens": False}}}},
        "add_special_tokens",
    ),
    ("dense_mean", {LAYOUT: {"tokenizer_name_or_path": "org/other"}}, "tokenizer_name_or_path"),
    ("dense_mean", {LAYOUT: {"query_length": 400}}, "state max_sequence_length: 400"),
    ("bge_m3", {"1_Pooling/config.json": {"pooling_mode": "mean"}}, "first token"),
    ("splade", {PROMPTS: {"max_active_dims": "8"}}, "max_active_dims: expected a whole number"),
    ("colbert_pylate", {TOKENIZER: {"padding_side": "left"}}, "padding_side left"),
    (
        "colbert_pylate",
        {LAYOUT: {"query_expansion": {"strategy": "fixed", "length": 9, "token": "zz"}}},
        "'zz'",
    ),
    ("colbert_stanford", {METADATA: {"similarity": "l2"}}, "only cosine"),
    (
        "rr_bert as saved",
        {LAYOUT: {"processing_kwargs": {"text": {"truncation": "only_second"}}}},
        "truncation",
    ),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_a_stored_key_that_is_not_served_is_refused_in_words(
    built: Callable[[str], Path], tmp_path: Path, name: str, changes: Changes, words: str
) -> None:
    place = changed(built(name), tmp_path / "model", changes)
    with pytest.raises((CannotTell, ValueError), match=words.replace("(", r"\(")):
        ours(place)


SCALED: list[tuple[dict[str, Any], int, str]] = [
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, LAYOUT),
    ({"rope_type": "linear", "factor": 2.0}, 128, TOKENIZER),
    ({"rope_type": "dynamic", "factor": 3.0}, 192, LAYOUT),
    ({"rope_type": "default"}, 64, TOKENIZER),
]


@pytest.mark.parametrize(
    ("rope", "longest", "stated"), SCALED, ids=[str(rope["rope_type"]) for rope, *_ in SCALED]
)
def test_a_stored_length_holds_as_far_as_a_scaled_rope_reaches(
    tmp_path: Path, rope: dict[str, Any], longest: int, stated: str
) -> None:
    place = tmp_path / "model"
    size = byte_level(place)
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    config = transformers.Qwen3Config(**sizes, vocab_size=size, rope_parameters={"rope_theta": 1e4, **rope})
    save(transformers.Qwen3Model(config), place)
    write_layout(place, "lasttoken")
    key = "max_seq_length" if stated == LAYOUT else "model_max_length"
    for name, keys in ((LAYOUT, {"max_seq_length": None}), (stated, {key: 256})):
        path = place / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    assert ours(place).adapter.max_sequence_length == longest
