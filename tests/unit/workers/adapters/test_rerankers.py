"""Cross-encoders and yes-or-no rerankers as their catalog options set them up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ipc.errors import InvalidInput
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem, ScoreCall
from tests.harness.later import sentence_transformers
from tests.tiny import vocabularies
from tests.tiny.models import SIZES, build, save
from tests.tiny.texts import mixed_lengths, sentences
from workers.adapters.base import LoadContext, Prepared
from workers.adapters.cross_encoder import CrossEncoderAdapter
from workers.adapters.qwen3_reranker import Qwen3RerankerAdapter
from workers.adapters.shared.pairs import ScoreAdapter
from workers.inputs import NOTHING
from workers.operations.items import Score

QUERY, DOCUMENTS = sentences()[17], [*mixed_lengths(), *sentences()[:3]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny rerankers, by name."""
    directory = tmp_path_factory.mktemp("rerankers")
    for name in ("rr_bert", "rr_bert_three", "rr_qwen3"):
        build(name, directory / name)
    return directory


def load(
    family: type[ScoreAdapter], directory: Path, longest: int | None = None, **options: Any
) -> ScoreAdapter:
    """A loaded adapter on the CPU."""
    device = torch.device("cpu")
    context = LoadContext(directory, "tiny", device, torch.float32, longest, options, lambda *_: None)
    return family.load(context)


def prepared(adapter: ScoreAdapter, query: str, documents: list[str], **fields: Any) -> list[Prepared]:
    """The pairs of a call."""
    call = ScoreCall([InputItem(text) for text in documents], InputItem(query), **fields)
    adapter.refuse_unsupported(call)
    return [pair for pair in adapter.prepare(call.items, call) if isinstance(pair, Prepared)]


def scores(adapter: ScoreAdapter, query: str, documents: list[str]) -> np.ndarray:
    """float32 [documents]."""
    found: np.ndarray = adapter.score(adapter.collate(prepared(adapter, query, documents))).numpy()
    return found


@pytest.mark.parametrize(
    ("name", "family"), [("rr_bert", CrossEncoderAdapter), ("rr_qwen3", Qwen3RerankerAdapter)]
)
def test_items_with_a_text_of_their_own_are_pairs_with_that_text(
    place: Path, name: str, family: type[ScoreAdapter]
) -> None:
    adapter = load(family, place / name, 160)
    firsts = ["a", "a", "b", "", "one " * 200]
    items = [InputItem(text, first=first) for text, first in zip(DOCUMENTS, firsts, strict=False)]
    call = ScoreCall(items, InputItem(""), names=FieldNames(query="text_1[{}]"))
    found: Any = [
        *Score().prepare(adapter, call, 0, 2, NOTHING),
        *Score().prepare(adapter, call, 2, 5, NOTHING),
    ]
    assert len(found) == 5
    for item, pair in zip(items, found, strict=True):
        [wanted] = prepared(adapter, item.first or "", [item.text or ""])
        assert pair.payload.ids.tolist() == wanted.payload.ids.tolist()
        assert (pair.truncated, pair.excess) == (wanted.truncated, wanted.excess)
    assert found[4].excess.in_query


