"""The OpenAPI document: valid, complete, by reference, and the same from every place it can be had from."""

from __future__ import annotations

import base64
import io
import json
import re
from http import HTTPStatus
from typing import Any

import falcon.inspect
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator, validate
from PIL import Image

from frontend import app
from frontend.engine.answer import OUTPUT_DTYPES
from frontend.generation.conversation import ROLES
from frontend.generation.fields import EFFORTS, PERMISSIONS
from frontend.protocols.ollama.models import INSTEAD
from frontend.protocols.registry import protocols
from ipc import settings
from ipc.memory.datatypes import DATATYPES
from penstock import cli
from tests.fakes import described_answers

KNOWN = protocols()
DOCUMENT: dict[str, Any] = json.loads(KNOWN.schema())
REQUIRED = {
    "/", "/healthz", "/readyz", "/metrics", "/v1/encode/{model}", "/v1/score/{model}", "/v1/models",
    "/v1/extract/{model}", "/v1/models/{model}", "/v1/embeddings", "/v1/rerank",
}  # fmt: skip
UNDOCUMENTED = {
    "/ws/status": "a WebSocket",
    "/redoc": "the same page as /docs",
    "/docs/{name}": "files of that page",
    "/v2/": "the same as /v2",
    **dict.fromkeys(("/v1/images/generations", "/v1/audio/speech"), "other categories of models"),
    **dict.fromkeys(("/v1/models/tune", "/re_isq", *INSTEAD), "refuses everything"),
    **dict.fromkeys((f"/calibration/{act}" for act in ("start", "status", "apply")), "refuses everything"),
    **dict.fromkeys(("/v1/containers", "/v1/containers/{container_id}"), "refuses everything"),
    **dict.fromkeys((f"/v1/responses/{name}" for name in ("compact", "input_tokens")), "not found"),
}
OTHER_ERRORS = ("/v2", "/v1/config", "/v1/chat", "/v1/completions", "/v1/models/unload", "/v1/models/reload")
OTHER_ERRORS += ("/v1/models/status", "/v1/system", "/v1/messages", "/v1/responses", "/api/", "/v1/files")
OTHER_ERRORS += ("/v1/containers", "/v1/agent", "/v1/sessions", "/v1/skills", "/v1/lora_adapters")
OTHER_ERRORS += ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
REFUSED = {("post", "/v1/containers/{container_id}/files")}
"""Methods that a described path refuses with a reason."""
FOREIGN = (
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/similarity",
    "/rerank",
    "/predict",
    "/tokenize",
    "/decode",
    "/info",
    "/invocations",
)
FOREIGN += ("/pooling", "/score", "/v1/score", "/classify", "/detokenize", "/embeddings", "/models")
FOREIGN += ("/api/embed", "/api/embeddings")
OTHER_ERRORS += tuple(path for path in FOREIGN if path != "/v1/score")
REFS = {
    "/v1/encode/{model}": "EncodeRequest",
    "/v1/score/{model}": "ScoreRequest",
    "/v1/extract/{model}": "ExtractRequest",
    "/v1/embeddings": "EmbeddingsRequest",
    "/v1/rerank": "RerankRequest",
    "/v1/embed": "CohereEmbedV1Request",
    "/v2/embed": "CohereEmbedRequest",
    "/v2/rerank": "RerankRequest",
}
BODIES = REFS | {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/messages": "MessagesRequest",
    "/v1/responses": "ResponseRequest",
    "/v1/messages/count_tokens": "MessagesRequest",
}


def described() -> dict[tuple[str, str], dict[str, Any]]:
    """Operations of the document by method and path."""
    return {(m, path): one for path, methods in DOCUMENT["paths"].items() for m, one in methods.items()}


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    """What a node stands for."""
    while "$ref" in node:
        found: Any = DOCUMENT
        for key in node["$ref"].removeprefix("#/").split("/"):
            found = found[key]
        node = found
    return node


