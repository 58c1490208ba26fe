"""Tiny models that find something in pictures, behind one server, and what transformers says of the same pictures."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from PIL import Image

from tests.tiny.models import build
from workers.adapters.shared.building import BUILDING

DETR, RTDETR = "facebook/detr-resnet-50", "PekingU/rtdetr_r18vd"
OWL, DINO = "google/owlv2-base-patch16-ensemble", "IDEA-Research/grounding-dino-tiny"
FLORENCE, DONUT = "microsoft/Florence-2-base", "naver-clova-ix/donut-base-finetuned-docvqa"
LIGHTON, GLM = "lightonai/LightOnOCR-2-1B", "zai-org/GLM-OCR"
PADDLE = "PaddlePaddle/PaddleOCR-VL-1.5"
PAGES, WORDS_ONLY = "tiny/layoutlmv3", "tiny/layoutlm"
NEEDS_TIMM = "facebook/detr-resnet-101"

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    DETR: ("detr", "detection", {"score_threshold": 0.3}),
    RTDETR: ("rtdetr", "detection", {"score_threshold": 0.3}),
    OWL: ("owlv2", "owlv2", {}),
    DINO: ("grounding_dino", "grounding_dino", {}),
    FLORENCE: ("florence2", "florence2", {"max_new_tokens": 40}),
    DONUT: ("donut", "donut", {"task": "<s_docvqa>", "max_new_tokens": 20}),
    LIGHTON: ("lighton_ocr", "lighton_ocr", {"max_new_tokens": 12}),
    GLM: ("glm_ocr", "glm_ocr", {"max_new_tokens": 12}),
    PADDLE: ("paddleocr_vl", "paddleocr_vl", {"max_new_tokens": 12}),
    PAGES: ("layoutlmv3", "document_qa", {}),
    WORDS_ONLY: ("layoutlm", "document_qa", {}),
}


class Thing(NamedTuple):
    """One expected object, its box [x, y, width, height] in whole pixels."""

    label: str
    score: float
    bbox: list[int]


def write_models(place: Path) -> list[str]:
    """Build all models below `place` and write their catalog into `place / "catalog"`; returns the ids."""
    (place / "catalog").mkdir(parents=True)
    for model, (tiny, adapter, runtime) in FAMILIES.items():
        _entry(place, model, build(tiny, place / tiny), adapter, runtime)
    directory = build("detr", place / "timm")
    config = json.loads((directory / "config.json").read_text())
    config |= {"use_timm_backbone": True, "backbone": "resnet50", "backbone_config": None}
    (directory / "config.json").write_text(json.dumps(config))
    _entry(place, NEEDS_TIMM, directory, "detection", {})
    return [*FAMILIES, NEEDS_TIMM]


def _entry(place: Path, model: str, directory: Path, adapter: str, runtime: Any) -> None:
    entry = {
        "id": model,
        "source": {"kind": "directory", "path": str(directory)},
        "adapter": adapter,
        "inputs": ["image"],
        "outputs": {"json": {}},
        "runtime": runtime,
    }
    (place / "catalog" / f"{directory.name}.yaml").write_text(json.dumps(entry))


@functools.cache
def parts(directory: Path, model: str, reader: str = "AutoProcessor") -> tuple[Any, Any]:
    """A model and what reads its inputs, opened by transformers alone; pictures in the form of Pillow.

    Transformers builds one model at a time: of two threads that build, one leaves later models without tied weights.
    """
    with BUILDING:
        return _parts(directory, model, reader)


def _parts(directory: Path, model: str, reader: str) -> tuple[Any, Any]:
    loaded = getattr(transformers, model).from_pretrained(directory).eval()
    if reader == "AutoImageProcessor":
        return loaded, transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    reading = getattr(transformers, reader).from_pretrained(directory)
    if reader == "AutoProcessor":
        reading.image_processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    return loaded, reading


def _things(result: Any, names: Sequence[str], image: Image.Image) -> list[Thing]:
    """Corners to boxes inside the picture; what lies beside it is none of its objects."""
    found = []
    for name, score, (left, top, right, bottom) in zip(
        names, result["scores"].tolist(), result["boxes"].tolist(), strict=True
    ):
        if left < image.width and top < image.height and right > 0 and bottom > 0:
            x, y = max(0, round(left)), max(0, round(top))
            box = [x, y, min(image.width, round(right)) - x, min(image.height, round(bottom)) - y]
            found.append(Thing(name, score, box))
    return sorted(found, key=lambda thing: -thing.score)


@torch.inference_mode()
def detection(directory: Path, image: Image.Image, threshold: float) -> list[Thing]:
    """DETR or RT-DETR."""
    model, processor = parts(directory, "AutoModelForObjectDetection", "AutoImageProcessor")
    output = model(**processor(images=image, return_tensors="pt"))
    [result] = processor.post_process_object_detection(
        output, threshold=threshold, target_sizes=[image.size[::-1]]
    )
    names = [model.config.id2label[label] for label in result["labels"].tolist()]
    return _things(result, names, image)


@torch.inference_mode()
def owlv2(directory: Path, image: Image.Image, labels: Sequence[str], threshold: float) -> list[Thing]:
    """OWLv2 with the texts of the original server."""
    model, processor = parts(directory, "Owlv2ForObjectDetection")
    texts = [[f"a photo of {label}" for label in labels]]
    output = model(**processor(text=texts, images=image, return_tensors="pt"))
    [result] = processor.post_process_grounded_object_detection(
        output, target_sizes=torch.tensor([image.size[::-1]]), threshold=threshold, text_labels=[list(labels)]
    )
    return _things(result, result["text_labels"], image)


@torch.inference_mode()
def grounding_dino(
    directory: Path, image: Image.Image, labels: Sequence[str], threshold: float, text_threshold: float
) -> list[Thing]:
    """Grounding DINO: boxes and scores are the library's, the label is that of the strongest token."""
    model, processor = parts(directory, "GroundingDinoForObjectDetection")
    inputs = processor(images=image, text=[list(labels)], return_tensors="pt")
    output = model(**inputs)
    [result] = processor.post_process_grounded_object_detection(
        output,
        inputs["input_ids"],
        threshold=threshold,
        text_threshold=text_threshold,
        target_sizes=[image.size[::-1]],
    )
    owners = _owners(processor.tokenizer, labels)
    chances = torch.sigmoid(output.logits[0])
    kept, names = [], []
    for at, row in enumerate(chances[chances.max(-1).values > threshold]):
        strongest = max(owners, key=lambda token: float(row[token]))
        if float(row[strongest]) > text_threshold:
            kept.append(at)
            names.append(owners[strongest])
    return _things({name: result[name][kept] for name in ("scores", "boxes")}, names, image)


