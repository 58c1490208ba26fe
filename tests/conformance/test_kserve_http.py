"""KServe v2 over plain HTTP: layouts of the contract, every refusal of its table, and what polite ones never send."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conformance.kserve import ADD_SUB, LENGTH, A, B, json_pair, pair, post, tensor
from tests.conformance.kserve_limits import MAX_BODY_BYTES, MAX_JSON_BYTES, SECRET
from tests.fakes.gateway import gateway
from tests.harness.cluster import ways_to
from tests.harness.raw import RawClient
from tests.harness.server import Server
from tests.tiny.program_modules import LABELS, Classifier

BINARY = {"binary_data_output": True}


server = ways_to("limited_server", {"another engine": gateway})


def picture(seed: int, kind: str = "JPEG", size: tuple[int, int] = (32, 32)) -> bytes:
    """An encoded image in colour, (width, height)."""
    values = np.random.default_rng(seed).integers(0, 256, (size[1] // 4, size[0] // 4, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).resize(size, Image.Resampling.BILINEAR).save(file, kind)
    return file.getvalue()


def scores(*pictures: bytes) -> np.ndarray[Any, Any]:
    """What torch says of pictures, decoded apart from the server: BGR, values from 0 to 255."""
    pixels = [np.asarray(Image.open(io.BytesIO(data)))[:, :, ::-1].astype(np.float32) for data in pictures]
    with torch.no_grad():
        found = Classifier(True).eval()(torch.from_numpy(np.stack(pixels)))["scores"].numpy()
    assert isinstance(found, np.ndarray)
    return found


def test_the_image_layout_of_the_contract(server: Server) -> None:
    """JSON with only name, shape and datatype; then four bytes of length, little-endian, and the image."""
    image = picture(1)
    head = (
        b'{ "model_name" : "my_model"\n, "inputs" : [ \n  { \n    "name" : "image", \n    "shape" : [ 1 ], \n'
        b'    "datatype" : "BYTES" \n  } \n] \n} '
    )
    body = head + struct.pack("<I", len(image)) + image
    sent = {"Content-Type": "application/octet-stream", LENGTH: str(len(head))}
    answer = server.request("POST", "/v2/models/classifier_nhwc/infer", body, sent)
    assert answer.status == 200
    output = answer.json()["outputs"][0]
    assert (output["name"], output["datatype"], output["shape"]) == ("scores", "FP32", [1, 10])
    assert np.allclose(output["data"], scores(image)[0], atol=1e-6)


def test_the_raw_layout_of_the_contract(server: Server) -> None:
    """Raw data of the whole batch behind the JSON, without sizes anywhere."""
    values = np.random.default_rng(2).integers(0, 256, (3, 32, 32, 3)).astype("<f4")
    found = post(
        server,
        "/v2/models/classifier_nhwc/infer",
        {"inputs": [tensor("image", values, "FP32")]},
        values.tobytes(),
    )
    with torch.no_grad():
        expected = Classifier(True).eval()(torch.from_numpy(values))["scores"].numpy()
    assert np.allclose(np.array(found.head["outputs"][0]["data"]).reshape(3, 10), expected, atol=1e-6)


def test_the_binary_answer_of_the_contract(server: Server) -> None:
    wanted = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    answer = server.request("POST", ADD_SUB, json.dumps({"inputs": json_pair(), "outputs": wanted}).encode())
    length = int(answer.headers[LENGTH.lower()])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert int(answer.headers["content-length"]) == length + 64 == len(answer.body)
    output = json.loads(answer.body[:length])["outputs"]
    assert output == [
        {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
    ]
    assert answer.body[length:] == (A + B).tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("model", ["classifier", "classifier_nhwc"])
def test_a_batch_of_images_in_either_layout(server: Server, model: str, kind: str) -> None:
    images = [picture(3, kind), picture(4, kind)]
    block = b"".join(struct.pack("<I", len(image)) + image for image in images)
    inputs = [{"name": "image", "shape": [2], "datatype": "BYTES"}]
    found = post(server, f"/v2/models/{model}/infer", {"inputs": inputs}, block)
    assert found.status == 200, found.head
    # The two programs have the same weights but see channels in another place, so each is asked in its own layout.
    assert np.allclose(np.array(found.head["outputs"][0]["data"]).reshape(2, 10), scores(*images), atol=1e-6)


def test_classes_of_an_image_as_base64(server: Server) -> None:
    import base64

    image = picture(5)
    inputs = [
        {
            "name": "image",
            "shape": [1],
            "datatype": "BYTES",
            "data": [{"b64": base64.b64encode(image).decode()}],
        }
    ]
    wanted = [{"name": "scores", "parameters": {"classification": 3}}]
    found = post(server, "/v2/models/classifier_nhwc/infer", {"inputs": inputs, "outputs": wanted})
    output = found.head["outputs"][0]
    expected = scores(image)[0]
    best = np.argsort(-expected, kind="stable")[:3]
    assert (output["datatype"], output["shape"]) == ("BYTES", [1, 3])
    assert [entry.split(":")[1:] for entry in output["data"]] == [[str(i), LABELS[i]] for i in best]


@pytest.mark.parametrize("cut", [5, 300])
def test_a_broken_image_is_refused(server: Server, cut: int) -> None:
    image = picture(6)[:cut]
    inputs = [{"name": "image", "shape": [1], "datatype": "BYTES"}]
    found = post(
        server, "/v2/models/classifier_nhwc/infer", {"inputs": inputs}, struct.pack("<I", cut) + image
    )
    assert found.status == 400
    assert "input 'image': image 0" in found.error


def test_an_image_of_another_size_is_resized(server: Server) -> None:
    image = picture(7, "PNG", (80, 48))
    inputs = [{"name": "image", "shape": [1], "datatype": "BYTES"}]
    found = post(
        server, "/v2/models/classifier_nhwc/infer", {"inputs": inputs}, struct.pack("<I", len(image)) + image
    )
    pixels = torch.from_numpy(np.asarray(Image.open(io.BytesIO(image)))[:, :, ::-1].astype(np.float32))
    resized = torch.nn.functional.interpolate(
        pixels.permute(2, 0, 1)[None], (32, 32), mode="bilinear", align_corners=False, antialias=False
    )
    with torch.no_grad():
        expected = Classifier(True).eval()(resized.round().permute(0, 2, 3, 1))["scores"].numpy()
    assert np.allclose(found.head["outputs"][0]["data"], expected[0], atol=2e-3)


def test_json_and_binary_give_the_same(server: Server) -> None:
    mixed = [tensor("INPUT0", A), tensor("INPUT1", B, data=B.tolist())]
    answers = [
        post(server, ADD_SUB, {"id": "x", "inputs": json_pair()}),
        post(server, ADD_SUB, {"id": "x", "inputs": pair()}, A.tobytes() + B.tobytes()),
        post(server, ADD_SUB, {"id": "x", "inputs": mixed}, A.tobytes()),
    ]
    assert [one.head["outputs"][0]["data"] for one in answers] == [(A + B).ravel().tolist()] * 3
    assert answers[0].head["id"] == "x"
    binary = post(server, ADD_SUB, {"inputs": json_pair(), "parameters": BINARY})
    assert binary.tail == (A + B).tobytes() + (A - B).tobytes()
    assert binary.head["id"] == binary.answer.headers["x-request-id"]


def test_outputs_come_as_listed(server: Server) -> None:
    wanted = [{"name": "OUTPUT1"}, {"name": "OUTPUT0", "parameters": {"binary_data": False}}]
    found = post(server, ADD_SUB, {"inputs": json_pair(), "outputs": wanted, "parameters": BINARY})
    assert [output["name"] for output in found.head["outputs"]] == ["OUTPUT1", "OUTPUT0"]
    assert found.tail == (A - B).tobytes()
    assert found.head["outputs"][1]["data"] == (A + B).ravel().tolist()


def test_raw_requests(server: Server) -> None:
    values = np.array([1.5, -2.0], "<f4")
    found = post(server, "/v2/models/identity_fp32/infer", values.tobytes(), length="0")
    assert (found.tail, found.head["outputs"][0]["shape"]) == (values.tobytes(), [1, 2])
    text = post(server, "/v2/models/identity_bytes/infer", b"hello", length="0")
    assert text.tail == b"\5\0\0\0hello"
    assert post(server, ADD_SUB, A.tobytes(), length="0").status == 400


def test_an_empty_output_needs_no_binary_part(server: Server) -> None:
    values = np.ones((1, 3), "<f4")
    inputs = [tensor("INPUT", values, "FP32")]
    found = post(
        server, "/v2/models/zero_size/infer", {"inputs": inputs, "parameters": BINARY}, values.tobytes()
    )
    assert found.answer.headers["content-type"] == "application/json"
    assert found.head["outputs"][0]["shape"] == [1, 0]
    assert found.head["outputs"][0]["parameters"] == {"binary_data_size": 0}


@pytest.mark.parametrize("rows", [1, 8])
def test_large_tensors_in_binary(server: Server, rows: int) -> None:
    values = np.random.default_rng(8).standard_normal((rows, 100_000)).astype("<f4")
    inputs = [tensor("INPUT", values, "FP32")]
    found = post(
        server, "/v2/models/identity_fp32/infer", {"inputs": inputs, "parameters": BINARY}, values.tobytes()
    )
    assert found.tail == values.tobytes()


def test_bytes_that_are_not_utf8_need_binary(server: Server) -> None:
    inputs = [{"name": "INPUT", "shape": [1, 1], "datatype": "BYTES", "data": [{"b64": "/w=="}]}]
    refused = post(server, "/v2/models/identity_bytes/infer", {"inputs": inputs})
    assert (refused.status, "binary" in refused.error) == (400, True)
    assert (
        post(server, "/v2/models/identity_bytes/infer", {"inputs": inputs, "parameters": BINARY}).tail
        == b"\1\0\0\0\xff"
    )


def test_values_that_json_does_not_know_need_binary(server: Server) -> None:
    values = np.array([[np.nan, 1]], "<f4")
    inputs = [tensor("INPUT", values, "FP32")]
    path = "/v2/models/identity_fp32/infer"
    assert post(server, path, {"inputs": inputs}, values.tobytes()).status == 400
    assert (
        post(server, path, {"inputs": inputs, "parameters": BINARY}, values.tobytes()).tail
        == values.tobytes()
    )
    assert (
        post(
            server, path, b'{"inputs":[{"name":"INPUT","shape":[1,1],"datatype":"FP32","data":[NaN]}]}'
        ).status
        == 400
    )


INT = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32"}
ONE = json_pair()[1]
REFUSALS: list[tuple[str, Any, int, str]] = [
    (
        "/v2/models/nothing/infer",
        {"inputs": json_pair()},
        404,
        "Request for unknown model: 'nothing' is not found",
    ),
    ("/v2/models/add_sub/versions/9/infer", {"inputs": json_pair()}, 404, "version 9 is not found"),
    ("/v2/models/add_sub/versions/x/infer", {"inputs": json_pair()}, 404, "nothing at this path"),
    ("/v2/models/broken/infer", {"inputs": json_pair()}, 404, "has no available versions"),
    (ADD_SUB, b"", 400, "empty"),
    (ADD_SUB, b"not json", 400, "JSON"),
    (ADD_SUB, b"[]", 400, "Expected `object`"),
    (ADD_SUB, {}, 400, "missing required field `inputs`"),
    (ADD_SUB, {"inputs": []}, 400, "'inputs' is empty"),
    (ADD_SUB, {"inputs": [{"shape": [1], "datatype": "INT32", "data": [1]}]}, 400, "`name`"),
    (ADD_SUB, {"inputs": [{"name": "INPUT0", "datatype": "INT32", "data": [1]}]}, 400, "`shape`"),
    (ADD_SUB, {"inputs": [{"name": "INPUT0", "shape": [1], "data": [1]}]}, 400, "`datatype`"),
    (ADD_SUB, {"inputs": [INT | {"shape": [-1, 16], "data": [1]}, ONE]}, 400, "negative"),
    (ADD_SUB, {"inputs": [INT | {"shape": [1.5], "data": [1]}, ONE]}, 400, "Expected `int`"),
    (ADD_SUB, {"inputs": [INT | {"shape": [2**62, 2**62], "data": [1]}, ONE]}, 400, "above 2^59"),
    (
        ADD_SUB,
        {"inputs": [INT | {"data": ["a"] * 16}, ONE]},
        400,
        "input 'INPUT0': element 0: expected a number",
    ),
    (ADD_SUB, {"inputs": [INT | {"data": [2**31] * 16}, ONE]}, 400, "out of range for INT32"),
    (
        ADD_SUB,
        {"inputs": [INT | {"data": [1] * 15}, ONE]},
        400,
        "input 'INPUT0': expected 16 elements, got 15",
    ),
    (
        ADD_SUB,
        {"inputs": [INT | {"data": [1] * 17}, ONE]},
        400,
        "input 'INPUT0': expected 16 elements, got 17",
    ),
    (ADD_SUB, {"inputs": [INT | {"datatype": "INT99", "data": [1] * 16}, ONE]}, 400, "datatype 'INT99'"),
    (
        ADD_SUB,
        {"inputs": [INT | {"datatype": "FP32", "data": [1] * 16}, ONE]},
        400,
        "inference input 'INPUT0' data-type is",
    ),
    (
        ADD_SUB,
        {"inputs": [INT | {"shape": [1, 8], "data": [1] * 8}, ONE]},
        400,
        "unexpected shape for input 'INPUT0'",
    ),
    (
        ADD_SUB,
        {"inputs": [one | {"shape": [9, 16], "data": [1] * 144} for one in json_pair()]},
        400,
        "inference request batch-size must be <= 8",
    ),
    (ADD_SUB, {"inputs": [INT | {"shape": [2, 16], "data": [1] * 32}, ONE]}, 400, "batch-size"),
    (ADD_SUB, {"inputs": [ONE]}, 400, "expected 2 inputs but got 1"),
    (ADD_SUB, {"inputs": [ONE, ONE | {"name": "OTHER"}]}, 400, "unexpected inference input 'OTHER'"),
    (ADD_SUB, {"inputs": [ONE, ONE]}, 400, "'INPUT1' is given twice"),
    (
        ADD_SUB,
        {"inputs": json_pair(), "outputs": [{"name": "X"}]},
        400,
        "unexpected inference output 'X' for model",
    ),
    (ADD_SUB, {"inputs": json_pair(), "outputs": [{"name": "OUTPUT0"}] * 2}, 400, "'OUTPUT0' is given twice"),
    (ADD_SUB, {"inputs": json_pair(), "id": 5}, 400, "$.id"),
    (ADD_SUB, {"inputs": json_pair(), "parameters": {"triton_x": 1}}, 400, "triton_"),
    (ADD_SUB, {"inputs": json_pair(), "parameters": {"x": {"y": None}}}, 400, "parameters"),
    (ADD_SUB, {"inputs": pair()}, 400, "has no 'data'"),
    (
        ADD_SUB,
        {"inputs": [INT | {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 64}}, ONE]},
        501,
        "shared memory",
    ),
    (
        "/v2/models/raising/infer",
        {"inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [-1]}]},
        500,
        "",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSALS)
def test_refusals(server: Server, path: str, body: Any, status: int, words: str) -> None:
    found = post(server, path, body)
    assert (found.status, words in found.error) == (status, True), found.error
    assert set(found.head) >= {"error", "code", "request_id", "retryable"}
    assert found.head["request_id"] == found.answer.headers["x-request-id"]
    assert "Traceback" not in found.error and "/work" not in found.error
    assert ("retry-after" in found.answer.headers) == (status == 503)


def test_refusals_of_a_request_carry_its_id(server: Server) -> None:
    for given, shown in (({"id": "77"}, "[request id: 77] "), ({}, "[request id: <id_unknown>] ")):
        assert post(server, ADD_SUB, {**given, "inputs": [ONE]}).error.startswith(shown)
        assert post(server, ADD_SUB, {**given, "inputs": [INT | {"data": []}, ONE]}).error.startswith(shown)


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "99999", "9" * 30, ""])
def test_wrong_header_lengths(server: Server, length: str) -> None:
    found = post(server, ADD_SUB, {"inputs": pair()}, A.tobytes() + B.tobytes(), length)
    assert (found.status, LENGTH in found.error) == (400, True)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_header_length_beside_the_end_of_the_json(server: Server, change: int) -> None:
    head = json.dumps({"inputs": pair()}).encode()
    assert post(server, ADD_SUB, head, A.tobytes() + B.tobytes(), str(len(head) + change)).status == 400


@pytest.mark.parametrize(
    ("inputs", "nbytes", "words"),
    [
        (pair(), 127, "expected 128 bytes after the JSON, got 127"),
        (pair(), 129, "expected 128 bytes after the JSON, got 129"),
        (pair(), 0, "got 0"),
        (pair(parameters={"binary_data_size": 63}), 128, "binary_data_size is 63"),
        (pair(parameters={"binary_data_size": -64}), 128, "binary_data_size is -64"),
        (pair(parameters={"binary_data_size": 1 << 63}), 128, "binary_data_size is"),
        ([tensor("INPUT0", A, data=[1], parameters={"binary_data_size": 64})], 64, "expected"),
        ([tensor("INPUT0", A, data=[1] * 16, parameters={"binary_data_size": 64})], 64, "both"),
    ],
)
def test_wrong_binary_parts(server: Server, inputs: Any, nbytes: int, words: str) -> None:
    found = post(server, ADD_SUB, {"inputs": inputs}, bytes(nbytes))
    assert (found.status, words in found.error) == (400, True), found.error


@pytest.mark.parametrize(("depth", "status"), [(100, 200), (101, 400), (100_000, 400)])
def test_the_depth_of_nesting(server: Server, depth: int, status: int) -> None:
    inputs = (
        '[{"name":"INPUT","shape":[1,1],"datatype":"FP32","data":' + "[" * depth + "1" + "]" * depth + "}]"
    )
    found = post(server, "/v2/models/identity_fp32/infer", f'{{"inputs":{inputs}}}'.encode())
    assert found.status == status, found.head


@pytest.mark.parametrize(
    ("name", "pack", "unpack"),
    [("gzip", gzip.compress, gzip.decompress), ("deflate", zlib.compress, zlib.decompress)],
)
def test_bodies_packed_both_ways(server: Server, name: str, pack: Any, unpack: Any) -> None:
    values = np.zeros((1, 50_000), "<f4")
    head = json.dumps({"inputs": [tensor("INPUT", values, "FP32")], "parameters": BINARY}).encode()
    sent = {"Content-Encoding": name, "Accept-Encoding": name, LENGTH: str(len(head))}
    answer = server.request("POST", "/v2/models/identity_fp32/infer", pack(head + values.tobytes()), sent)
    assert (answer.status, answer.headers["content-encoding"]) == (200, name)
    assert len(answer.body) < 5000
    assert unpack(answer.body)[int(answer.headers[LENGTH.lower()]) :] == values.tobytes()


@pytest.mark.parametrize(("body", "encoding", "status"), [
    (b"not packed", "gzip", 400),
    (gzip.compress(b"{}" * 999)[:-9], "gzip", 400),
    (b"{}", "br", 501),
    (b"{}", "gzip, gzip", 501),
    (gzip.compress(bytes(MAX_BODY_BYTES + 1)), "gzip", 413),
    (zlib.compress(bytes(MAX_BODY_BYTES + 1)), "deflate", 413),
    (gzip.compress(b" " * (2 << 20)), "gzip", 413),
], ids=["none", "cut", "brotli", "twice", "gzip bomb", "deflate bomb", "blanks"])  # fmt: skip
def test_wrong_packings(server: Server, body: bytes, encoding: str, status: int) -> None:
    found = post(server, ADD_SUB, body, Content_Encoding=encoding)
    assert found.status == status, found.error
    assert found.answer.headers.get("accept-encoding") == ("gzip, deflate" if status == 501 else None)


def test_bodies_over_the_limits(server: Server) -> None:
    assert "kserve.max_json_bytes" in post(server, ADD_SUB, b" " * (MAX_JSON_BYTES + 1)).error
    with RawClient(server.port) as client:
        head = f"POST {ADD_SUB} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n{LENGTH}: 10\r\n\r\n"
        client.socket.sendall(head.encode())
        status, body = client.json()
    assert status == 413 and "limits.max_body_bytes" in body["error"]


def test_health_says_so_in_its_body_as_client_libraries_read_it(server: Server) -> None:
    live = server.get("/v2/health/live")
    assert live.json() == {"live": True} and live.headers["content-type"] == "application/json"
    for path in ("/v2/health/ready", "/v2/models/add_sub/ready", "/v2/models/add_sub/versions/1/ready"):
        assert server.get(path).json() == {"ready": True}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/health/live", 200),
        ("GET", "/v2/health/ready", 200),
        ("GET", "/v2", 200),
        ("GET", "/v2/", 200),
        ("GET", "/v2?x=1", 200),
        ("GET", "/v2/models/add_sub", 200),
        ("GET", "/v2/models/add_sub/", 200),
        ("GET", "/v2/models/versions_all/versions/2", 200),
        ("GET", "/v2/models/add_sub/ready", 200),
        ("GET", "/v2/models/add_sub/versions/1/ready", 200),
        ("GET", "/v2/models/add_sub/versions/2/ready", 400),
        ("GET", "/v2/models/nothing/ready", 400),
        ("GET", "/v2/models/nothing/ready/", 400),
        ("GET", "/v2/models/add_sub/ready/", 200),
        ("GET", "/v2/models/broken/ready", 400),
        ("GET", "/v2/models/nothing", 404),
        ("GET", "/v2/models/add_sub/versions/2", 404),
        ("GET", "/v2/models/add_sub/versions/x", 404),
        ("GET", "/v2/models/add_sub/config", 200),
        ("GET", "/v2/models/nothing/config", 404),
        ("GET", "/v2/models/nothing/stats", 400),
        ("GET", "/v2/models/stats", 200),
        ("GET", "/v2/models/fake/echo/ready", 200),
        ("GET", "/v2/models/fake/echo", 200),
        ("GET", "/v2/models/add_sub/versions/1/trace/setting", 404),
        ("GET", "/v2/models/a/../b", 400),
        ("GET", "/v2/../x", 400),
        ("GET", "/v2/models/%2e%2e/x", 400),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models", 404),
        ("GET", ADD_SUB, 405),
        ("POST", "/v2/health/live", 405),
        ("POST", "/v2/models/add_sub", 405),
        ("PUT", ADD_SUB, 405),
        ("DELETE", "/v2/models/add_sub", 405),
        ("GET", "/v2/repository/index", 405),
        ("POST", "/v2/repository/nothing", 404),
        ("POST", "/v2/repository/mine/index", 200),
        ("POST", "/v2/repository/mine/models/add_sub/load", 501),
        ("GET", "/v2/systemsharedmemory/status", 501),
        ("POST", "/v2/systemsharedmemory/unregister", 501),
        ("POST", "/v2/cudasharedmemory/unregister", 200),
        ("POST", "/v2/cudasharedmemory/region/x/unregister", 200),
        ("GET", "/v2/logging", 200),
        ("GET", "/v2/trace/setting", 403),
        ("GET", "/v1/config", 200),
        ("POST", "/v1/config/reload", 200),
    ],
)
def test_paths_and_methods(server: Server, method: str, path: str, status: int) -> None:
    answer = server.request(method, path)
    if path == "/v1/config/reload" and (
        server.application or "PENSTOCK_SERVER__ENGINE" in server.environment
    ):
        status = 501  # Files are read anew by workers of this host only.
    assert answer.status == status, answer.body
    if status >= 400:
        assert answer.json()["error"]
        assert answer.headers["content-type"] == "application/json"
    if status == 405:
        assert answer.headers["allow"]


def test_a_restricted_endpoint_answers_to_its_secret_only(server: Server) -> None:
    assert server.request("GET", "/v2/trace/setting", headers=SECRET).json()["trace_rate"]
    assert server.request("GET", "/v2/models/nothing/trace/setting", headers=SECRET).status == 400
    for wrong in ({}, {"X-Penstock-Trace": "a-secret-of-some-lengt"}, {"X-Penstock-Trace": ""}):
        answer = server.request("POST", "/v2/trace/setting", b"{}", wrong)
        assert (answer.status, answer.json()["code"]) == (403, "FORBIDDEN")


def test_sie_keeps_its_own_form_of_errors(server: Server) -> None:
    assert server.get("/v1/nothing").json() == {"detail": "Not Found"}
    assert server.request("PUT", "/v1/models").json() == {"detail": "Method Not Allowed"}


def test_a_catalog_model_is_a_model_of_tensors(server: Server) -> None:
    inputs = [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["one", "two"]}]
    found = post(server, "/v2/models/fake/echo/infer", {"inputs": inputs})
    output = found.head["outputs"][0]
    texts = server.encode("fake/echo", ["one", "two"]).json()["items"]
    expected = [value for item in texts for value in item["dense"]["values"]]
    assert output["datatype"] == "FP32" and np.allclose(output["data"], expected, atol=1e-6)
    assert post(server, "/v2/models/echo/versions/1/infer", {"inputs": inputs}).head["outputs"][0] == output


def test_generate(server: Server) -> None:
    path = "/v2/models/identity_fp32"
    assert post(server, f"{path}/generate", {"INPUT": [1, 2.5], "x": 1}).head == {
        "model_name": "identity_fp32",
        "model_version": "1",
        "OUTPUT": [1.0, 2.5],
    }
    streamed = server.request("POST", f"{path}/generate_stream", b'{"INPUT": 4}')
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.body.startswith(b"data: {") and streamed.body.endswith(b"}\n\n")
    assert json.loads(streamed.body[6:])["OUTPUT"] == 4.0
    assert post(server, f"{path}/generate", {"INPUT": "a"}).status == 400
    assert post(server, f"{path}/generate", {"INPUT": [1], "x": [1]}).status == 400
    assert post(server, f"{path}/generate", {}).status == 400


def test_statistics_count_successes_and_failures(server: Server) -> None:
    def read() -> dict[str, Any]:
        [entry] = server.get("/v2/models/versions_all/versions/2/stats").json()["model_stats"]
        assert isinstance(entry, dict)
        return entry

    before = read()
    good = {"inputs": [{"name": "INPUT", "shape": [2, 4], "datatype": "INT32", "data": [0] * 8}]}
    path = "/v2/models/versions_all/versions/2/infer"
    for _ in range(3):
        assert post(server, path, good).status == 200
    assert post(server, path, {"inputs": []}).status == 400
    after = read()
    assert after["inference_count"] - before["inference_count"] == 6
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 3
    assert after["inference_stats"]["fail"]["count"] - before["inference_stats"]["fail"]["count"] == 1
