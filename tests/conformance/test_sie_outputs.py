"""Sparse and token-vector outputs against the contract: fields, dtypes to the bit, empty ones, failures, MUVERA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from frontend.protocols.sie.muvera import Muvera
from frontend.protocols.sie.muvera import vector_of as fixed_width
from tests.conformance.models import DIMS, TERMS
from tests.conformance.rounding import ARRAY_TYPES, reference
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused
from tests.fakes.adapter import terms_of, token_vectors_of, vector_of
from tests.harness.cluster import ways_to
from tests.harness.server import Server

ALL = ["dense", "sparse", "multivector"]
TEXTS = ["", "a", "a longer text " * 5, "one that is longer than a single slice of the answer " * 9]
PATH = "/v1/encode/org/many"


server = ways_to("sie")


def encode(server: Server, form: Form, texts: list[str], model: str = "org/many", **params: Any) -> Any:
    """A successful answer."""
    body = {"items": [{"text": text} for text in texts], "params": params}
    answer = form.post(server, f"/v1/encode/{model}", body)
    assert answer.status == 200, answer.body
    return form.load(answer.body)


def tokens_of(text: str) -> int:
    """Token vectors that the fake family gives for a text."""
    return len(text) // 4 + 1


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("wanted", [["sparse"], ["multivector"], ["multivector", "dense"], ALL], ids="-".join)
def test_an_item_has_the_outputs_asked_for_and_no_others(
    server: Server, wanted: list[str], form: Form
) -> None:
    found = encode(server, form, TEXTS, output_types=wanted)
    assert found["usage"] == {"tokens": [tokens_of(text) for text in TEXTS], "truncated": []}
    for text, item in zip(TEXTS, found["items"], strict=True):
        assert set(item) == set(wanted)
        if "sparse" in wanted:
            assert list(item["sparse"]) == ["dims", "dtype", "indices", "values"]
            assert (item["sparse"]["dims"], item["sparse"]["dtype"]) == (TERMS, "float32")
            pairs = zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True)
            assert {int(term): float(weight) for term, weight in pairs} == terms_of(text, TERMS)
        if "multivector" in wanted:
            vectors = item["multivector"]
            assert list(vectors) == ["token_dims", "num_tokens", "dtype", "values"]
            assert (vectors["token_dims"], vectors["num_tokens"]) == (DIMS, tokens_of(text))
            expected = token_vectors_of(text, tokens_of(text), DIMS)
            assert np.asarray(vectors["values"], np.float32).tobytes() == expected.tobytes()
        if "dense" in wanted:
            dense = np.asarray(item["dense"]["values"], np.float32)
            assert dense.tobytes() == vector_of(text, DIMS).tobytes()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", ARRAY_TYPES)
def test_every_output_dtype_of_token_vectors_is_exact_to_the_bit(
    server: Server, dtype: str, form: Form
) -> None:
    items = encode(server, form, TEXTS, output_types=["multivector"], output_dtype=dtype)["items"]
    for text, item in zip(TEXTS, items, strict=True):
        vectors = item["multivector"]
        rows = [reference(row, dtype) for row in token_vectors_of(text, tokens_of(text), DIMS)]
        assert vectors["dtype"] == rows[0][1]
        assert (vectors["token_dims"], vectors["num_tokens"]) == (DIMS, len(rows))
        extras = {name for name in vectors if name in ("scale", "offset")}
        assert extras == set(rows[0][2])
        for name in extras:
            assert np.asarray(vectors[name], np.float32).tolist() == [row[2][name] for row in rows]
        expected = np.array([row[0] for row in rows], ARRAY_TYPES[dtype])
        if form is MSGPACK:
            assert vectors["values"].dtype.str == ARRAY_TYPES[dtype]
            assert all(vectors[name].dtype.str == "<f4" for name in extras)
        assert np.array_equal(np.asarray(vectors["values"], ARRAY_TYPES[dtype]), expected)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", ARRAY_TYPES)
def test_sparse_weights_are_halves_when_asked_and_else_stay_float32(
    server: Server, dtype: str, form: Form
) -> None:
    [item] = encode(server, form, ["weights"], output_types=["sparse"], output_dtype=dtype)["items"]
    sparse, expected = item["sparse"], "float16" if dtype == "float16" else "float32"
    assert sparse["dtype"] == expected
    if form is MSGPACK:
        assert sparse["indices"].dtype.str == "<i4"
        assert sparse["values"].dtype == np.dtype(expected)
    assert dict(zip(map(int, sparse["indices"]), map(float, sparse["values"]), strict=True)) == terms_of(
        "weights", TERMS
    )


def test_a_text_without_terms_has_empty_arrays(server: Server) -> None:
    as_msgpack = encode(server, MSGPACK, ["", "a"], output_types=["sparse"])["items"][0]["sparse"]
    assert as_msgpack["indices"].shape == as_msgpack["values"].shape == (0,)
    assert (as_msgpack["indices"].dtype.str, as_msgpack["values"].dtype.str) == ("<i4", "<f4")
    alone = encode(server, JSON, [""], output_types=["sparse"])["items"][0]["sparse"]
    assert (alone["indices"], alone["values"]) == ([], [])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_item_that_fails_alone_leaves_the_outputs_of_the_others_in_place(
    server: Server, form: Form
) -> None:
    texts = ["first", "#nan", "second, longer", "#lost", "#raise", "the third and longest"]
    answer = encode(server, form, texts, output_types=ALL, item_errors=True)
    for text, item in zip(texts, answer["items"], strict=True):
        if text.startswith("#"):
            assert set(item) == {"error"}, text
            continue
        vectors = np.asarray(item["multivector"]["values"], np.float32)
        assert np.array_equal(vectors, token_vectors_of(text, tokens_of(text), DIMS))
        assert set(map(int, item["sparse"]["indices"])) == set(terms_of(text, TERMS))
    assert answer["items"][3]["error"]["code"] == "INVALID_INPUT"
    assert answer["usage"]["tokens"][3] == 0


@pytest.mark.parametrize("bad", ["#nan", "#lost", "#raise"])
def test_a_request_whose_items_all_fail_fails_with_the_code_of_the_first(server: Server, bad: str) -> None:
    body = {"items": [{"text": bad}] * 3, "params": {"output_types": ALL}}
    code, status = ("INVALID_INPUT", 400) if bad == "#lost" else ("INFERENCE_ERROR", 500)
    assert_refused(MSGPACK.post(server, PATH, body), status, code)


def test_usage_names_the_items_that_were_cut(server: Server) -> None:
    found = encode(server, JSON, ["short", "long " * 600, "short"], output_types=["multivector"])
    assert found["usage"] == {"tokens": [2, 512, 2], "truncated": [1]}
    assert found["items"][1]["multivector"]["num_tokens"] == 512


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("is_query", [False, True])
def test_muvera_makes_dense_vectors_of_token_vectors(server: Server, is_query: bool, form: Form) -> None:
    options = {"muvera": True, "is_query": is_query}
    items = encode(server, form, TEXTS, output_types=["dense"], options=options)["items"]
    for text, item in zip(TEXTS, items, strict=True):
        assert set(item) == {"dense"} and item["dense"]["dims"] == 10240
        expected = fixed_width(token_vectors_of(text, tokens_of(text), DIMS), Muvera(), is_query=is_query)
        assert np.array_equal(np.asarray(item["dense"]["values"], np.float32), expected)


def test_muvera_comes_from_the_request_or_the_profile_and_needs_no_dense_output(server: Server) -> None:
    by_profile = encode(server, MSGPACK, ["a"], "org/many:fixed")["items"][0]
    assert by_profile["dense"]["values"].shape == (10240,)
    late = encode(server, MSGPACK, ["a"], "org/late", output_types=["dense", "multivector"])["items"][0]
    assert late["dense"]["values"].shape == (64,) and late["multivector"]["num_tokens"] == 1
    off = encode(server, MSGPACK, ["a"], "org/many:fixed", options={"muvera": False})["items"][0]
    assert off["dense"]["values"].shape == (DIMS,)
    packed = encode(server, MSGPACK, ["a"], "org/late", output_types=["dense"], output_dtype="binary")[
        "items"
    ][0]
    assert (packed["dense"]["dims"], packed["dense"]["values"].shape) == (64, (8,))


@pytest.mark.parametrize(
    ("model", "muvera", "mentions"),
    [
        ("org/odd", True, ("muvera", "multivector")),
        ("org/many", 5, ("muvera", "int")),
        ("org/many", {"rounds": 3}, ("muvera", "rounds", "num_repetitions")),
        ("org/many", {"num_repetitions": 0}, ("num_repetitions", "1..128")),
        ("org/many", {"num_simhash_projections": 99}, ("num_simhash_projections", "99")),
        ("org/many", {"seed": 1.5}, ("seed", "float")),
        ("org/many", {"normalize": 1}, ("normalize", "int")),
        (
            "org/many",
            {"num_repetitions": 128, "num_simhash_projections": 12, "projection_dim": 4096},
            ("limit",),
        ),
    ],
)
def test_settings_of_muvera_that_cannot_be_are_refused(
    server: Server, model: str, muvera: Any, mentions: tuple[str, ...]
) -> None:
    body = {"items": [{"text": "a"}], "params": {"output_types": ["dense"], "options": {"muvera": muvera}}}
    assert_refused(JSON.post(server, f"/v1/encode/{model}", body), 400, "INVALID_INPUT", *mentions)
