"""Every text family over HTTP against the library that defines it, alone and in mixed batches."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.conformance.extractors import (
    EXTRACTORS,
    GLICLASS,
    GLINER,
    GLINER2,
    GLINER_BI,
    body_of,
    extract,
    extract_together,
    required_library,
)
from tests.conformance.wire import JSON, MSGPACK, assert_refused
from tests.harness.server import Server
from tests.tiny.texts import mixed_lengths, sentences

TEXTS = [text for text in mixed_lengths() if text] + [
    "Zoë visited e\u0301cole in 東京, Ünïcode 👩‍👩‍👧 naïve Paris"
]
LABELS = ["person", "city", "organisation"]
TOLERANCE = 1e-4
LIMITS = {"tiny/ner": 512, "tiny/ner-xlmr": 256}


@functools.cache
def pipeline(task: str, directory: Path, limit: int | None = None, **options: Any) -> Any:
    """A transformers pipeline in this process, on one thread."""
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    if limit is not None:
        tokenizer.model_max_length = limit
    return transformers.pipeline(task, model=str(directory), tokenizer=tokenizer, device="cpu", **options)


@functools.cache
def gliner(directory: Path) -> Any:
    """A GLiNER of the library in this process."""
    from gliner import GLiNER

    torch.set_num_threads(1)
    return GLiNER.from_pretrained(str(directory))


@functools.cache
def gliclass(directory: Path, kind: str) -> Any:
    """A GLiClass pipeline of the library in this process."""
    from gliclass import GLiClassModel, ZeroShotClassificationPipeline

    torch.set_num_threads(1)
    model = GLiClassModel.from_pretrained(str(directory)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    return ZeroShotClassificationPipeline(
        model, tokenizer, classification_type=kind, device="cpu", progress_bar=False
    )


def directory_of(place: Path, model: str) -> Path:
    """Where the tiny model behind an id lies."""
    return place / EXTRACTORS[model].tiny


def same_entities(found: list[dict[str, Any]], wanted: list[tuple[str, str, float]]) -> None:
    """The same (text, label) in the same order, with scores within the tolerance."""
    assert [(one["text"], one["label"]) for one in found] == [(text, label) for text, label, _ in wanted]
    for one, (_, _, score) in zip(found, wanted, strict=True):
        assert one["score"] == pytest.approx(score, abs=TOLERANCE)


def same_classes(found: list[dict[str, Any]], wanted: list[tuple[str, float]]) -> None:
    """The same labels, best first, with scores within the tolerance."""
    assert [one["label"] for one in found] == [label for label, _ in wanted]
    assert [one["score"] for one in found] == pytest.approx([score for _, score in wanted], abs=TOLERANCE)


def tagged(text: str, found: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """Entities of the pipeline without the blanks at their ends."""
    spans = [(text[one["start"] : one["end"]].strip(), one) for one in found]
    return [(piece, one.get("entity_group") or one["entity"], one["score"]) for piece, one in spans if piece]


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("model", ["tiny/ner", "tiny/ner-xlmr"])
def test_tokens_are_grouped_as_the_pipeline_groups_them(
    extracting: Server, tiny_extractors: Path, model: str, strategy: str
) -> None:
    reference = pipeline(
        "token-classification",
        directory_of(tiny_extractors, model),
        LIMITS[model],
        aggregation_strategy=strategy,
    )
    options = {"options": {"aggregation_strategy": strategy}}
    together = extract(extracting, JSON, model, TEXTS, **options)
    for text, item in zip(TEXTS, together, strict=True):
        same_entities(item["entities"], tagged(text, reference(text)))
        assert all(text[one["start"] : one["end"]] == one["text"] for one in item["entities"])
    [alone] = extract(extracting, MSGPACK, model, [TEXTS[-1]], **options)
    same_entities(alone["entities"], tagged(TEXTS[-1], reference(TEXTS[-1])))


@pytest.mark.parametrize("model", ["tiny/ner", "tiny/ner-xlmr"])
def test_a_long_text_is_read_in_windows_as_the_pipeline_reads_it(
    extracting: Server, tiny_extractors: Path, model: str
) -> None:
    text, limit = " ".join(sentences()[:150]), LIMITS[model]
    arguments = {"aggregation_strategy": "simple", "stride": limit // 8}
    reference = pipeline("token-classification", directory_of(tiny_extractors, model), limit, **arguments)
    options = {"aggregation_strategy": "simple", "overflow_policy": "chunk"}
    answer = extract(extracting, JSON, model, [TEXTS[0], text], options=options)
    same_entities(answer[1]["entities"], tagged(text, reference(text)))
    assert answer[1]["entities"][-1]["start"] > len(text) // 2
    [cut] = extract(extracting, JSON, model, [text])
    assert cut["entities"][-1]["end"] < len(text) // 2


def test_labels_and_threshold_narrow_the_entities_of_their_own_request(extracting: Server) -> None:
    whole = extract(extracting, JSON, "tiny/ner", TEXTS)
    asked = [
        (text, {"labels": [label], "options": {"threshold": threshold}})
        for text, label, threshold in zip(
            TEXTS, itertools.cycle(["PER", "LOC"]), itertools.cycle([0.5, 0.9, 0.0])
        )
    ]
    for item, full, (_, params) in zip(
        extract_together(extracting, JSON, "tiny/ner", asked), whole, asked, strict=True
    ):
        threshold = params["options"]["threshold"]
        wanted = [
            (one["text"], one["label"], one["score"])
            for one in full["entities"]
            if one["label"] in params["labels"] and one["score"] >= threshold
        ]
        same_entities(item["entities"], wanted)
    assert sum(len(item["entities"]) for item in whole) > 20


@pytest.mark.parametrize("model", ["tiny/moods", "tiny/mood"])
def test_classes_are_scored_as_the_pipeline_scores_them(
    extracting: Server, tiny_extractors: Path, model: str
) -> None:
    reference = pipeline("text-classification", directory_of(tiny_extractors, model), top_k=None)
    for function in ("auto", "sigmoid", "softmax", "none"):
        chosen = None if function == "auto" else function
        options = {} if chosen is None else {"function_to_apply": function}
        items = extract(extracting, JSON, model, TEXTS, options=options)
        for text, item in zip(TEXTS, items, strict=True):
            wanted = reference(text, top_k=None, function_to_apply=chosen)
            same_classes(item["classifications"], [(one["label"], one["score"]) for one in wanted])
    [best] = extract(extracting, JSON, model, TEXTS[:1], options={"top_k": 1})
    assert len(best["classifications"]) == 1


@pytest.mark.parametrize("model", ["tiny/nli", "tiny/nli-bart"])
def test_labels_are_hypotheses_as_in_the_pipeline(
    extracting: Server, tiny_extractors: Path, model: str
) -> None:
    reference = pipeline("zero-shot-classification", directory_of(tiny_extractors, model))
    cases = [
        (["travel", "science", "cooking"], {}),
        (["travel", "science", "cooking"], {"multi_label": True}),
        (["one"], {}),
        (["a b c", "ü"], {"hypothesis_template": "About {}: yes"}),
    ]
    texts = TEXTS[:3] + TEXTS[-3:]
    asked = [
        (text, {"labels": labels, "options": options})
        for text, (labels, options) in zip(texts, itertools.cycle(cases), strict=False)
    ]
    for form in (JSON, MSGPACK):
        for item, (text, params) in zip(extract_together(extracting, form, model, asked), asked, strict=True):
            wanted = reference(text, params["labels"], **params["options"])
            same_classes(item["classifications"], list(zip(wanted["labels"], wanted["scores"], strict=True)))
    long = " ".join(sentences()[:120])
    [item] = extract(extracting, JSON, model, [long], labels=["travel", "science"])
    tokenizer_limit = 256 if model == "tiny/nli-bart" else None
    cutting = pipeline("zero-shot-classification", directory_of(tiny_extractors, model), tokenizer_limit)
    left = {"labels": ["travel", "science"], "options": {"overflow_policy": "truncate_left"}}
    [ending] = extract(extracting, JSON, model, [long], **left)
    for found, side in ((item, "right"), (ending, "left")):
        cutting.tokenizer.truncation_side = side
        wanted = cutting(long, ["travel", "science"])
        same_classes(found["classifications"], list(zip(wanted["labels"], wanted["scores"], strict=True)))
    assert item["classifications"] != ending["classifications"]


@functools.cache
def gliner2(directory: Path) -> Any:
    """A GLiNER2 of the library in this process."""
    from gliner2.inference.engine import SpanExtractor

    torch.set_num_threads(1)
    return SpanExtractor.from_pretrained(str(directory))


def gliner2_spans(
    directory: Path, text: str, labels: list[str], threshold: float
) -> list[tuple[str, str, float]]:
    """Entities of GLiNER2 for one text alone, without the full stop that the library reads behind the text."""
    [found] = gliner2(directory).batch_extract_entities(
        [text], labels, threshold=threshold, include_confidence=True, include_spans=True
    )
    spans = [
        (one["start"], min(one["end"], len(text)), label, one["confidence"])
        for label, ones in found["entities"].items()
        for one in ones
        if one["start"] < len(text)
    ]
    return [
        (text[start:end], label, score) for start, end, label, score in sorted(spans, key=lambda one: one[:2])
    ]


def test_gliner2_requests_with_other_labels_and_thresholds_share_batches(
    extracting: Server, tiny_extractors: Path
) -> None:
    required_library("gliner2")
    directory = directory_of(tiny_extractors, GLINER2)
    texts = [text for text in TEXTS if len(text) < 400]
    sets = itertools.cycle([LABELS, ["river"], ["a b", "c", "d e f", "g"], LABELS[::-1]])
    asked = [
        (text, {"labels": labels, "options": {"threshold": threshold}})
        for text, labels, threshold in zip(texts, sets, itertools.cycle([0.5, 0.9, 0.97]), strict=False)
    ]
    found = 0
    for item, (text, params) in zip(
        extract_together(extracting, MSGPACK, GLINER2, asked), asked, strict=True
    ):
        wanted = gliner2_spans(directory, text, params["labels"], params["options"]["threshold"])
        same_entities(item["entities"], wanted)
        assert all(text[one["start"] : one["end"]] == one["text"] for one in item["entities"])
        found += len(wanted)
    assert found > 10
    [alone] = extract(extracting, JSON, GLINER2, [TEXTS[0]], labels=LABELS)
    same_entities(alone["entities"], gliner2_spans(directory, TEXTS[0], LABELS, 0.5))


def test_gliner2_keeps_to_its_limits(extracting: Server) -> None:
    required_library("gliner2")
    text = "Marie Curie lives in Paris " * 500
    answer = JSON.post(extracting, f"/v1/extract/{GLINER2}", body_of(["", text], labels=LABELS)).json()
    assert answer["usage"]["truncated"] == [1] and 500 < answer["usage"]["tokens"][1] <= 512
    assert answer["items"][0]["entities"] == []
    body = body_of([text], labels=LABELS, options={"overflow_policy": "error"})
    assert_refused(
        JSON.post(extracting, f"/v1/extract/{GLINER2}", body), 400, "INPUT_TOO_LONG", "items[0].text"
    )
    body = body_of(["a"], labels=[f"kind {number}" for number in range(900)])
    assert_refused(
        JSON.post(extracting, f"/v1/extract/{GLINER2}", body), 400, "INPUT_TOO_LONG", "params.labels"
    )
    body = body_of(["a"], labels=["a [E] b"])
    assert_refused(
        JSON.post(extracting, f"/v1/extract/{GLINER2}", body), 400, "INVALID_INPUT", "params.labels", "[E]"
    )
    everything = {"labels": LABELS, "options": {"threshold": -1}}
    [item] = extract(extracting, JSON, GLINER2, [text], **everything)
    assert 0 < len(item["entities"]) <= 1000


def gliner_spans(found: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """Entities of the library."""
    return [(one["text"], one["label"], one["score"]) for one in found]


GLINERS = {GLINER: 0.72, GLINER_BI: 0.6}
"""Models with one encoder and with two, and a threshold that lets some of their findings pass."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("multiple", [False, True])
@pytest.mark.parametrize("model", GLINERS)
def test_gliner_finds_what_the_library_finds(
    extracting: Server, tiny_extractors: Path, model: str, flat: bool, multiple: bool
) -> None:
    required_library("gliner")
    reference = gliner(directory_of(tiny_extractors, model))
    texts = [text for text in TEXTS if len(text) < 400]
    options = {"threshold": GLINERS[model], "flat_ner": flat, "multi_label": multiple}
    items = extract(extracting, JSON, model, texts, labels=LABELS, options=options)
    found = 0
    for text, item in zip(texts, items, strict=True):
        [wanted] = reference.inference([text], LABELS, **options)
        same_entities(item["entities"], gliner_spans(wanted))
        assert all(text[one["start"] : one["end"]] == one["text"] for one in item["entities"])
        found += len(wanted)
    assert found > 10


