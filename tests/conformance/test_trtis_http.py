"""TRTIS v1 over HTTP: the seed's flows, versions, classes, strings, statuses, numbers, and what the command prints."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from google.protobuf import text_format

from ipc.protos import trtis_v1_pb2 as pb
from penstock.cli import main
from tests.conformance.trtis import MODELS, infer, status_of, strings
from tests.harness.cluster import is_gateway
from tests.harness.server import Server
from tests.tiny.program_modules import LABELS, Classifier

A = np.arange(32, dtype="<i4").reshape(2, 16)
B = np.full((2, 16), 3, dtype="<i4")
BODY = A.tobytes() + B.tobytes()
INPUTS = 'input { name: "INPUT0" dims: 16 } input { name: "INPUT1" dims: 16 }'
GOOD = f'batch_size: 2 {INPUTS} output {{ name: "OUTPUT0" }} output {{ name: "OUTPUT1" }} id: 7'


@pytest.fixture
def server(either_trtis: Server) -> Server:
    """The server, and a gateway whose only box is the server."""
    return either_trtis


@pytest.mark.parametrize("query", ["", "?format=binary", "?format=text", "?other=1"])
def test_raw_outputs_come_in_the_order_asked_for_and_the_header_stands_behind_them(
    server: Server, query: str
) -> None:
    header = f'batch_size: 2 {INPUTS} output {{ name: "OUTPUT1" }} output {{ name: "OUTPUT0" }} id: 7'
    found = infer(server, "add_sub", header, BODY, query)
    assert found.answer.status == 200 and found.status.code == pb.SUCCESS
    assert found.answer.headers["content-type"] == "application/octet-stream"
    assert [output.name for output in found.header.output] == ["OUTPUT1", "OUTPUT0"]
    assert (found.array("OUTPUT0", "<i4") == A + B).all() and (found.array("OUTPUT1", "<i4") == A - B).all()
    head = found.header
    assert (head.model_name, head.model_version, head.batch_size, head.id) == ("add_sub", 1, 2, 7)
    assert list(head.output[0].raw.dims) == [16] and head.output[0].raw.batch_byte_size == 128


def test_top_k_classes_carry_labels_and_the_short_header_only_names_them(server: Server) -> None:
    pictures = np.random.default_rng(5).integers(0, 256, (2, 3, 32, 32)).astype("<f4")
    header = 'batch_size: 2 input { name: "image" } output { name: "scores" cls { count: 3 } }'
    found = infer(server, "classifier", header, pictures.tobytes())
    with torch.no_grad():
        scores = Classifier(False).eval()(torch.from_numpy(pictures))["scores"].numpy()
    short = text_format.Parse(found.answer.headers["nv-inferresponse"], pb.InferResponseHeader())
    assert [output.name for output in short.output] == ["scores"] and not short.output[0].batch_classes
    assert not found.raw and len(found.header.output[0].batch_classes) == 2
    for row, classes in zip(scores, found.header.output[0].batch_classes, strict=True):
        order = np.argsort(-row, kind="stable")[:3]
        assert [entry.idx for entry in classes.cls] == list(order)
        assert [entry.value for entry in classes.cls] == pytest.approx([row[i] for i in order], abs=1e-6)
        assert [entry.label for entry in classes.cls] == [LABELS[i] for i in order]


def test_strings_are_counted_by_the_request(server: Server) -> None:
    left, right = strings(*(b"%d" % i for i in range(16))), strings(*[b"2"] * 16)
    header = (
        f'batch_size: 1 input {{ name: "INPUT0" dims: 16 batch_byte_size: {len(left)} }} '
        f'input {{ name: "INPUT1" dims: 16 batch_byte_size: {len(right)} }} output {{ name: "OUTPUT0" }}'
    )
    found = infer(server, "add_sub_string", header, left + right)
    assert found.status.code == pb.SUCCESS, found.status.msg
    assert found.raw["OUTPUT0"] == strings(*(b"%d" % (i + 2) for i in range(16)))


@pytest.mark.parametrize(
    ("model", "header", "body", "dims"),
    [
        (
            "variable",
            'batch_size: 1 input { name: "INPUT" dims: 2 dims: 3 } output { name: "OUTPUT" }',
            24,
            [2],
        ),
        ("zero_size", 'batch_size: 1 input { name: "INPUT" dims: 2 } output { name: "OUTPUT" }', 8, [0]),
        ("zero_size", 'batch_size: 1 input { name: "INPUT" dims: 0 } output { name: "OUTPUT" }', 0, [0]),
        ("reshape", 'batch_size: 1 input { name: "INPUT" dims: [2, 2] } output { name: "OUTPUT" }', 16, [1]),
        ("identity_fp16", 'batch_size: 1 input { name: "INPUT" dims: 5 } output { name: "OUTPUT" }', 10, [5]),
    ],
)
def test_sizes_that_vary(server: Server, model: str, header: str, body: int, dims: list[int]) -> None:
    found = infer(server, model, header, bytes(body))
    assert found.status.code == pb.SUCCESS, found.status.msg
    assert list(found.header.output[0].raw.dims) == dims


@pytest.mark.parametrize("path", ["fake/echo", "fake/echo/1", "fake%2Fecho", "echo", "echo/1"])
def test_a_catalog_model_is_asked_by_its_full_name_for_texts_of_one_element(
    server: Server, path: str
) -> None:
    config = server.get("/api/status/fake/echo?format=json").json()["modelStatus"]["fake/echo"]["config"]
    assert config["input"][0]["dims"] == ["1"]
    text = strings(b"hello")
    header = f'batch_size: 1 input {{ name: "text" dims: 1 batch_byte_size: {len(text)} }} output {{ name: "dense" }}'
    found = infer(server, path, header, text)
    assert found.status.code == pb.SUCCESS, found.status.msg
    assert len(found.raw["dense"]) == 4 * int(config["output"][0]["dims"][0])


def test_without_outputs_nothing_is_answered_but_the_header(server: Server) -> None:
    found = infer(server, "add_sub", f"batch_size: 2 {INPUTS}", BODY)
    assert found.answer.status == 200 and found.status.code == pb.SUCCESS
    assert not found.raw and not found.header.output and found.header.model_name == "add_sub"


@pytest.mark.parametrize(("version", "added"), [("", 3), ("/3", 3), ("/1", 1)])
def test_versions(server: Server, version: str, added: int) -> None:
    sent = np.arange(4, dtype="<i4")
    found = infer(
        server,
        f"versions_specific{version}",
        'batch_size: 1 input { name: "INPUT" } output { name: "OUTPUT" }',
        sent.tobytes(),
    )
    assert (found.array("OUTPUT", "<i4")[0] == sent + added).all() and found.header.model_version == added


CHECKS = [
    ("add_sub", GOOD.replace("dims: 16 }", "dims: -16 }", 1), BODY, "unexpected shape for input 'INPUT0'"),
    ("variable", 'batch_size: 1 input { name: "INPUT" dims: [4611686018427387904, 4] }', b"", "2^59"),
    ("add_sub", None, BODY, "header NV-InferRequest is missing"),
    ("add_sub", "batch_size: 2 nonsense: 1", BODY, "header NV-InferRequest cannot be read at 1:"),
    ("add_sub", "byte_size: 4", BODY, "header NV-InferRequest cannot be read at 1:"),
]


@pytest.mark.parametrize(("path", "header", "body", "message"), CHECKS)
def test_what_no_table_lists_is_an_invalid_argument_too(
    server: Server, path: str, header: str | None, body: bytes, message: str
) -> None:
    found = infer(server, path, header, body)
    assert found.answer.status == 400 and found.answer.body == b""
    assert found.status.code == pb.INVALID_ARG and message in found.status.msg
    assert found.status.server_id == "inference:0"
    assert found.header.id == (7 if header and "id: 7" in header else 0)


def test_a_failing_model_is_internal_and_its_words_stay_inside(server: Server) -> None:
    header = 'batch_size: 1 input { name: "INPUT" } output { name: "OUTPUT" } id: 3'
    found = infer(server, "raising", header, np.array([-1], "<f4").tobytes())
    assert found.answer.status == 400 and found.status.code == pb.INTERNAL and found.header.id == 3
    assert "Traceback" not in found.status.msg and "raise" not in found.status.msg.lower()


def test_numbers_rise_by_one_over_all_frontends_and_kinds(server: Server) -> None:
    def number(path: str) -> int:
        return status_of(server.get(path)).request_id

    first = number("/api/health/live")
    assert [number("/api/status/add_sub"), number("/api/health/ready"), number("/api/status")] == [
        first + 1,
        first + 2,
        first + 3,
    ]
    assert infer(server, "add_sub", GOOD, BODY).status.request_id == first + 4
    assert infer(server, "nobody", GOOD, BODY).status.request_id == 0
    assert infer(server, "add_sub", GOOD.replace("OUTPUT1", "NONE"), BODY).status.request_id == first + 5
    assert number("/api/health/live") == first + 6


@pytest.mark.parametrize("path", ["/api/health/live", "/api/health/ready"])
def test_health_is_the_http_status(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 200 and answer.body == b"" and status_of(answer).code == pb.SUCCESS


@pytest.mark.parametrize("path", ["/api/health", "/api/health/well"])
def test_an_unknown_health_mode_is_named(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 400 and status_of(answer).code == pb.UNKNOWN
    assert "unknown health mode" in status_of(answer).msg


def test_status_as_text_wire_format_and_json_is_the_same(server: Server) -> None:
    text = text_format.Parse(server.get("/api/status/add_sub").body.decode(), pb.ServerStatus())
    wire = pb.ServerStatus.FromString(server.get("/api/status/add_sub?format=binary").body)
    shown = server.request("GET", "/api/status/add_sub", headers={"Accept": "application/json"}).json()
    for found in (text, wire):
        assert found.id == "inference:0" and found.ready_state == pb.SERVER_READY and found.uptime_ns > 0
        config = found.model_status["add_sub"].config
        assert config.name == "add_sub" and config.max_batch_size == 8
        assert [(i.name, i.data_type, list(i.dims)) for i in config.input] == [
            ("INPUT0", pb.TYPE_INT32, [16]),
            ("INPUT1", pb.TYPE_INT32, [16]),
        ]
        assert config.HasField("dynamic_batching")
        assert found.model_status["add_sub"].version_status[1].ready_state == pb.MODEL_READY
    assert shown["modelStatus"]["add_sub"]["config"]["maxBatchSize"] == 8
    assert (
        server.get("/api/status/add_sub?format=json").json()["modelStatus"]["add_sub"]
        == shown["modelStatus"]["add_sub"]
    )
    assert not text.model_status["add_sub"].config.HasField("sequence_batching")


def test_status_shows_all_chosen_versions_before_any_inference(server: Server) -> None:
    found = pb.ServerStatus.FromString(server.get("/api/status?format=binary").body)
    assert set(MODELS) <= set(found.model_status)
    versions = set(found.model_status["versions_specific"].version_status)
    assert versions - {-1} == {1, 3}, "what was asked for and is not served is booked under -1"
    picture = found.model_status["classifier"].config
    assert picture.input[0].format == pb.ModelInput.FORMAT_NCHW and picture.output[0].label_filename


def test_status_of_an_unknown_model(server: Server) -> None:
    answer = server.get("/api/status/nobody")
    assert answer.status == 400 and answer.body == b""
    assert status_of(answer).code == pb.INVALID_ARG
    assert status_of(answer).msg.startswith("no status available for unknown model")


def test_statistics_are_those_of_the_whole_server(server: Server) -> None:
    def stats() -> pb.ModelVersionStatus:
        found = pb.ServerStatus.FromString(server.get("/api/status/add_sub?format=binary").body)
        return found.model_status["add_sub"].version_status[1]

    before = stats()
    for _ in range(5):
        assert infer(server, "add_sub", GOOD, BODY).status.code == pb.SUCCESS
    after = stats()
    assert after.infer_stats[2].success.count - before.infer_stats[2].success.count == 5
    assert after.infer_stats[2].success.total_time_ns > before.infer_stats[2].success.total_time_ns
    assert after.model_inference_count - before.model_inference_count == 10
    runs = after.model_execution_count - before.model_execution_count
    # A gateway does not see runs: a worker may run requests of several gateways together.
    assert runs == 0 if is_gateway(server) else 1 <= runs <= 5
    assert after.last_inference_timestamp_milliseconds > 1_600_000_000_000


def test_profiling_is_refused(server: Server) -> None:
    answer = server.get("/api/profile?cmd=start")
    assert answer.status == 400 and status_of(answer).code == pb.UNSUPPORTED


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/api/health/live", 405),
        ("GET", "/api/infer/add_sub", 405),
        ("DELETE", "/api/status", 405),
        ("GET", "/api/health/live/now", 400),
        ("GET", "/api/profile/", 400),
    ],
)
def test_wrong_verbs_and_unknown_paths_have_no_status(
    server: Server, method: str, path: str, status: int
) -> None:
    answer = server.request(method, path)
    assert answer.status == status and answer.body == b"" and "nv-status" not in answer.headers


def test_hostile_headers_and_bodies_leave_the_server_well(server: Server) -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        noise = bytes(rng.integers(33, 127, rng.integers(1, 200), dtype=np.uint8)).decode()
        cut = GOOD[: rng.integers(0, len(GOOD))] + noise
        found = infer(server, "add_sub", cut, rng.bytes(int(rng.integers(0, 300))))
        assert found.answer.status in (200, 400)
    assert infer(server, "add_sub", GOOD, BODY).status.code == pb.SUCCESS


@pytest.mark.parametrize("model", ["add_sub", "add_sub_unbatched", "variable", "classifier"])
def test_the_layout_that_the_command_prints_is_accepted_by_both_protocols(
    server: Server, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", model, "--url", server.url]) == 0
    printed = capsys.readouterr().out
    kserve, _, trtis = printed.partition("TRTIS v1")
    header, size = re.search(r"NV-InferRequest: (.*)", trtis), re.search(r"Content-Length: (\d+)", trtis)
    assert header and size
    found = infer(server, model, header[1], bytes(int(size[1])))
    assert found.status.code == pb.SUCCESS, found.status.msg
    head, length = (
        re.search(r"^ +({.*})$", kserve, re.MULTILINE),
        re.search(r"Header-Content-Length: (\d+)", kserve),
    )
    assert head and length and int(length[1]) == len(head[1])
    answer = server.request(
        "POST",
        f"/v2/models/{model}/infer",
        head[1].encode() + bytes(int(size[1])),
        {"Inference-Header-Content-Length": length[1]},
    )
    assert answer.status == 200, answer.body


def test_the_layout_of_an_unknown_model_is_an_error(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", "nobody", "--url", server.url]) == 1
    assert "the server answered 404" in capsys.readouterr().err
