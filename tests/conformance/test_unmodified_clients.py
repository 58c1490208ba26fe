"""Clients of other servers and of hosted APIs, as they are installed: they get the numbers of the SIE routes.

Frameworks whose imports take seconds are marked `long`. The extra `clients` installs them; without it their tests are
skipped with the reason. `langchain-cohere` and `langchain-huggingface` declare older libraries than they work with.
"""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import pytest
import torch
from huggingface_hub import InferenceClient
from transformers import AutoModel, AutoTokenizer

from tests.conformance.conftest import Families
from tests.conformance.encoders import INSTRUCTED, MEAN
from tests.conformance.towers import CLIP
from tests.harness.server import Server
from tests.tiny.pictures import encoded as encoded_picture
from tests.tiny.pictures import picture

SCORER, CLASSIFIER = "cross-encoder/logits", "tiny/moods"
TEXTS = ["The river turns the wheel.", "Paris", "water and stone"]
QUERY = "What turns the wheel?"


@pytest.fixture
def server(either_families: Families) -> Server:
    """The server of all families, whose settings name the models of requests without a model, or a gateway beside."""
    return either_families.server


def asked(server: Server, path: str, body: dict[str, Any]) -> Any:
    """The JSON of a successful answer."""
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    return answer.json()


def vectors(server: Server, model: str, texts: list[str], **params: Any) -> np.ndarray:
    """What encode answers."""
    found = asked(
        server, f"/v1/encode/{model}", {"items": [{"text": one} for one in texts], "params": params}
    )
    return np.array([item["dense"]["values"] for item in found["items"]])


def scores(server: Server) -> np.ndarray:
    """What score answers for the texts, in their order."""
    items = [{"id": str(at), "text": text} for at, text in enumerate(TEXTS)]
    found = asked(server, f"/v1/score/{SCORER}", {"query": {"text": QUERY}, "items": items})["scores"]
    return np.array([one["score"] for one in sorted(found, key=lambda one: int(one["item_id"]))])