def _owners(tokenizer: Any, labels: Sequence[str]) -> dict[int, str]:
    """The label of every token of "a cat. a dog.", by counting the tokens of each label alone."""
    owners, at = {}, 1
    for label in labels:
        count = len(tokenizer(label.lower(), add_special_tokens=False)["input_ids"])
        owners |= dict.fromkeys(range(at, at + count), label)
        at += count + 1
    return owners


@torch.inference_mode()
def florence2(
    directory: Path, image: Image.Image, prompt: str, task: str, tokens: int, beams: int = 1
) -> Any:
    """What Florence-2's processor reads from what the model writes."""
    model, processor = parts(directory, "Florence2ForConditionalGeneration")
    inputs = processor(text=prompt, images=image, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=tokens, num_beams=beams, do_sample=False)
    text = processor.batch_decode(ids, skip_special_tokens=False)[0]
    return processor.post_process_generation(text=text, task=task, image_size=image.size)[task]


@torch.inference_mode()
def donut(directory: Path, image: Image.Image, prompt: str, tokens: int, beams: int = 1) -> Any:
    """The tree that Donut's processor makes, as in its model card."""
    model, processor = parts(directory, "VisionEncoderDecoderModel")
    tokenizer = processor.tokenizer
    ids = model.generate(
        processor(image, return_tensors="pt").pixel_values,
        decoder_input_ids=tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids,
        max_new_tokens=tokens,
        num_beams=beams,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bad_words_ids=[[tokenizer.unk_token_id]],
    )
    text = processor.batch_decode(ids)[0].replace(tokenizer.eos_token, "").replace(tokenizer.pad_token, "")
    return processor.token2json(re.sub(r"<.*?>", "", text, count=1).strip())


class Answer(NamedTuple):
    """The likeliest answer: its words and its score."""

    first: int
    last: int
    score: float


@torch.inference_mode()
def layoutlmv3(directory: Path, image: Image.Image, question: str, words: list[str], boxes: Any) -> Answer:
    """The likeliest span of at most 15 tokens on the words that fit, boxes from 0 to 1000."""
    model, processor = parts(directory, "LayoutLMv3ForQuestionAnswering")
    inputs = processor(
        image, question, words, boxes=boxes, return_tensors="pt", truncation="only_second", max_length=64
    )
    output, owners = model(**inputs), inputs.word_ids(0)
    on_page = [part == 1 for part in inputs.sequence_ids(0)]
    allowed = torch.tensor([True, *on_page[1:]])
    starts, ends = (
        torch.where(allowed, logits[0, : len(owners)], -1e9).softmax(-1)
        for logits in (output.start_logits, output.end_logits)
    )
    best = Answer(0, 0, -1.0)
    for start in range(1, len(owners)):
        for end in range(start, min(start + 15, len(owners))):
            score = float(starts[start] * ends[end])
            if on_page[start] and on_page[end] and score > best.score:
                best = Answer(owners[start], owners[end], score)
    return best


def layoutlm(directory: Path, question: str, words: list[str], boxes: Any, stride: int | None) -> Answer:
    """The answer of transformers' pipeline, over overlapping windows of this stride."""
    asked = transformers.pipeline(
        "document-question-answering",
        model=parts(directory, "LayoutLMForQuestionAnswering", "AutoTokenizer")[0],
        tokenizer=parts(directory, "LayoutLMForQuestionAnswering", "AutoTokenizer")[1],
    )
    given = {"question": question, "image": None, "word_boxes": list(zip(words, boxes, strict=True))}
    [found] = asked(given, max_seq_len=64, **({} if stride is None else {"doc_stride": stride}))
    return Answer(found["start"], found["end"], found["score"])


def tokens_of(directory: Path, question: str, words: list[str]) -> int:
    """Tokens of a question and all words."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return len(tokenizer(question.split(), words, is_split_into_words=True)["input_ids"])
