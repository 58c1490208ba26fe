"""The protobuf modules: made from the .proto files beside them, with the field numbers of the public interfaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor

from ipc.protos import kserve_v2_pb2, model_config_pb2, trtis_v1_pb2
from tests.unit.ipc.protos import trtis_fields
from tools import protos

DUMP = """
import json
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tritonclient.grpc import model_config_pb2, service_pb2
for module in (model_config_pb2, service_pb2):
    print(json.dumps(list(module.DESCRIPTOR.serialized_pb)))
"""


def test_modules_are_what_the_proto_files_make(tmp_path: Path) -> None:
    protos.generate(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2.py*"))
    assert len(made) == 2 * len(protos.sources()) > 0
    for path in made:
        assert (tmp_path / path).read_bytes() == (protos.ROOT / path).read_bytes(), f"run make protos: {path}"


def test_no_module_is_left_of_a_proto_file_that_is_gone() -> None:
    kept = {path.name.partition("_pb2")[0] for path in (protos.ROOT / protos.PROTOS).glob("*_pb2.py*")}
    assert kept == {Path(source).stem for source in protos.sources()}


def shape_of(file: Any) -> dict[str, Any]:
    """Everything of a file descriptor's message that matters on the wire, by full name."""
    found: dict[str, Any] = {}

    def note(scope: str, messages: Any, enums: Any) -> None:
        for enum in enums:
            found[f"{scope}.{enum.name}"] = {value.name: value.number for value in enum.value}
        for message in messages:
            name = f"{scope}.{message.name}"
            found[name] = {
                field.name: (field.number, field.label, field.type, field.type_name)
                for field in message.field
            }
            note(name, message.nested_type, message.enum_type)

    note(file.package, file.message_type, file.enum_type)
    for service in file.service:
        found[f"{file.package}.{service.name}"] = {
            method.name: (
                method.input_type,
                method.output_type,
                method.client_streaming,
                method.server_streaming,
            )
            for method in service.method
        }
    return found


@pytest.fixture(scope="module")
def triton() -> dict[str, Any]:
    """The schema of the public client, whose modules cannot be imported beside ours."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    result = subprocess.run(
        [sys.executable, "-c", DUMP], capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, Any] = {}
    for line in result.stdout.splitlines():
        found |= shape_of(FileDescriptorProto.FromString(bytes(json.loads(line))))
    return found


def ours(*files: FileDescriptor) -> dict[str, Any]:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    found: dict[str, Any] = {}
    for file in files:
        found |= shape_of(FileDescriptorProto.FromString(file.serialized_pb))
    return found


def test_kserve_messages_are_those_of_the_public_client(triton: dict[str, Any]) -> None:
    mine = ours(model_config_pb2.DESCRIPTOR, kserve_v2_pb2.DESCRIPTOR)
    assert len(mine) > 100
    assert mine == triton


def fields_of(message: Descriptor, prefix: str = "") -> Iterator[tuple[str, dict[str, int]]]:
    name = f"{prefix}{message.name}"
    yield name, {field.name: field.number for field in message.fields}
    for nested in message.nested_types:
        if not nested.GetOptions().map_entry:
            yield from fields_of(nested, f"{name}.")


def test_trtis_fields_have_the_numbers_of_the_specification() -> None:
    found = dict(
        entry
        for message in trtis_v1_pb2.DESCRIPTOR.message_types_by_name.values()
        for entry in fields_of(message)
    )
    for name, fields in trtis_fields.MESSAGES.items():
        assert found[name] == fields, name


@pytest.mark.parametrize("name", trtis_fields.ENUMS)
def test_trtis_enums_have_the_values_of_the_specification(name: str) -> None:
    scope: Any = trtis_v1_pb2
    for part in name.split("."):
        scope = getattr(scope, part)
    assert dict(scope.items()) == trtis_fields.ENUMS[name]


def test_trtis_service_has_the_rpcs_of_the_specification() -> None:
    service = trtis_v1_pb2.DESCRIPTOR.services_by_name["GRPCService"]
    assert service.full_name == "nvidia.inferenceserver.GRPCService"
    streams = {
        method.name for method in service.methods if method.client_streaming and method.server_streaming
    }
    assert streams == {"StreamInfer"}
    assert {method.name for method in service.methods} - streams == set(trtis_fields.RPCS)
    for method in service.methods:
        stem = "Infer" if method.name == "StreamInfer" else method.name
        assert (method.input_type.name, method.output_type.name) == (f"{stem}Request", f"{stem}Response")
