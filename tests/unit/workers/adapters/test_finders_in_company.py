"""Families that look for things in texts, and those that read texts beside pictures: alone equals in company equals the
model's own library.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem, ScoreCall
from tests.conformance import score_references
from tests.conformance.conversations import token_ids
from tests.conformance.extractors import required_library
from tests.harness.company import Family, Rows, built, captured, compare, every, load, said
from tests.harness.later import sentence_transformers
from tests.tiny.pictures import encoded, picture

QUERY = "where is the <pad> river [PAD]"
LABELS = ["city", "river bank", "[PAD] bridge"]
QUESTION = "Where is the river?"
REPRESENT = "Represent the user's input."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
RETRIEVE = "Given a search query, retrieve relevant candidates that answer the query."
_BARE = ("Qwen3VLForConditionalGeneration", "LayoutLMForQuestionAnswering")
"""Models that are opened without a processor."""
VISION = ("<|image_pad|>", "<|video_pad|>")


@functools.cache
def late(directory: Path) -> Any:
    """A late-interaction model of sentence-transformers."""
    return sentence_transformers.MultiVectorEncoder(str(directory), device="cpu")


def queries_of(directory: Path, item: InputItem) -> np.ndarray:
    """The token vectors of a query."""
    return np.asarray(late(directory).encode_query([item.text])[0]).flatten()


def documents_of(directory: Path, item: InputItem) -> np.ndarray:
    """The token vectors of a document."""
    return np.asarray(late(directory).encode_document([item.text])[0]).flatten()


def as_queries(items: list[InputItem]) -> Call:
    return EncodeCall(items, ["multivector"], is_query=True)


def as_documents(items: list[InputItem]) -> Call:
    return EncodeCall(items, ["multivector"], is_query=False)


def as_vectors(items: list[InputItem]) -> Call:
    return EncodeCall(items, ["dense"])


def scored(items: list[InputItem]) -> Call:
    return ScoreCall(items, InputItem(QUERY))


def labelled(items: list[InputItem]) -> Call:
    return ExtractCall(items, LABELS)


def said_by_colbert(adapter: Any, batch: Any) -> Rows:
    counts = [sum(map(len, payload.picks)) for payload in batch.payloads]
    return [rows.flatten().numpy() for rows in adapter.token_vectors(batch).split(counts)]


def said_by_pages(adapter: Any, batch: Any) -> Rows:
    [(inputs, _)] = batch.parts
    vectors = adapter.encode(batch, frozenset({"multivector"}))["multivector"]
    return [rows.flatten().numpy() for rows in vectors.split(inputs["attention_mask"].sum(1).tolist())]


def said_by_dense(adapter: Any, batch: Any) -> Rows:
    return list(adapter.encode(batch, frozenset({"dense"}))["dense"].numpy())


def said_by_scorer(adapter: Any, batch: Any) -> Rows:
    return list(adapter.score(batch).numpy()[:, None])


@functools.cache
def opened(directory: Path, name: str) -> tuple[Any, Any]:
    """The processor or tokenizer of a directory, and the model, by transformers alone."""
    model = getattr(transformers, name).from_pretrained(directory).eval()
    reader = transformers.AutoTokenizer if name in _BARE else transformers.AutoProcessor
    return reader.from_pretrained(directory), model


def asked_of(name: str) -> Callable[[Path, InputItem], np.ndarray]:
    """The token vectors of a query of a page retriever."""

    @torch.inference_mode()
    def vectors(directory: Path, item: InputItem) -> np.ndarray:
        processor, model = opened(directory, name)
        inputs = processor.process_queries(text=[item.text], return_tensors="pt")
        return np.asarray(model(**inputs).embeddings[0].flatten())

    return vectors


@functools.cache
def reranker(directory: Path) -> score_references.Reference:
    """The form of the Qwen3-Reranker model card."""
    return score_references.yes_or_no(directory, 512)


def last_of(directory: Path, system: str, user: str) -> tuple[Any, Any, torch.Tensor]:
    """Tokenizer, model, and the vector of the last token of a conversation of Qwen3-VL."""
    tokenizer, model = opened(directory, "Qwen3VLForConditionalGeneration")
    ids, _ = token_ids(tokenizer, None, [("system", system), ("user", user)], [])
    marks = torch.zeros_like(ids, dtype=torch.int32)
    return tokenizer, model, model.model(input_ids=ids, mm_token_type_ids=marks).last_hidden_state[0, -1]


@torch.inference_mode()
def represented(directory: Path, item: InputItem) -> np.ndarray:
    return np.asarray(F.normalize(last_of(directory, REPRESENT, item.text or "")[2], dim=0))


@torch.inference_mode()
def judged(directory: Path, item: InputItem) -> np.ndarray:
    """The probability of "yes" against "no"."""
    user = f"<Instruct>: {RETRIEVE}<Query>:{QUERY}\n<Document>:{item.text}"
    tokenizer, model, last = last_of(directory, JUDGE, user)
    answers = tokenizer.convert_tokens_to_ids(["yes", "no"])
    return np.asarray(torch.softmax(model.lm_head(last)[answers], 0)[:1])


def span_scores(logits: torch.Tensor, words: int) -> np.ndarray:
    """Chances [words, widths, labels] of the spans that end within the text; those of the others are 0."""
    ends = torch.arange(words)[:, None] + torch.arange(logits.shape[1])
    return np.asarray((torch.sigmoid(logits[:words].float()) * (ends < words)[..., None]).flatten())


def gliner_scores(logits: torch.Tensor, words: int, by_words: bool) -> np.ndarray:
    """Chances of the spans, or of the words, of one text."""
    if by_words:
        return np.asarray(torch.sigmoid(logits[:words, : len(LABELS)].float()).flatten())
    return span_scores(logits[..., : len(LABELS)], words)


def said_by_gliner(adapter: Any, batch: Any) -> Rows:
    outputs = captured(
        adapter._model.model, "forward", lambda one: one.logits.clone(), lambda: adapter.extract(batch)
    )
    found: dict[int, np.ndarray] = {}
    for (places, _), logits in zip(batch.parts, outputs, strict=True):
        for at, place in enumerate(places):
            found[place] = gliner_scores(logits[at], len(batch.items[place].words), adapter._by_words)
    return [found[place] for place in sorted(found)]


@functools.cache
def gliner(directory: Path) -> Any:
    """A GLiNER of the library."""
    from gliner import GLiNER

    return GLiNER.from_pretrained(str(directory)).eval()


@torch.inference_mode()
def spans_of_gliner(directory: Path, item: InputItem) -> np.ndarray:
    """What the library's model says of a text."""
    model = gliner(directory)
    [logits] = captured(
        model.model, "forward", lambda one: one.logits.clone(), lambda: model.inference([item.text], LABELS)
    )
    words = len(list(model.data_processor.words_splitter(item.text)))
    return gliner_scores(logits[0], words, model.config.span_mode == "token_level")