def test_the_document_is_valid_openapi() -> None:
    validate(DOCUMENT, cls=OpenAPIV31SpecValidator)
    assert DOCUMENT["info"]["title"] == "Penstock"
    assert set(DOCUMENT["paths"]) >= REQUIRED


def test_every_route_of_the_application_is_described_and_nothing_else() -> None:
    built = app.create(settings.Settings())
    served = {
        (method.method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in falcon.inspect.inspect_app(built._app).routes
        for method in route.methods
        if not method.internal and method.method not in ("HEAD", "OPTIONS")
    }
    assert {path for _, path in served} >= set(UNDOCUMENTED)
    # Below a folder a resource reads the rest of the path by itself: what is described there is asked of it.
    folders = {(method, path.removesuffix("{tail}")) for method, path in served if path.endswith("{tail}")}
    plain = {entry for entry in served if not entry[1].endswith("{tail}")}
    below = {
        (method, path)
        for method, path in described()
        if any(method == one and path.startswith(folder) for one, folder in folders)
    }
    assert {entry for entry in plain if entry[1] not in UNDOCUMENTED} - REFUSED == set(described()) - below
    assert all(any(path.startswith(folder) for _, path in below) for _, folder in folders)


@pytest.mark.parametrize("path", BODIES)
def test_request_bodies_are_references_in_each_media_type(path: str) -> None:
    content = described()["post", path]["requestBody"]["content"]
    both = path.endswith("{model}")
    assert set(content) == {"application/json", "application/msgpack"} if both else {"application/json"}
    assert {entry["schema"]["$ref"] for entry in content.values()} == {f"#/components/schemas/{BODIES[path]}"}


def test_examples_are_what_the_server_takes() -> None:
    for route in KNOWN.routes:
        if route.body is not None and route.example is not None:
            for example in (route.example, *route.variants.values()):
                msgspec.json.decode(json.dumps(example), type=route.body)


def test_a_conversation_with_a_picture_is_an_example_beside_the_plain_one() -> None:
    content = described()["post", "/v1/chat/completions"]["requestBody"]["content"]["application/json"]
    assert "example" not in content, "OpenAPI allows one of both"
    plain, pictured = (content["examples"][name]["value"] for name in ("plain", "picture"))
    assert plain["messages"][0]["content"] == "Hello"
    url = pictured["messages"][0]["content"][0]["image_url"]["url"]
    image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    image.load()
    assert image.size == (16, 16)


def test_answers_have_their_statuses_headers_and_bodies() -> None:
    for (method, path), operation in described().items():
        assert "200" in operation["responses"], path
        for status, answer in operation["responses"].items():
            HTTPStatus(int(status))
            headers = set(answer["headers"])
            assert headers >= {"X-Request-ID", "X-Trace-ID", "X-SIE-Server-Version"}
            json_error = int(status) >= 400 and "application/json" in answer["content"]
            of_sie = path in REFS or not path.startswith(OTHER_ERRORS)
            assert ("X-SIE-Error-Code" in headers) == (json_error and of_sie), (method, path, status)
            # Whoever may not load and unload by name is told so with 503, for good.
            passes = status in ("429", "503", "504") and not re.fullmatch("/v2/.*/(un)?load", path)
            assert ("Retry-After" in headers) == (json_error and passes)
            assert ("X-Total-Time" in headers) == (
                method == "post" and path in (*REFS, *FOREIGN) and status == "200"
            )
            for entry in answer["content"].values():
                assert resolved(entry["schema"])
    names = [operation["operationId"] for operation in described().values()]
    assert len(names) == len(set(names))


def test_routes_of_several_servers_have_the_errors_of_each() -> None:
    for path, owners in KNOWN.owners.items():
        responses = described()["post", path]["responses"]
        forms = {
            status: {
                found.rpartition("/")[2] for found in re.findall(r'"(#[^"]+)"', json.dumps(answer["content"]))
            }
            for status, answer in responses.items()
        }
        bare = {"BareError"} if set(owners) & {"vllm", "infinity"} else set()
        tei = {"TeiError"} if "tei" in owners else set()
        assert forms["501"] == {"ErrorResponse"} | bare | tei
        assert forms.get("400", set()) == bare and forms.get("422", set()) == tei


def test_a_route_that_needs_a_key_says_how_it_refuses_callers() -> None:
    for route in protocols().routes:
        assert not (route.summary and route.need) or {401, 403, 429} <= set(route.errors), route.name


def test_an_answer_with_a_status_or_field_that_is_not_described_fails_a_test() -> None:
    described_answers.check("GET", "/api/version", 200, b'{"version":"1"}')
    described_answers.check("GET", "/no/such/path", 418, b"{}")
    for status, body in ((418, b"{}"), (418, b""), (200, b'{"version":"1","more":2}')):
        with pytest.raises(AssertionError, match=r"described|description"):
            described_answers.check("GET", "/api/version", status, body)


def test_every_component_is_used() -> None:
    text = json.dumps(DOCUMENT)
    for kind in ("schemas", "headers", "parameters"):
        for name in DOCUMENT["components"][kind]:
            assert f'"#/components/{kind}/{name}"' in text, name


def test_the_command_line_prints_the_same_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["openapi"]) == 0
    assert json.loads(capsys.readouterr().out) == DOCUMENT


