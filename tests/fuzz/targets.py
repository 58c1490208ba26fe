"""Readers of what strangers send, each as a function of one input: it returns, or what it raises is a finding.

An input is bytes. Where a reader takes something beside a body (a header field, a count), that is its first line. Only
the error that a reader documents is let through, and only with a message that every protocol can carry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
from google.protobuf.message import DecodeError, Message

from frontend.grpc.received import Form, split
from frontend.http import image_headers
from frontend.http.threads import at_once
from frontend.protocols.chat import chat, completions
from frontend.protocols.kserve_v2 import conversions, generate, infer, reading
from frontend.protocols.kserve_v2.grpc import infer as counting
from frontend.protocols.kserve_v2.grpc import reading as grpc_reading
from frontend.protocols.kserve_v2.schemas import CONTROL
from frontend.protocols.messages import requests as message_requests
from frontend.protocols.responses import requests as response_requests
from frontend.protocols.sie import schemas
from frontend.protocols.trtis_v1 import requests
from frontend.protocols.trtis_v1.requests import one_line, read_request_header
from frontend.scope import scope_of_ids
from frontend.tensors import checking, control
from frontend.tensors.models import ExpectedInput, TensorModel
from frontend.tensors.request import TensorRequest
from ipc.catalog.model_config import ModelConfig, SequenceBatching
from ipc.errors import BodyTooLarge, InvalidInput, PenstockError, ProtocolError, Unsupported
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES
from ipc.protos import kserve_v2_pb2 as kserve
from ipc.protos import trtis_v1_pb2 as trtis
from ipc.settings import Limits, load
from ipc.wire import codec
from ipc.wire.messages import GenerateCall, InferCall, Submit, TensorOutput, Work
from tests.fakes.tensors import entry, finish, loaded, tensor
from tests.fuzz.answering import sie_answer
from workers.repository import configuration
from workers.repository.layout import ModelRefused

Target = Callable[[bytes], object]
LIMITS = Limits(max_image_pixels=1 << 20)
LOADING = load(None, {"repository.allow_files": "true", "repository.max_upload_bytes": "1000"}, {})
"""Settings of a server to whose loads files may come."""
LONGEST_MESSAGE = 8192
_KSERVE = Form(
    kserve.ModelInferRequest,
    kserve.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,
    counting.refuse_too_many_values,
)
_TRTIS = Form(trtis.InferRequest, trtis.InferRequest.RAW_INPUT_FIELD_NUMBER)
_BODIES = (
    schemas.EncodeRequest,
    schemas.EmbeddingsRequest,
    schemas.ScoreRequest,
    schemas.ExtractRequest,
    schemas.RerankRequest,
)


def _served(config: ModelConfig) -> TensorModel:
    """A loaded model of this configuration."""
    rules = {one.name: ExpectedInput.of(one) for one in config.inputs}
    return TensorModel(
        name=config.name,
        model=config.name,
        version=1,
        id=f"{config.name}@1",
        kind="infer",
        config=config,
        entry=entry(f"{config.name}@1"),
        status=loaded(f"{config.name}@1", config),
        inputs=rules,
        outputs={one.name: one for one in config.outputs},
        input_names=list(rules),
        every_output=[TensorOutput(one.name) for one in config.outputs],
        required=sum(not rule.optional for rule in rules.values()),
    )


def _model(
    name: str, batch: int, inputs: tuple[Any, ...], outputs: tuple[Any, ...], **more: Any
) -> TensorModel:
    return _served(ModelConfig(name=name, max_batch_size=batch, inputs=inputs, outputs=outputs, **more))


def _pair(kind: str, datatype: str) -> tuple[Any, ...]:
    return tuple(tensor(f"{kind}{number}", datatype, 16) for number in range(2))


SERVED = (
    _model("add_sub", 8, _pair("INPUT", "INT32"), _pair("OUTPUT", "INT32")),
    _model("strings", 8, (tensor("INPUT", BYTES, -1),), (tensor("OUTPUT", BYTES, -1),)),
    _model("pictures", 0, (tensor("image", "FP32", -1, 32, 32, 3),), (tensor("scores", "FP32", 10),)),
    _model(
        "mixed",
        4,
        (
            tensor("A", "FP32", 2),
            tensor("B", "UINT8", -1, 3, optional=True),
            tensor("S", BYTES, 1, optional=True),
        ),
        (tensor("scores", "FP16", 3), tensor("T", "BF16", -1)),
        sequence_batching=SequenceBatching(),
    ),
)
"""Models for which requests are checked once they have been read."""


@contextmanager
def _refusing(kind: type[Exception]) -> Iterator[None]:
    """Let the documented error pass, when its message can be sent in JSON, in protobuf and in a header field."""
    try:
        yield
    except kind as error:
        message = error.message if isinstance(error, PenstockError) else str(error)
        assert 0 < len(message) <= LONGEST_MESSAGE, message[:200]
        orjson.dumps(message)
        line = one_line(trtis.RequestStatus(msg=message))
        assert line.isascii() and "\n" not in line


def _first_line(data: bytes) -> tuple[str, bytes]:
    line, _, rest = data.partition(b"\n")
    return line.decode("latin-1"), rest


def _check(model: TensorModel, request: TensorRequest) -> None:
    """What follows reading: the model's checks, a look into strings, the message to a worker."""
    checking.check(model, request)
    for given in request.inputs:
        if given.datatype == BYTES and given.data is not None:
            datatypes.objects(given.data, math.prod(given.shape), "input")
    codec.encode(
        Submit(
            1,
            Work(
                "m@1", InferCall([], [], parameters=request.parameters, priority=request.priority), 1, 1, "r"
            ),
        )
    )