def said_by_gliner2(adapter: Any, batch: Any) -> Rows:
    found: dict[int, np.ndarray] = {}
    for places, part in batch.parts:
        for place, logits in zip(places, adapter._logits(part), strict=True):
            found[place] = span_scores(
                logits.permute(1, 2, 0), len(batch.items[place].record.start_token_idx)
            )
    return [found[place] for place in sorted(found)]


@functools.cache
def gliner2(directory: Path) -> Any:
    """A GLiNER2 of the library."""
    from gliner2.inference.engine import SpanExtractor

    return SpanExtractor.from_pretrained(str(directory)).eval()


def spans_of_gliner2(directory: Path, item: InputItem) -> np.ndarray:
    model = gliner2(directory)
    [logits] = captured(
        model,
        "_compute_direct_span_logits_batched",
        lambda found: found[0][0][0][0],
        lambda: model.batch_extract_entities([item.text], LABELS),
    )
    return span_scores(logits.permute(1, 2, 0), logits.shape[1])


def said_by_gliclass(adapter: Any, batch: Any) -> Rows:
    wanted, packed = batch
    return [row.numpy() for row in adapter._logits(packed, [len(one.labels) for one in wanted])]


@functools.cache
def gliclass(directory: Path) -> Any:
    """The pipeline of the library."""
    from gliclass import GLiClassModel, ZeroShotClassificationPipeline

    model = GLiClassModel.from_pretrained(str(directory)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    return ZeroShotClassificationPipeline(model, tokenizer, device="cpu", progress_bar=False)


def classes_of_gliclass(directory: Path, item: InputItem) -> np.ndarray:
    pipeline = gliclass(directory)
    model = getattr(pipeline, "pipe", pipeline).model
    [logits] = captured(model, "forward", lambda one: one.logits, lambda: pipeline([item.text], LABELS))
    return np.asarray(logits[0, : len(LABELS)])


PAGE = encoded(picture(1))


def page_of(text: str) -> InputItem:
    """A page with the words of a text."""
    words = text.split()
    boxes = [[at, 2 * at, at + 9, 2 * at + 7] for at in range(len(words))]
    return InputItem(images=[PAGE], metadata={"words": words, "boxes": boxes, "box_format": "normalized"})


def questioned(items: list[InputItem]) -> Call:
    return ExtractCall(items, [], instruction=QUESTION)


def said_by_reader(adapter: Any, batch: Any) -> Rows:
    return [rows.flatten() for rows in adapter._logits(adapter._parts(batch)[0])]


@torch.inference_mode()
def read_with_picture(directory: Path, item: InputItem) -> np.ndarray:
    """Logits of starts and ends by LayoutLMv3."""
    processor, model = opened(directory, "LayoutLMv3ForQuestionAnswering")
    assert item.metadata is not None
    given = {"boxes": item.metadata["boxes"], "truncation": "only_second", "max_length": 64}
    inputs = processor(
        picture(1), QUESTION, item.metadata["words"], return_tensors="pt", return_token_type_ids=True, **given
    )
    output = model(**inputs)
    words = inputs["input_ids"].shape[1]
    return np.concatenate([output.start_logits[0, :words], output.end_logits[0, :words]])


@torch.inference_mode()
def read_without(directory: Path, item: InputItem) -> np.ndarray:
    """Logits of starts and ends by LayoutLM, whose boxes are those of transformers' pipeline."""
    tokenizer, model = opened(directory, "LayoutLMForQuestionAnswering")
    assert item.metadata is not None
    given = {"is_split_into_words": True, "truncation": "only_second", "max_length": 64}
    inputs = tokenizer(QUESTION.split(), item.metadata["words"], return_tensors="pt", **given)
    places = zip(inputs.word_ids(0), inputs.sequence_ids(0), inputs["input_ids"][0], strict=True)
    boxes = [
        item.metadata["boxes"][word] if part == 1 else [1000 if token == tokenizer.sep_token_id else 0] * 4
        for word, part, token in places
    ]
    output = model(**inputs, bbox=torch.tensor([boxes]))
    return np.concatenate([output.start_logits[0], output.end_logits[0]])


FAMILIES = (
    Family("colbert", "colbert_pylate", as_queries, said_by_colbert, queries_of),
    Family("colbert", "colbert_pylate", as_documents, said_by_colbert, documents_of, twin=True),
    Family("colbert", "colbert_stanford", as_queries, said_by_colbert, queries_of, twin=True),
    Family("colbert", "colbert_stanford", as_documents, said_by_colbert, documents_of),
    Family(
        "qwen3_reranker",
        "rr_qwen3",
        scored,
        said_by_scorer,
        lambda directory, item: reranker(directory)(QUERY, [item.text or ""]),
        limit=512,
    ),
    Family("qwen3_vl_embedding", "qwen3_vl", as_vectors, said_by_dense, represented, limit=512, marks=VISION),
    Family("qwen3_vl_reranker", "qwen3_vl", scored, said_by_scorer, judged, limit=512, marks=VISION),
    Family(
        "colpali",
        "colpali",
        as_queries,
        said_by_pages,
        asked_of("ColPaliForRetrieval"),
        marks=("<image>",),
        longest=7,
    ),
    Family("colqwen2", "colqwen2", as_queries, said_by_pages, asked_of("ColQwen2ForRetrieval"), marks=VISION),
    Family("gliner", "gliner", labelled, said_by_gliner, spans_of_gliner),
    Family("gliner", "gliner_token", labelled, said_by_gliner, spans_of_gliner),
    Family("gliner", "gliner_bi", labelled, said_by_gliner, spans_of_gliner),
    Family("gliner", "gliner_relex", labelled, said_by_gliner, spans_of_gliner, twin=True),
    Family("gliner2", "gliner2", labelled, said_by_gliner2, spans_of_gliner2),
    Family(
        "gliclass",
        "gliclass",
        labelled,
        said_by_gliclass,
        classes_of_gliclass,
        marks=("<<LABEL>>", "<<SEP>>"),
    ),
    Family("document_qa", "layoutlmv3", questioned, said_by_reader, read_with_picture, item=page_of),
    Family("document_qa", "layoutlm", questioned, said_by_reader, read_without, item=page_of),
)
LIBRARIES = ("gliner", "gliner2", "gliclass")


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """Builds the tiny model of a family once. Ends the test where the family's library is missing."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("finders")

    def made(family: Family) -> Path:
        if family.name in LIBRARIES:
            required_library(family.name)
        return built(root, family.tiny)

    return made


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", every(FAMILIES))
def test_alone_equals_in_company_equals_the_library(
    directory_of: Callable[[Family], Path], family: Family
) -> None:
    compare(family, directory_of(family), seeds=(1,), count=4)


@pytest.mark.long
@pytest.mark.parametrize("family", every(FAMILIES))
def test_many_draws_of_it(directory_of: Callable[[Family], Path], family: Family) -> None:
    compare(family, directory_of(family), seeds=range(2, 20), count=24)


@pytest.mark.parametrize("tiny", ["gliner", "gliner_bi"])
def test_padding_for_which_the_model_has_no_embedding_is_not_read(
    directory_of: Callable[[Family], Path], tmp_path: Path, tiny: str
) -> None:
    family = next(one for one in FAMILIES if one.tiny == tiny)
    directory = Path(shutil.copytree(directory_of(family), tmp_path / tiny))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["zzneu0", "zzneu1", "zzneu2", "zzneu3", "zzneu4", "zzneu5"])
    tokenizer.pad_token = "zzneu5"
    tokenizer.save_pretrained(str(directory))
    adapter = load(family.name, directory)
    items = [InputItem("the river in Paris a b"), InputItem("a b c d e f g"), InputItem("Paris")]
    for item, found in zip(items, said(family, adapter, items), strict=True):
        np.testing.assert_allclose(found, said(family, adapter, [item])[0], rtol=0, atol=2e-5)