@pytest.mark.parametrize("model", GLINERS)
def test_gliner_requests_with_other_labels_and_thresholds_share_batches(
    extracting: Server, tiny_extractors: Path, model: str
) -> None:
    required_library("gliner")
    reference = gliner(directory_of(tiny_extractors, model))
    sets = itertools.cycle([LABELS, ["river"], ["a b", "c", "d e f", "g"], LABELS[::-1]])
    asked = [
        (text, {"labels": labels, "options": {"threshold": threshold}})
        for text, labels, threshold in zip(TEXTS, sets, itertools.cycle([0.65, 0.7, 0.75]), strict=False)
    ]
    for item, (text, params) in zip(extract_together(extracting, MSGPACK, model, asked), asked, strict=True):
        [wanted] = reference.inference([text], params["labels"], threshold=params["options"]["threshold"])
        same_entities(item["entities"], gliner_spans(wanted))


def test_labels_of_a_bi_encoder_take_no_room_of_the_text(extracting: Server) -> None:
    required_library("gliner")
    labels = [f"kind {number}" for number in range(400)]
    text = "Marie Curie lives in Paris"
    refused = JSON.post(extracting, f"/v1/extract/{GLINER}", body_of([text], labels=labels))
    assert_refused(refused, 400, "INPUT_TOO_LONG", "params.labels")
    answer = JSON.post(extracting, f"/v1/extract/{GLINER_BI}", body_of([text, "river"], labels=labels)).json()
    assert answer["usage"]["truncated"] == [] and min(answer["usage"]["tokens"]) > 800