def test_descriptions_are_sentences() -> None:
    for operation in described().values():
        assert re.fullmatch(r"[A-Z][^`]*[.]", operation["summary"])


def _without_words(value: Any, place: str) -> list[str]:
    """Places of fields and parameters below `value` that nothing describes."""
    if isinstance(value, list):
        return [found for at, one in enumerate(value) for found in _without_words(one, f"{place}[{at}]")]
    if not isinstance(value, dict):
        return []
    fields = value["properties"] if value.get("type") == "object" and "properties" in value else {}
    bare = [f"{place}.{name}" for name, field in fields.items() if not field.get("description")]
    if "in" in value and "name" in value and not value.get("description"):
        bare.append(place)
    return [
        *bare,
        *(found for name, one in value.items() for found in _without_words(one, f"{place}.{name}")),
    ]


def test_every_field_and_parameter_is_described() -> None:
    assert _without_words({"paths": DOCUMENT["paths"], **DOCUMENT["components"]}, "") == []


@pytest.mark.long
def test_the_document_of_a_gateway_is_as_good_and_has_pools_and_configurations_beside() -> None:
    known = protocols(is_gateway=True)
    document = json.loads(known.schema())
    validate(document, cls=OpenAPIV31SpecValidator)
    pools = {"/v1/pools", "/v1/pools/{pool}", "/v1/pools/{pool}/renew"}
    pools |= {f"/v1/configs/{name}" for name in ("models", "bundles", "epoch", "export", "resolve")}
    pools |= {f"/v1/configs/models/{{model}}{rest}" for rest in ("", "/status")} | {
        "/v1/configs/bundles/{bundle}"
    }
    assert set(document["paths"]) - set(DOCUMENT["paths"]) == pools
    assert _without_words({"paths": document["paths"], **document["components"]}, "") == []
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert len(operations) == len({one["operationId"] for one in operations})
    assert {one["tags"][0] for one in operations} == {section["name"] for section in document["tags"]}
    assert set(document["paths"]["/v1/pools"]["post"]["responses"]) >= {"200", "201", "400", "403", "507"}
    text = json.dumps(document)
    for kind, components in document["components"].items():
        for name in components if kind != "securitySchemes" else ():
            assert f'"#/components/{kind}/{name}"' in text, name
    for route in known.routes:
        if route.body is not None and route.example is not None and route.path in pools:
            msgspec.json.decode(json.dumps(route.example), type=route.body)


