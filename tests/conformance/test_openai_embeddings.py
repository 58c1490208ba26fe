"""POST /v1/embeddings through the OpenAI SDK, on the real MiniLM."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.conformance.minilm import DIMS, HALF, MODEL, PROMPTED, reference, token_ids
from tests.fakes.adapter import vector_of
from tests.harness.cluster import ways_to
from tests.harness.later import openai
from tests.harness.server import Server

TEXTS = ["Hello, world!", "A man is playing a guitar on stage.", "naïve café 東京 🙂", ""]


server = ways_to("minilm_server")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """The SDK, pointed at the server; it does not retry, so that errors show."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Vectors of `TEXTS` by sentence-transformers."""
    return reference(TEXTS)


def test_the_sdk_gets_the_models_vectors_by_default(client: openai.OpenAI, expected: np.ndarray) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    assert (answer.object, answer.model) == ("list", MODEL)
    assert [entry.index for entry in answer.data] == [0, 1, 2, 3]
    assert all(entry.object == "embedding" for entry in answer.data)
    assert np.allclose([entry.embedding for entry in answer.data], expected, atol=1e-5)


def test_floats_and_base64_carry_the_same_bits(client: openai.OpenAI, expected: np.ndarray) -> None:
    floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    packed = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="base64")
    for index, (plain, coded) in enumerate(zip(floats.data, packed.data, strict=True)):
        assert isinstance(coded.embedding, str)
        row = np.frombuffer(base64.b64decode(coded.embedding, validate=True), "<f4")
        assert len(row) == len(plain.embedding) == DIMS
        assert np.allclose(row, plain.embedding, atol=1e-6)
        assert np.allclose(row, expected[index], atol=1e-5)


def test_one_text_may_be_given_without_a_list(client: openai.OpenAI, expected: np.ndarray) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS[1], user="someone")
    assert len(answer.data) == 1
    assert np.allclose(answer.data[0].embedding, expected[1], atol=1e-5)


@pytest.mark.parametrize("dimensions", [1, 128, DIMS])
def test_dimensions_shorten_to_unit_length(
    client: openai.OpenAI, expected: np.ndarray, dimensions: int
) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS, dimensions=dimensions)
    cut = expected[:, :dimensions]
    rows = np.array([entry.embedding for entry in answer.data])
    assert rows.shape == cut.shape
    assert np.allclose(rows, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["float", "base64"])
def test_an_answer_of_many_chunks_and_slices_is_whole(client: openai.OpenAI, form: Any) -> None:
    texts = [f"text {number}" for number in range(9000)]
    answer = client.embeddings.create(model="fake/echo", input=texts, encoding_format=form)
    assert [entry.index for entry in answer.data] == list(range(len(texts)))
    given: list[Any] = [entry.embedding for entry in answer.data]
    if form == "base64":
        given = [np.frombuffer(base64.b64decode(one), "<f4") for one in given]
    rows = np.array(given)
    np.testing.assert_allclose(rows, [vector_of(text, rows.shape[1]) for text in texts], rtol=1e-6)