def logits_of(directory: Path) -> np.ndarray:
    """What the model itself gives for each pair alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    found = []
    for text in DOCUMENTS:
        # NOTE: as lists, since a lone empty second text would count as none.
        encoded = tokenizer([QUERY], [text], truncation=True, max_length=512, return_tensors="pt")
        with torch.inference_mode():
            found.append(float(model.eval()(**encoded).logits[0, 0]))
    return np.array(found)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-values))


def test_the_activation_is_a_sigmoid_unless_the_catalog_or_the_checkpoint_says_otherwise(place: Path) -> None:
    logits, directory = logits_of(place / "rr_bert"), place / "rr_bert"
    for option, expected in (("auto", sigmoid(logits)), ("sigmoid", sigmoid(logits)), ("identity", logits)):
        adapter = load(CrossEncoderAdapter, directory, activation=option)
        assert np.allclose(scores(adapter, QUERY, DOCUMENTS), expected, atol=1e-5), option
    with pytest.raises(ValueError, match="softmax"):
        load(CrossEncoderAdapter, directory, activation="softmax")


def test_a_call_names_the_function_of_its_scores(place: Path) -> None:
    adapter, logits = load(CrossEncoderAdapter, place / "rr_bert"), logits_of(place / "rr_bert")
    groups = set()
    for option, expected in ((None, sigmoid(logits)), ("identity", logits), ("sigmoid", sigmoid(logits))):
        call = ScoreCall([], InputItem(QUERY), options={"activation": option})
        adapter.refuse_unsupported(call)
        batch = adapter.collate(prepared(adapter, QUERY, DOCUMENTS))
        assert np.allclose(adapter.scored(batch, call).numpy(), expected, atol=1e-5), option
        groups.add(adapter.group(call))
    assert len(groups) == 3 and "activation" in adapter.uses
    with pytest.raises(
        InvalidInput, match=r"options\.activation: 'tanh' is not one of auto, sigmoid, identity"
    ):
        adapter.refuse_unsupported(ScoreCall([], InputItem(QUERY), options={"activation": "tanh"}))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("torch.nn.modules.linear.Identity", "identity"),
        ("torch.nn.Tanh", "tanh"),
        ("my_package.Activation", "sigmoid"),
    ],
)
def test_the_activation_that_sentence_transformers_stored_is_used_if_it_is_one_of_torch(
    place: Path, tmp_path: Path, stored: str, name: str
) -> None:
    for path in (place / "rr_bert").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": stored}))
    logits = logits_of(place / "rr_bert")
    expected = {"identity": logits, "tanh": np.tanh(logits), "sigmoid": sigmoid(logits)}[name]
    assert np.allclose(scores(load(CrossEncoderAdapter, tmp_path), QUERY, DOCUMENTS), expected, atol=1e-5)


@pytest.mark.long
def test_the_default_prompt_that_sentence_transformers_stored_stands_before_the_query(
    place: Path, tmp_path: Path
) -> None:
    stored = tmp_path / "stored"
    prompts = {"prompts": {"web": "find the river: "}, "default_prompt_name": "web"}
    made = sentence_transformers.CrossEncoder(str(place / "rr_bert"), device="cpu", **prompts)  # type: ignore[arg-type]
    made.save_pretrained(str(stored))
    adapter = load(CrossEncoderAdapter, stored)
    reference = sentence_transformers.CrossEncoder(str(stored), device="cpu")
    wanted = reference.predict([(QUERY, text) for text in DOCUMENTS])
    assert np.allclose(scores(adapter, QUERY, DOCUMENTS), wanted, atol=1e-5)
    plain = load(CrossEncoderAdapter, place / "rr_bert")
    given, same = (prepared(each, QUERY, DOCUMENTS, instruction="go") for each in (adapter, plain))
    assert [list(pair.payload.ids) for pair in given] == [list(pair.payload.ids) for pair in same]


def test_the_label_of_a_cross_encoder_is_told(place: Path) -> None:
    assert load(CrossEncoderAdapter, place / "rr_bert").own_labels == ["LABEL_0"]


def test_a_classifier_with_several_labels_is_no_cross_encoder(place: Path) -> None:
    with pytest.raises(ValueError, match="one label, this model has 3"):
        load(CrossEncoderAdapter, place / "rr_bert_three")


def test_a_model_outside_the_attention_registry_gives_the_same_scores_padded(tmp_path: Path) -> None:
    size = vocabularies.wordpiece(tmp_path)
    sizes: dict[str, Any] = {**SIZES}
    config = transformers.DebertaV2Config(
        **sizes,
        vocab_size=size,
        num_labels=1,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        pad_token_id=0,
    )
    save(transformers.DebertaV2ForSequenceClassification(config), tmp_path)
    adapter = load(CrossEncoderAdapter, tmp_path)
    assert isinstance(adapter, CrossEncoderAdapter) and not adapter.packed
    assert np.allclose(scores(adapter, QUERY, DOCUMENTS), sigmoid(logits_of(tmp_path)), atol=1e-5)


WORDS: dict[str, Any] = {"positive_token": "1", "negative_token": "0", "activation": "identity"}
AROUND: dict[str, Any] = {"prefix": "user\n", "suffix": "\nRelevance: assistant\n"}
TEMPLATE: dict[str, Any] = {"pair_template": "query: {query}\ndocument: {text}"}


def test_templates_and_words_of_another_yes_or_no_model_fit(place: Path) -> None:
    directory = place / "rr_qwen3"
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    one, zero = tokenizer.convert_tokens_to_ids(["1", "0"])
    query, expected = "{text} with {query} braces", []
    for document in DOCUMENTS[:3]:
        parts = (AROUND["prefix"], f"query: {query}\ndocument: {document}", AROUND["suffix"])
        ids = [number for part in parts for number in tokenizer(part, add_special_tokens=False)["input_ids"]]
        with torch.inference_mode():
            logits = model.eval()(torch.tensor([ids])).logits[0, -1]
        expected.append(float(logits[one] - logits[zero]))
    adapter = load(Qwen3RerankerAdapter, directory, **WORDS, **AROUND, **TEMPLATE)
    assert np.allclose(scores(adapter, query, DOCUMENTS[:3]), expected, atol=1e-4)


def test_what_stands_around_a_pair_is_never_cut(place: Path) -> None:
    adapter = load(Qwen3RerankerAdapter, place / "rr_qwen3", 160)
    long = " ".join(sentences()[:60])
    [whole] = prepared(adapter, "q", ["d"])
    for query, document in (("q", long), (long, "d"), (long, long)):
        [pair] = prepared(adapter, query, [document])
        assert pair.truncated and pair.cost == len(pair.payload.ids) <= 160
        assert pair.payload.ids[:92].tolist() == whole.payload.ids[:92].tolist()
        assert pair.payload.ids[-24:].tolist() == whole.payload.ids[-24:].tolist()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"positive_token": "yes indeed"}, "not one token"),
        ({"pair_template": "{query} only"}, "{text} once"),
        ({"suffix": "assistant " * 600}, "prefix and suffix take"),
    ],
)
def test_options_that_do_not_fit_the_model_fail_its_load(
    place: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        load(Qwen3RerankerAdapter, place / "rr_qwen3", **options)


def test_only_two_rows_of_the_output_matrix_are_kept(place: Path) -> None:
    directory = place / "rr_qwen3"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    whole = sum(parameter.numel() * 4 for parameter in model.model.parameters())
    adapter = load(Qwen3RerankerAdapter, directory)
    assert whole <= adapter.memory_bytes <= whole + 2 * SIZES["hidden_size"] * 4 + 4096