# Texts of any content, names that clients or models give, and parts that are JSON of several forms.
FREE_TEXTS = {
    "content", "content_type", "data_1", "data_2", "documents", "image", "image_url", "images", "input", "inputs",
    "instruction", "instructions", "items", "labels", "prompt", "queries", "query", "reasoning",
    "reasoning_content", "sentences", "source_sentence", "stop", "stop_sequences", "suffix", "system", "text",
    "text_1", "text_2", "texts", "dry_sequence_breakers", "data", "b64", "chat_template", "id", "key", "model",
    "model_id", "name", "previous_response_id", "prompt_name", "rank_fields", "session_id", "shared_memory_region",
    "tool_call_id", "url", "user", "container", "enable_code_execution", "enable_shell", "format", "grammar",
    "include", "max_tool_calls", "response_format", "stream_options", "summary", "thinking", "tool_choice", "type",
    "web_search_options", "messages", "audio", "conversation", "function_call", "functions", "mcp_servers",
    "output_format", "thread", "cache_salt", "keep_alive", "template", "think", "tool_name", "file", "purpose",
    "message", "files", "default_version", "display_name", "display_title", "lora_name", "lora_path", "base_model_name",
}  # fmt: skip


def _schemas_below(node: Any) -> set[str]:
    """Names of the components that a part of the document refers to, those of components included."""
    found: set[str] = set()
    waiting = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(node))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            below = json.dumps(DOCUMENT["components"]["schemas"][name])
            waiting += re.findall(r'"#/components/schemas/([^"]+)"', below)
    return found


def _takes_any_text(schema: dict[str, Any]) -> bool:
    """Whether a field may be any text, or anything at all."""
    if "enum" in schema or "const" in schema:
        return False
    inner = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())]
    return (
        schema.get("type") == "string"
        or not set(schema) - {"description", "default"}
        or any(map(_takes_any_text, inner))
    )


def test_texts_of_requests_are_free_or_have_an_enum() -> None:
    bodies = [operation.get("requestBody") for operation in described().values()]
    taking = {
        (name, field)
        for name in _schemas_below(bodies)
        for field, schema in DOCUMENT["components"]["schemas"][name].get("properties", {}).items()
        if _takes_any_text(schema)
    }
    assert {field for _, field in taking} == FREE_TEXTS, sorted(taking)
    parameters = [one for operation in described().values() for one in operation.get("parameters", ())]
    [mode] = (one["schema"] for one in parameters if one.get("name") == "mode")
    assert mode["enum"] == ["live", "ready"]


@pytest.mark.parametrize(
    ("struct", "field", "words"),
    [
        ("ChatMessage", "role", ROLES),
        ("ChatRequest", "reasoning_effort", (*EFFORTS, None)),
        ("OutputConfig", "effort", (*EFFORTS, None)),
        ("EncodeParams", "output_dtype", (*OUTPUT_DTYPES, None)),
        ("EmbeddingsRequest", "encoding_format", ("float", "base64", None)),
        ("ResponseRequest", "truncation", ("auto", "disabled", None)),
        ("ResponseRequest", "agent_permission", (*PERMISSIONS, None)),
        ("Input", "datatype", tuple(DATATYPES)),
    ],
)
def test_words_that_a_handler_checks_are_an_enum(
    struct: str, field: str, words: tuple[str | None, ...]
) -> None:
    assert tuple(DOCUMENT["components"]["schemas"][struct]["properties"][field]["enum"]) == words


@pytest.mark.parametrize("act", ["unload", "reload", "status"])
def test_control_of_models_refuses_in_the_form_of_errors_and_fails_in_its_own(act: str) -> None:
    answer = described()["post", f"/v1/models/{act}"]["responses"]["400"]
    forms = answer["content"]["application/json"]["schema"]["anyOf"]
    assert [form["$ref"].rpartition("/")[2] for form in forms] == ["ControlAnswer", "ErrorAnswer"]


def test_every_section_has_its_place_and_says_what_it_is_about() -> None:
    tags = {operation["tags"][0] for path in DOCUMENT["paths"].values() for operation in path.values()}
    sections = [section["name"] for section in DOCUMENT["tags"]]
    assert set(sections) == tags and len(sections) == len(tags)
    assert sections[:3] == ["chat", "inference", "models"], "what a newcomer needs comes first"
    assert all(section["description"] for section in DOCUMENT["tags"])
