"""What the proof at load sees, rotary factors by length, and tokens for which a model has no embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem, ScoreCall
from tests.tiny.models import SIZES, build, redraw
from tests.tiny.pictures import encoded, picture
from workers.adapters.base import Adapter, ItemFailure, LoadContext, Prepared
from workers.adapters.registry import resolve
from workers.adapters.shared import encoder as encoder_module
from workers.adapters.shared.encoder import TextEncoder
from workers.adapters.shared.packing import Positions, TokenSequence
from workers.adapters.shared.proving import agree
from workers.adapters.shared.rectangles import ALONE, EQUAL
from workers.adapters.shared.rope import LengthClasses
from workers.scheduling.preparing import _readable

BORDER = 64


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(family: str, directory: Path) -> Any:
    """The adapter of a directory on CPU."""
    return resolve(family).load(
        LoadContext(directory, directory.name, torch.device("cpu"), torch.float32, None, {}, lambda *_: None)
    )


def llama(**rope: Any) -> Any:
    """A model with these rotary positions."""
    longest = BORDER if rope["rope_type"] == "dynamic" else 4 * BORDER
    config = transformers.LlamaConfig(
        **SIZES, vocab_size=100, num_key_value_heads=2, max_position_embeddings=longest, rope_parameters=rope
    )
    return redraw(transformers.LlamaModel(config))


LONG = {"short_factor": [1.0] * 8, "long_factor": [float(at) for at in range(1, 9)], "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": BORDER, "rope_theta": 1e4, **LONG}


@pytest.mark.parametrize(("rope", "beyond"), [(DYNAMIC, [65, 200]), (LONGROPE, [1, 1])])
def test_lengths_make_classes_where_the_rotary_factors_change(
    rope: dict[str, Any], beyond: list[int]
) -> None:
    classes = LengthClasses(llama(**rope))
    assert [classes.of(length) for length in (1, BORDER)] == [(0,), (0,)]
    assert [classes.of(length) for length in (65, 200)] == [(one,) for one in beyond]


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}],
)
def test_other_rotary_positions_make_none(rope: dict[str, Any]) -> None:
    assert not LengthClasses(llama(rope_theta=1e4, **rope)).many


@pytest.mark.sample(2)
@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE])
@pytest.mark.parametrize("packed", [True, False])
def test_each_sequence_has_the_factors_of_its_own_length(rope: dict[str, Any], packed: bool) -> None:
    model = llama(**rope)
    encoder = TextEncoder(model)
    assert encoder.packed
    if not packed:
        encoder.packed = False
        model.set_attn_implementation("sdpa")
        encoder._cut = encoder._lengths.within(encoder_module.PADDED)
    random = np.random.default_rng(3)
    given = [TokenSequence(random.integers(0, 100, length)) for length in (62, 68, 64, 65, 68, 90, 5, 70, 60)]
    for _ in range(2):
        batch = encoder.pack(given)
        with torch.inference_mode():
            rows = encoder.token_rows(batch)
        for number, sequence in enumerate(given):
            place = int(batch.restore[number])
            first, last = int(batch.layout.first[place]), int(batch.layout.last[place])
            with torch.inference_mode():
                wanted = llama(**rope)(input_ids=torch.from_numpy(sequence.ids)[None]).last_hidden_state[0]
            torch.testing.assert_close(rows[first : last + 1], wanted, rtol=0, atol=2e-5)


def test_a_rule_of_positions_that_is_not_the_models_own_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = transformers.AutoModel.from_pretrained(build("dense_xlmr", tmp_path / "model")).eval()
    encoder = TextEncoder(model, pad_id=1)
    assert encoder.packed and encoder.positions == Positions(2, 1)
    monkeypatch.setattr(encoder_module, "positions_of", lambda model: Positions(2))
    model.set_attn_implementation("sdpa")
    assert not TextEncoder(model, pad_id=1).packed
    assert "in one row by" in caplog.text


def test_factors_by_the_longest_sequence_are_not_packed_as_if_they_were_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LengthClasses, "many", property(lambda self: False))
    assert not TextEncoder(llama(**LONGROPE)).packed


@pytest.mark.parametrize(
    ("mixes", "cut"),
    [
        (lambda hidden, mask: hidden + hidden.mean((0, 1), keepdim=True), ALONE),
        (lambda hidden, mask: hidden + (mask == 0).sum(), EQUAL),
    ],
)
def test_a_model_whose_texts_influence_each_other_runs_them_apart(
    tmp_path: Path, mixes: Callable[..., torch.Tensor], cut: Any
) -> None:
    model: Any = transformers.AutoModel.from_pretrained(build("dense_mpnet", tmp_path / "model")).eval()

    def mixed(module: Any, inputs: Any, named: dict[str, Any], output: Any) -> Any:
        output.last_hidden_state = mixes(output.last_hidden_state, named["attention_mask"])
        return output

    model.register_forward_hook(mixed, with_kwargs=True)
    encoder = TextEncoder(model, pad_id=1)
    assert not encoder.packed and encoder._cut == cut
    batch = encoder.pack([TokenSequence(np.arange(10, 10 + length)) for length in (9, 9, 8)])
    assert [len(lens) for _, lens in encoder._cut.rectangles(batch)] == (
        [1, 1, 1] if cut is ALONE else [2, 1]
    )


def test_a_few_wrong_rows_do_not_hide_among_many_right_ones() -> None:
    wanted = torch.randn(100_000, 4, generator=torch.Generator().manual_seed(0))
    got = wanted.clone()
    got[7] *= 1.01
    assert float((got - wanted).norm() / wanted.norm()) < 1e-3
    assert agree(wanted, wanted) and not agree(got, wanted)


def extracting(items: list[InputItem]) -> Call:
    return ExtractCall(items, [])


def labelled(items: list[InputItem]) -> Call:
    return ExtractCall(items, ["city"])


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("family", "tiny", "call"),
    [
        ("dense", "dense_mean", lambda items: EncodeCall(items, ["dense"])),
        ("cross_encoder", "rr_bert", lambda items: ScoreCall(items, InputItem("river"))),
        ("ner", "ner", extracting),
        ("text_classification", "classifier", extracting),
        ("nli_zero_shot", "nli", lambda items: ExtractCall(items, ["city"])),
        ("colbert", "colbert_pylate", lambda items: ScoreCall(items, InputItem("river"))),
        ("clip", "clip", lambda items: EncodeCall(items, ["dense"])),
        ("gliner", "gliner", labelled),
        ("gliner", "gliner_bi", labelled),
        ("gliclass", "gliclass", labelled),
        ("qwen3_reranker", "rr_qwen3", lambda items: ScoreCall(items, InputItem("river"))),
        ("colqwen2", "colqwen2", lambda items: EncodeCall(items, ["multivector"], is_query=True)),
        ("qwen3_vl_embedding", "qwen3_vl", lambda items: EncodeCall(items, ["dense"])),
        ("bge_m3", "bge_m3", lambda items: EncodeCall(items, ["sparse"])),
        ("splade", "plain_splade", lambda items: EncodeCall(items, ["sparse"])),
        ("colpali", "colpali", lambda items: EncodeCall(items, ["multivector"], is_query=True)),
        ("gliner", "gliner_token", labelled),
        ("gliner", "gliner_relex", labelled),
    ],
)
def test_a_token_without_an_embedding_fails_its_item_alone(
    tmp_path: Path,
    family: str,
    tiny: str,
    call: Callable[[list[InputItem]], Call],
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = build(tiny, tmp_path / tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rows = max(tokenizer.get_vocab().values()) + 1
    tokenizer.add_tokens(["zzneu"])
    tokenizer.save_pretrained(str(directory))
    adapter: Adapter = load(family, directory)
    assert adapter.known_ids is not None and adapter.known_ids.rows <= rows
    assert f"ids up to {rows}, the model has embeddings for {adapter.known_ids.rows}" in caplog.text
    items = [InputItem("the river"), InputItem("zzneu Paris")]
    found: Sequence[Any] = _readable(adapter, adapter.prepare(items, call(items)))
    assert isinstance(found[0], Prepared)
    assert found[1].code == "INVALID_INPUT" and f"'zzneu' has the id {rows}" in found[1].message


@pytest.mark.parametrize("tiny", ["florence2", "donut", "glm_ocr"])
def test_an_instruction_with_a_token_without_an_embedding_never_reaches_the_model(
    tmp_path: Path, tiny: str
) -> None:
    directory = build(tiny, tmp_path / tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["zzneu"])
    tokenizer.save_pretrained(str(directory))
    adapter: Adapter = load(tiny, directory)
    items = [InputItem(images=[encoded(picture(1))])]
    [found] = _readable(adapter, adapter.prepare(items, ExtractCall(items, instruction="which zzneu?")))
    assert isinstance(found, ItemFailure) and "'zzneu' has the id" in found.message


def test_a_text_without_any_token_has_no_entities(tmp_path: Path) -> None:
    directory = build("ner", tmp_path / "ner")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.save_pretrained(str(directory))
    adapter = load("ner", directory)

    def found(*texts: str) -> list[Any]:
        return adapter.extract(
            adapter.collate(adapter.prepare([InputItem(text) for text in texts], ExtractCall([])))
        )

    whole, empty = found("Marie Curie in Paris", "")
    assert empty.entities == [] and [one.text for one in whole.entities] == [
        one.text for one in found("Marie Curie in Paris")[0].entities
    ]