def trtis_request(data: bytes) -> None:
    """NV-InferRequest and a body of raw tensors."""
    line, body = _first_line(data)
    with _refusing(InvalidInput):
        header = read_request_header(line)
        for model in SERVED:
            with _refusing(InvalidInput):
                request = requests.request_of(model, header)
                checking.check_shapes(model, request)
                requests.cut(model, request, requests.sizes_of(model, header, request), memoryview(body))
                assert sum(len(one.data or b"") for one in request.inputs) == len(body)
                _check(model, request)


def kserve_request(data: bytes) -> None:
    """Inference-Header-Content-Length (`-`: none), and JSON with the bytes behind it."""
    line, body = _first_line(data)
    with _refusing(InvalidInput):
        length = reading.header_length(None if line == "-" else line, len(body))
        view = memoryview(body)
        head, tail = (view, None) if length is None else (view[:length], view[length:])
        for model in SERVED:
            with _refusing(InvalidInput):
                if length == 0 and tail is not None:
                    found = reading.parse_raw(model.name, None, model.config, tail)
                else:
                    found = reading.parse(model.name, None, head, tail)
                orjson.dumps([found.id, found.request.parameters])
                conversions.defer(model.config, found.request.inputs, LIMITS)
                _check(model, found.request)
                made = [finish(given) for given in found.request.inputs if given.recipe is not None]
                assert not made or checking.check(model, found.request)


def kserve_generate(data: bytes) -> None:
    """The body of a request for generate."""
    for model in SERVED:
        target: Any = SimpleNamespace(name=model.name, version=None)
        with _refusing(InvalidInput):
            _check(model, generate.parsed_body(target, model.config, data).request)


def kserve_packed(data: bytes) -> None:
    """A content encoding, and a packed body."""
    encoding, body = _first_line(data)
    with _refusing(Unsupported), _refusing(InvalidInput):
        chosen = infer.encoding_of(encoding)
        if chosen:
            assert len(at_once(infer.unpack(body, chosen, 1 << 20, 200))) <= 1 << 20


def bytes_tensor(data: bytes) -> None:
    """A number of elements, and the raw bytes of a BYTES tensor with room for so many lengths."""
    line, body = _first_line(data)
    if not (line.isascii() and line.isdigit() and len(line) < 8 and 4 * int(line) <= len(body)):
        return
    with _refusing(InvalidInput):
        elements: Any = None
        try:
            elements = datatypes.split(body, int(line), "input")
        finally:
            if elements is None:
                _must_refuse(body, int(line))
        assert datatypes.join(elements) == body
        assert list(datatypes.objects(body, int(line), "input")) == elements


def _must_refuse(body: bytes, count: int) -> None:
    try:
        datatypes.objects(body, count, "input")
    except InvalidInput:
        return
    raise AssertionError("read as objects, refused as views")


def grpc_kserve(data: bytes) -> None:
    """A ModelInferRequest in the wire format."""

    def understand(model: TensorModel, message: Any, contents: Any) -> None:
        _check(model, grpc_reading.request_of(message, contents))

    _grpc(_KSERVE, data, understand)


def grpc_trtis(data: bytes) -> None:
    """An InferRequest of TRTIS v1 in the wire format."""

    def understand(model: TensorModel, message: Any, contents: Any) -> None:
        request = requests.request_of(model, message.meta_data)
        checking.check_shapes(model, request)
        requests.attach(model, request, requests.sizes_of(model, message.meta_data, request), contents)
        _check(model, request)

    _grpc(_TRTIS, data, understand)