def units(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1."""
    found: np.ndarray = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return found


def test_cohere_version_2(server: Server) -> None:
    client = cohere.ClientV2(base_url=server.url, api_key="unused")
    for side, is_query in (("search_document", False), ("search_query", True)):
        answer = client.embed(
            model=INSTRUCTED, texts=TEXTS, input_type=side, embedding_types=["float", "int8", "base64"]
        )
        wanted = vectors(server, INSTRUCTED, TEXTS, is_query=is_query)
        assert answer.texts == TEXTS and answer.embeddings.float_ is not None
        np.testing.assert_allclose(answer.embeddings.float_, wanted, atol=1e-6)
        whole = vectors(server, INSTRUCTED, TEXTS, is_query=is_query, output_dtype="int8")
        np.testing.assert_array_equal(answer.embeddings.int8, whole)
        packed = [np.frombuffer(base64.b64decode(row), "<f4") for row in answer.embeddings.base64 or ()]
        np.testing.assert_allclose(packed, wanted, atol=1e-6)
    ranked = client.rerank(model=SCORER, query=QUERY, documents=TEXTS, top_n=2)
    expected = scores(server)
    assert [one.index for one in ranked.results] == np.argsort(-expected)[:2].tolist()
    for one in ranked.results:
        assert one.relevance_score == pytest.approx(expected[one.index], abs=1e-6)


def test_cohere_version_2_with_images_and_without_a_model(server: Server) -> None:
    data = base64.b64encode(encoded_picture(picture(3))).decode()
    wanted = asked(server, f"/v1/encode/{CLIP}", {"items": [{"images": [{"data": data}]}, {"text": "Paris"}]})
    uri = f"data:image/png;base64,{data}"

    async def ask() -> Any:
        async with cohere.AsyncClientV2(base_url=server.url, api_key="unused") as client:
            inputs: Any = [
                {"content": [{"type": "image_url", "image_url": {"url": uri}}]},
                {"content": [{"type": "text", "text": "Paris"}]},
            ]
            answer = await client.embed(model=CLIP, inputs=inputs, input_type="search_document")
            with pytest.raises(cohere.NotFoundError) as caught:
                await client.embed(model="embed-v4.0", texts=TEXTS, input_type="search_query")
            assert "embed-v4.0" in caught.value.body["message"]
            return answer

    found = asyncio.run(ask()).embeddings.float_
    np.testing.assert_allclose(found, [item["dense"]["values"] for item in wanted["items"]], atol=1e-6)


def test_cohere_version_1_joins_its_batches(server: Server) -> None:
    client = cohere.Client(base_url=server.url, api_key="unused")
    texts = [f"text {number}" for number in range(100)]
    answer: Any = client.embed(texts=texts, model=MEAN, input_type="search_document")
    assert answer.response_type == "embeddings_floats" and answer.texts == texts
    np.testing.assert_allclose(answer.embeddings, vectors(server, MEAN, texts), atol=1e-5)
    assert answer.meta.billed_units.input_tokens > 0
    typed: Any = client.embed(texts=TEXTS, model=MEAN, embedding_types=["ubinary", "binary"])
    bits = np.packbits(vectors(server, MEAN, TEXTS) > 0, axis=1)
    np.testing.assert_array_equal(typed.embeddings.ubinary, bits)
    np.testing.assert_array_equal(typed.embeddings.binary, bits.astype(int) - 128)
    documents: Any = [{"text": text, "page": "7"} for text in TEXTS]
    ranked = client.rerank(model=SCORER, query=QUERY, documents=documents, return_documents=True)
    for one in ranked.results:
        assert one.document is not None and one.document.text == TEXTS[one.index]
        assert one.relevance_score == pytest.approx(scores(server)[one.index], abs=1e-6)
    with pytest.raises(cohere.BadRequestError) as caught:
        client.embed(texts=["a"], model=SCORER, input_type="search_document")
    assert "dense" in caught.value.body["message"]


def test_the_hubs_inference_client(server: Server) -> None:
    client = InferenceClient(token="unused")
    wanted = units(vectors(server, MEAN, TEXTS))
    for text, row in zip(TEXTS, wanted, strict=True):
        found = client.feature_extraction(text, model=f"{server.url}/embed")
        np.testing.assert_allclose(found, [row], atol=1e-6)
    # With the address of the server alone the client asks the root, which TEI answers by the task of its model.
    np.testing.assert_allclose(
        InferenceClient(server.url).feature_extraction(TEXTS[1]), wanted[1:2], atol=1e-6
    )
    whole = client.feature_extraction(TEXTS, model=f"{server.url}/embed", normalize=True)  # type: ignore[arg-type]
    np.testing.assert_allclose(whole, wanted, atol=1e-6)
    cosines = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS, model=f"{server.url}/similarity")
    np.testing.assert_allclose(cosines, wanted @ wanted[0], atol=1e-6)
    items = {"items": [{"text": TEXTS[0]}]}
    labels = asked(server, f"/v1/extract/{CLASSIFIER}", items)["items"][0]["classifications"]
    # Of an answer for one text the client keeps the first label, from this server as from TEI.
    best: Any = client.text_classification(TEXTS[0], model=f"{server.url}/predict")
    assert best.label == labels[0]["label"]
    assert best.score == pytest.approx(labels[0]["score"], abs=1e-6)


class ModelsOwnIds:
    """Stands for the encoding of tiktoken, whose own files come from the internet."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode(self, text: str, **_: Any) -> list[int]:
        """The same under another name."""
        return self.encode_ordinary(text)


def read_by_the_model(place: Path, tokenizer: Any, text: str) -> np.ndarray:
    """The vector [width] that transformers gives for the ids of a text without special tokens."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        mean = AutoModel.from_pretrained(place)(input_ids=ids).last_hidden_state[0].mean(0)
    return (mean / mean.norm()).numpy()


def test_langchains_embeddings_of_openai_send_texts_or_token_ids(
    either_families: Families, monkeypatch: pytest.MonkeyPatch
) -> None:
    import langchain_openai
    import tiktoken

    server = either_families.server
    place = either_families.place / "encoders" / "dense_mean"
    tokenizer = AutoTokenizer.from_pretrained(place)
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: ModelsOwnIds(tokenizer))
    of_ids = np.array([read_by_the_model(place, tokenizer, text) for text in TEXTS])
    for checks, wanted in ((False, vectors(server, MEAN, TEXTS)), (True, of_ids)):
        embeddings = langchain_openai.OpenAIEmbeddings(
            model=MEAN, base_url=f"{server.url}/v1", api_key="unused", check_embedding_ctx_length=checks
        )
        found = np.array(embeddings.embed_documents(TEXTS))
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        np.testing.assert_allclose(embeddings.embed_query(TEXTS[1]), wanted[1], atol=1e-5)
    queries = langchain_openai.OpenAIEmbeddings(
        model=INSTRUCTED,
        base_url=f"{server.url}/v1",
        api_key="unused",
        check_embedding_ctx_length=False,
        model_kwargs={"extra_body": {"input_type": "query"}},
    )
    asking = vectors(server, INSTRUCTED, [QUERY], is_query=True)[0]
    np.testing.assert_allclose(queries.embed_query(QUERY), asking, atol=1e-5)


def test_langchains_embeddings_and_rerank_of_cohere(server: Server) -> None:
    from langchain_cohere import CohereEmbeddings, CohereRerank
    from langchain_core.documents import Document

    embeddings = CohereEmbeddings(model=INSTRUCTED, base_url=server.url, cohere_api_key="unused")
    for found, is_query in (
        (embeddings.embed_documents(TEXTS), False),
        ([embeddings.embed_query(text) for text in TEXTS], True),
    ):
        np.testing.assert_allclose(found, vectors(server, INSTRUCTED, TEXTS, is_query=is_query), atol=1e-5)
    ranker = CohereRerank(model=SCORER, base_url=server.url, cohere_api_key="unused", top_n=2)
    best = ranker.compress_documents([Document(page_content=text) for text in TEXTS], QUERY)
    expected = scores(server)
    assert [one.page_content for one in best] == [TEXTS[at] for at in np.argsort(-expected)[:2]]
    for one in best:
        wanted = expected[TEXTS.index(one.page_content)]
        assert one.metadata["relevance_score"] == pytest.approx(wanted, abs=1e-5)


def test_langchains_embeddings_of_the_hub(server: Server) -> None:
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    embeddings = HuggingFaceEndpointEmbeddings(huggingfacehub_api_token="unused")
    # The class takes no address itself, only a client that has one.
    embeddings.client = InferenceClient(f"{server.url}/embed")
    wanted = units(vectors(server, MEAN, TEXTS))
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), wanted, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[1]), wanted[1], atol=1e-6)


@pytest.mark.long
def test_llama_indexs_embeddings_and_rerank(server: Server) -> None:
    reason = "llama-index is not installed (the extra clients)"
    openai_like = pytest.importorskip("llama_index.embeddings.openai_like", reason=reason)
    tei = pytest.importorskip("llama_index.embeddings.text_embeddings_inference", reason=reason)
    rerank = pytest.importorskip("llama_index.postprocessor.tei_rerank", reason=reason)
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    wanted = vectors(server, MEAN, TEXTS)
    like = openai_like.OpenAILikeEmbedding(model_name=MEAN, api_base=f"{server.url}/v1", api_key="unused")
    np.testing.assert_allclose(like.get_text_embedding_batch(TEXTS), wanted, atol=1e-5)
    np.testing.assert_allclose(like.get_query_embedding(TEXTS[1]), wanted[1], atol=1e-5)
    own = tei.TextEmbeddingsInference(
        model_name=MEAN, base_url=server.url, text_instruction="", query_instruction=""
    )
    plain = [own.get_text_embedding(text) for text in TEXTS]
    np.testing.assert_allclose(
        plain, units(vectors(server, MEAN, [f" {text}".strip() for text in TEXTS])), atol=1e-5
    )
    ranker = rerank.TextEmbeddingInference(base_url=server.url, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    found = ranker.postprocess_nodes(nodes, QueryBundle(QUERY))
    expected = 1 / (1 + np.exp(-scores(server)))
    assert [one.text for one in found] == [TEXTS[at] for at in np.argsort(-expected)[:2]]
    for one in found:
        assert one.score == pytest.approx(expected[TEXTS.index(one.text)], abs=1e-5)


@pytest.mark.long
def test_haystacks_embedders(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HAYSTACK_TELEMETRY_ENABLED", "False")
    reason = "haystack-ai is not installed (the extra clients)"
    embedders = pytest.importorskip("haystack.components.embedders", reason=reason)
    from haystack import Document
    from haystack.utils import Secret

    wanted = vectors(server, MEAN, TEXTS)
    options = {"api_key": Secret.from_token("unused"), "model": MEAN, "api_base_url": f"{server.url}/v1"}
    found = embedders.OpenAIDocumentEmbedder(**options).run([Document(content=text) for text in TEXTS])
    np.testing.assert_allclose([one.embedding for one in found["documents"]], wanted, atol=1e-5)
    query = embedders.OpenAITextEmbedder(**options).run(TEXTS[1])
    np.testing.assert_allclose(query["embedding"], wanted[1], atol=1e-5)