def test_gliner_relations_are_those_of_the_library(extracting: Server, tiny_extractors: Path) -> None:
    required_library("gliner")
    reference = gliner(directory_of(tiny_extractors, "tiny/relex"))
    relations = ["visited", "works for"]
    options = {"threshold": 0.65, "relation_threshold": 0.4}
    texts = ["Marie Curie built", "Alan Turing in Paris", "river", "Rosa Parks sold the camera"]
    items = extract(
        extracting, JSON, "tiny/relex", texts, labels=LABELS, options={**options, "relations": relations}
    )
    found = 0
    for text, item in zip(texts, items, strict=True):
        [entities], [wanted] = reference.inference([text], LABELS, relations=relations, **options)
        same_entities(item["entities"], gliner_spans(entities))
        assert [(one["head"], one["tail"], one["relation"]) for one in item["relations"]] == [
            (one["head"]["text"], one["tail"]["text"], one["relation"]) for one in wanted
        ]
        assert [one["score"] for one in item["relations"]] == pytest.approx(
            [one["score"] for one in wanted], abs=TOLERANCE
        )
        found += len(wanted)
    assert found > 3


def test_gliner_fills_a_schema_from_its_entities(extracting: Server) -> None:
    required_library("gliner")
    schema = {"type": "object", "properties": {"person": {"type": "array"}, "city": {"type": "string"}}}
    [item] = extract(extracting, JSON, GLINER, [TEXTS[0]], output_schema=schema, options={"threshold": 0.3})
    assert set(item["data"]) == {"person", "city"}
    assert item["data"]["person"] == [one["text"] for one in item["entities"] if one["label"] == "person"]
    cities = sorted(
        (one for one in item["entities"] if one["label"] == "city"), key=lambda one: -one["score"]
    )
    assert item["data"]["city"] == (cities[0]["text"] if cities else None)
    [plain] = extract(
        extracting, JSON, GLINER, [TEXTS[0]], labels=["person", "city"], options={"threshold": 0.3}
    )
    assert plain["entities"] == item["entities"] and plain["data"] == {}