def _grpc(form: Form, data: bytes, understand: Callable[[TensorModel, Message, Any], None]) -> None:
    with _refusing(InvalidInput):
        received = form.receive(data)
        message = received.message()
        for model in SERVED:
            with _refusing(InvalidInput):
                understand(model, message, received.raw)
    try:
        rest, contents = split(data, form.raw_field, form.messages)
        form.check(rest)
        whole = form.request.FromString(data)
    except (ValueError, DecodeError, InvalidInput):
        return
    assert [bytes(one) for one in contents] == list(getattr(whole, form.raw_name))
    whole.ClearField(form.raw_name)
    assert form.request.FromString(rest).SerializeToString(deterministic=True) == whole.SerializeToString(
        deterministic=True
    )


def config_text(data: bytes) -> None:
    """A config.pbtxt."""
    with _refusing(ModelRefused):
        configuration.convert(configuration.parse_text("config.pbtxt", data), "m")


def config_yaml(data: bytes) -> None:
    """A config.yaml."""
    with _refusing(ModelRefused):
        configuration.convert(configuration.parse_yaml("config.yaml", data), "m")


def config_json(data: bytes) -> None:
    """A configuration that a load brings."""
    with _refusing(ModelRefused):
        configuration.convert(configuration.parse_json("config", data), "m")


def load_request(data: bytes) -> None:
    """The body of a load by name that may bring files."""
    with _refusing(InvalidInput), _refusing(BodyTooLarge):
        brought = control.read_brought(CONTROL.decode(data).parameters, LOADING)
        if brought is None:
            return
        assert brought.nbytes == sum(map(len, brought.files.values())) <= LOADING.repository.max_upload_bytes
        brought.config.encode()
        for path in brought.files:
            assert not path.startswith("/") and ".." not in path.split("/") and path.isprintable()


def ipc_bundle(data: bytes) -> None:
    """The first frame of a bundle."""
    with _refusing(ProtocolError):
        messages = [bytes(text) for text, _ in codec.unpack([data])]
        assert sum(map(len, messages)) < len(data)


def ipc_to_worker(data: bytes) -> None:
    """A message from a frontend."""
    _message(data, codec.decode_to_worker)


def ipc_to_frontend(data: bytes) -> None:
    """A message from a worker."""
    _message(data, codec.decode_to_frontend)


def _message(data: bytes, decode: Callable[[bytes], Any]) -> None:
    with _refusing(ProtocolError):
        message = decode(data)
        written = codec.encode(message)
        assert codec.encode(decode(written)) == written


def image_header(data: bytes) -> None:
    """An image file."""
    with _refusing(InvalidInput):
        image_headers.check_image(data, "items[0].images[0].data", LIMITS)


def sie_json(data: bytes) -> None:
    """A body of the SIE routes in JSON."""
    _body(data, "application/json")


def sie_msgpack(data: bytes) -> None:
    """A body of the SIE routes in msgpack."""
    _body(data, "application/msgpack")


def _body(data: bytes, content_type: str) -> None:
    for kind in _BODIES:
        with _refusing(InvalidInput):
            msgspec.json.encode(schemas.read(data, content_type, kind, LIMITS))


def text_request(data: bytes) -> None:
    """A body of the routes of generated text."""
    for parse in (
        _one_call(chat.parse),
        lambda body, limits: completions.parse(body, limits).calls,
        _one_call(message_requests.parse),
        _one_call(message_requests.parse_count),
        lambda body, limits: [response_requests.parse(body, limits).call_after((), limits)],
    ):
        with _refusing(InvalidInput):
            for call in parse(data, LIMITS):
                codec.encode(Submit(1, Work("m", call, 1, 1, "r")))


def _one_call(parse: Callable[[bytes, Limits], Any]) -> Callable[[bytes, Limits], list[GenerateCall]]:
    return lambda body, limits: [parse(body, limits).call]


def request_headers(data: bytes) -> None:
    """X-Request-ID, traceparent and Accept-Encoding with NUL between them."""
    given = [*data.decode("latin-1").split("\0"), "", "", ""]
    made = scope_of_ids(given[0], given[1], LIMITS)
    assert all(
        text.isascii() and text.isprintable() for text in (made.request_id, made.trace_id, made.parent)
    )
    assert infer.choose(given[2], binary=False) in ("", *infer.OFFERED)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        trtis_request,
        kserve_request,
        kserve_generate,
        kserve_packed,
        bytes_tensor,
        grpc_kserve,
        grpc_trtis,
        config_text,
        config_yaml,
        config_json,
        load_request,
        ipc_bundle,
        ipc_to_worker,
        ipc_to_frontend,
        image_header,
        sie_json,
        sie_msgpack,
        sie_answer,
        text_request,
        request_headers,
    )
}
"""All of them by name, which is that of their directory in the corpus."""