def test_usage_is_the_true_number_of_tokens(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    tokens = sum(len(token_ids(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
    long = client.embeddings.create(model=MODEL, input="word " * 1000)
    assert long.usage.prompt_tokens == 256, "what the model saw, not what was sent"


def test_a_text_that_was_cut_is_reported_and_the_policy_may_refuse_or_split_it(
    client: openai.OpenAI, server: Server
) -> None:
    beginning, end = "alpha " * 300, "omega " * 300

    def ask(policy: str | None) -> Any:
        more = {"overflow_policy": policy} if policy else {}
        return client.embeddings.create(model=MODEL, input=["short", beginning + end], extra_body=more)

    answers = {policy: ask(policy) for policy in (None, "truncate_text", "truncate_left", "chunk")}
    usages = {policy: answer.usage.model_dump() for policy, answer in answers.items()}
    assert [usages[policy].get("truncated") for policy in answers] == [[1], [1], [1], None]
    rows = {policy: np.array(answer.data[1].embedding) for policy, answer in answers.items()}
    first, last = reference(["alpha " * 254, "omega " * 254])
    assert np.allclose(rows[None], first, atol=1e-4) and np.allclose(rows["truncate_text"], first, atol=1e-4)
    assert np.allclose(rows["truncate_left"], last, atol=1e-4)
    assert rows["chunk"] @ first < 0.999 and rows["chunk"] @ last < 0.999
    for policy, said in (("error", "256"), ("sideways", "overflow_policy")):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(policy)
        assert caught.value.code == "invalid_input" and said in caught.value.message


def test_a_refusal_names_the_input_by_its_place_its_tokens_and_the_limit(
    client: openai.OpenAI,
) -> None:
    long = "word " * 600
    ids = token_ids(long)[1:-1]
    cases: tuple[tuple[Any, str], ...] = (
        (["short", long], "input[1]: 602 tokens"),
        (long, "input: 602 tokens"),
        ([[2023], ids], "input[1]: 600 tokens"),
        (ids, "input: 600 tokens"),
    )
    for given, said in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model=MODEL, input=given, extra_body={"overflow_policy": "error"})
        assert said in caught.value.message and "is 256" in caught.value.message
    for given, place in (([[2023], [2023, 999_999]], "input[1]"), ([2023, 999_999], "input")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model=MODEL, input=given)
        assert f"{place}: token id 999999" in caught.value.message


def test_token_ids_are_what_the_model_reads(client: openai.OpenAI, expected: np.ndarray) -> None:
    ids = [token_ids(text) for text in TEXTS[:2]]
    many = client.embeddings.create(model=MODEL, input=ids)
    assert np.allclose([entry.embedding for entry in many.data], expected[:2], atol=1e-5)
    assert many.usage.prompt_tokens == sum(map(len, ids))
    one = client.embeddings.create(model=MODEL, input=ids[0])
    assert len(one.data) == 1
    assert np.allclose(one.data[0].embedding, expected[0], atol=1e-5)


@pytest.mark.parametrize("ids", [[30522], [2**31 - 1], [101, 999_999, 102]])
def test_token_ids_that_the_model_does_not_have_are_refused(client: openai.OpenAI, ids: list[int]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input=ids)
    assert caught.value.code == "invalid_input"
    assert "input" in caught.value.message


def test_many_concurrent_calls_keep_their_own_answers(server: Server, expected: np.ndarray) -> None:
    async def calls() -> list[openai.types.CreateEmbeddingResponse]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            wanted = [client.embeddings.create(model=MODEL, input=TEXTS[n % 4]) for n in range(40)]
            return await asyncio.gather(*wanted)

    for number, answer in enumerate(asyncio.run(calls())):
        assert np.allclose(answer.data[0].embedding, expected[number % 4], atol=1e-5)


def test_an_unknown_model_is_the_sdks_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="text-embedding-3-small", input="a")
    error = caught.value
    assert (error.status_code, error.code, error.type) == (404, "model_not_found", "invalid_request_error")
    assert error.request_id and error.request_id.startswith("req_")
    assert "text-embedding-3-small" in error.message


def test_a_bad_request_is_the_sdks_bad_request_error(client: openai.OpenAI) -> None:
    for arguments in ({"input": []}, {"input": "a", "dimensions": 385}, {"input": "a", "dimensions": 0}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model=MODEL, **arguments)  # type: ignore[call-overload]
        assert (caught.value.code, caught.value.type) == ("invalid_input", "invalid_request_error")


def test_failures_of_the_server_are_the_sdks_server_errors(client: openai.OpenAI) -> None:
    for model, text, status, code in (
        ("fake/broken", "a", 502, "model_not_available"),
        ("fake/echo", "#raise", 500, "inference_error"),
        ("fake/echo", "#nan", 500, "inference_error"),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            client.embeddings.create(model=model, input=text)
        assert (caught.value.status_code, caught.value.code, caught.value.type) == (
            status,
            code,
            "server_error",
        )


def test_one_failing_input_fails_the_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError):
        client.embeddings.create(model="fake/echo", input=["fine", "#raise"])


def test_the_sdk_lists_the_models(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {
        MODEL,
        HALF,
        PROMPTED,
        "fake/echo",
        "fake/broken",
    }
    assert client.models.retrieve("fake/echo").id == "fake/echo"