def test_gliner_cuts_a_long_text_and_says_so(extracting: Server) -> None:
    required_library("gliner")
    text = " ".join(sentences()[:60])
    body = {"items": [{"text": "short"}, {"text": text}], "params": {"labels": LABELS}}
    answer = JSON.post(extracting, f"/v1/extract/{GLINER}", body).json()
    assert answer["usage"]["truncated"] == [1]
    assert answer["usage"]["tokens"][1] > answer["usage"]["tokens"][0] > 0
    assert max(one["end"] for one in answer["items"][1]["entities"]) < len(text) // 2
    body["params"]["options"] = {"overflow_policy": "truncate_left"}
    answer = JSON.post(extracting, f"/v1/extract/{GLINER}", body).json()
    assert answer["usage"]["truncated"] == [1]
    found = answer["items"][1]["entities"]
    assert found and min(one["start"] for one in found) > len(text) // 2
    assert all(one["text"] == text[one["start"] : one["end"]] for one in found)


@pytest.mark.parametrize(
    ("model", "kind"), [(GLICLASS, "multi-label"), ("tiny/gliclass-single", "single-label")]
)
def test_gliclass_scores_labels_as_the_library_does(
    extracting: Server, tiny_extractors: Path, model: str, kind: str
) -> None:
    required_library("gliclass")
    reference = gliclass(directory_of(tiny_extractors, model), kind)
    sets = itertools.cycle([["travel", "science", "cooking"], ["one"], ["a b", "ü"], list("abcdefgh")])
    asked = [(text, {"labels": labels}) for text, labels in zip(TEXTS, sets, strict=False)]
    for item, (text, params) in zip(extract_together(extracting, JSON, model, asked), asked, strict=True):
        [wanted] = reference([text], params["labels"], threshold=0.0)
        classes = item["classifications"]
        assert sorted(one["label"] for one in classes) == sorted(params["labels"])
        assert [one["score"] for one in classes] == sorted((one["score"] for one in classes), reverse=True)
        scores = {one["label"]: one["score"] for one in classes}
        for one in wanted:
            assert scores[one["label"]] == pytest.approx(one["score"], abs=TOLERANCE)
