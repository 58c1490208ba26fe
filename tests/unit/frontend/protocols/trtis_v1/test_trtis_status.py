"""What the status of TRTIS v1 says: text for release 1.4, versions that are gone, what readiness counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from falcon.asgi import Response
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from frontend.protocols.trtis_v1 import management as server_status_module
from frontend.protocols.trtis_v1.management import is_ready, server_status
from frontend.protocols.trtis_v1.routes import set_message, status_resource
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.records.statistics import Duration, ModelStatistics, RequestStatistics, ServerStatistics
from frontend.services import Services
from ipc.catalog.entries import Catalog, DirectorySource
from ipc.catalog.ids import split_id
from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput
from ipc.processes.paths import prepare_run_dir
from ipc.protos import trtis_v1_pb2 as pb
from ipc.wire.messages import ModelStatus
from tests.fakes.tensors import entry, loaded, services_of
from tests.unit.frontend.protocols.kserve_v2.test_kserve_infer import request
from tests.unit.frontend.protocols.trtis_v1.test_trtis_messages import ALL, filled
from workers.repository.entries import RepositoryEntry

LATER = {
    "ServerStatus": "model_control_stats shm_control_stats repository_stats",
    "ModelVersionStatus": "ready_state_reason last_inference_timestamp_milliseconds",
    "ModelConfig": "model_warmup",
    "ModelInstanceGroup": "profile",
    "ModelInput": "is_shape_tensor allow_ragged_batch",
    "ModelOutput": "is_shape_tensor",
    "ModelDynamicBatching": "preserve_ordering",
    "ModelSequenceBatching": "direct oldest",
    "Control": "data_type",
}
"""Fields that the specification marks as younger than release 1.4."""
LATER_VALUES = ("KIND_MODEL", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_CORRID")
ANSWERED = ModelStatistics(
    inference_count=3,
    execution_count=2,
    requests=RequestStatistics(success=Duration(3, 9)),
    by_request_size={1: RequestStatistics(success=Duration(3, 9))},
)


def release_1_4(without: str = "") -> Any:
    """The class of ServerStatus in the schema of release 1.4, perhaps without one of its fields."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    del file.service[:]

    def cut(messages: Any) -> None:
        for message in messages:
            later = [*LATER.get(message.name, "").split(), without]
            for field in [field for field in message.field if field.name in later]:
                message.field.remove(field)
            if message.name == "ModelSequenceBatching":
                del message.oneof_decl[:]
            for enum in message.enum_type:
                for value in [value for value in enum.value if value.name in LATER_VALUES]:
                    enum.value.remove(value)
            cut(message.nested_type)

    cut(file.message_type)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("nvidia.inferenceserver.ServerStatus"))


def text_of(status: pb.ServerStatus) -> str:
    """The body of a status in text."""
    response = Response()
    set_message(request(b""), response, status)
    assert response.data is not None
    return response.data.decode("ascii")


@pytest.mark.parametrize("choice", range(4))
def test_text_of_a_status_with_every_field_is_read_by_the_schema_of_release_1_4(choice: int) -> None:
    full = filled(ALL["ServerStatus"], choice)
    with pytest.raises(text_format.ParseError):
        text_format.Parse(text_format.MessageToString(full), release_1_4()())
    old = text_format.Parse(text_of(full), release_1_4()())
    [name, other] = sorted(full.model_status)
    assert set(old.model_status) == {name, other} and old.profile_stats.success.count
    config = old.model_status[name].config
    assert (config.name, len(config.input)) == (full.model_status[name].config.name, 2)
    assert config.WhichOneof("scheduling_choice") == full.model_status[name].config.WhichOneof(
        "scheduling_choice"
    )
    assert full == filled(ALL["ServerStatus"], choice), "what is shown otherwise is left as it was"


def test_counts_of_zero_are_left_out_for_releases_that_lack_their_family() -> None:
    status = pb.ServerStatus(id="s")
    status.status_stats.success.count = 1
    status.profile_stats.success.SetInParent()
    status.model_status["m"].config.version_policy.all.SetInParent()
    status.model_status["m"].config.dynamic_batching.SetInParent()
    later = text_format.Parse(text_of(status), release_1_4(without="profile_stats")())
    assert later.status_stats.success.count == 1
    config = later.model_status["m"].config
    assert config.version_policy.WhichOneof("policy_choice") == "all" and config.HasField("dynamic_batching")


def repository_entry(name: str, **more: Any) -> RepositoryEntry:
    """One version of a repository model whose files nobody reads."""
    model, version = split_id(name)
    return RepositoryEntry(
        id=name,
        source=DirectorySource("nowhere"),
        model=model,
        version=version,
        config=ModelConfig(model),
        directory="nowhere",
        **more,
    )


def counted(services: Services, **models: ModelStatistics) -> Services:
    """The same with these figures, by `<model>_<version>`."""

    async def read() -> ServerStatistics:
        found = {(name[:-2], int(name[-1])): figures for name, figures in models.items()}
        return ServerStatistics(found)

    services.extensions.statistics = SimpleNamespace(read=read)  # type: ignore[assignment]
    return services


def shown(services: Services, model: str = "") -> dict[str, dict[int, tuple[str, int]]]:
    """State and count of every version that the status shows."""
    found = asyncio.run(server_status(services, "server", model)).model_status
    return {
        name: {
            number: (pb.ModelReadyState.Name(one.ready_state), one.model_inference_count)
            for number, one in status.version_status.items()
        }
        for name, status in found.items()
    }


def test_versions_and_models_that_were_removed_stay_with_their_counts(tmp_path: Path) -> None:
    made = services_of(tmp_path, [repository_entry("m@2")], [loaded("m@2", ModelConfig("m"))])
    counted(made, m_1=ANSWERED, m_2=ANSWERED, gone_7=ANSWERED)
    made.directory.removed.update({("m", 3), ("never", 1)})
    unavailable = "MODEL_UNAVAILABLE"
    assert shown(made) == {
        "m": {1: (unavailable, 3), 2: ("MODEL_READY", 3), 3: (unavailable, 0)},
        "gone": {7: (unavailable, 3)},
        "never": {1: (unavailable, 0)},
    }
    assert shown(made, "gone") == {"gone": {7: (unavailable, 3)}}
    with pytest.raises(InvalidInput, match="no status available for unknown model 'nobody'"):
        shown(made, "nobody")


def test_a_version_that_never_was_is_not_shown(tmp_path: Path) -> None:
    refused = ModelStatistics(by_request_size={0: RequestStatistics(fail=Duration(1, 1))})
    broken = repository_entry("m@", error="there is no version")
    made = counted(
        services_of(tmp_path, [broken], [ModelStatus("m@", "failed", error_message="x")]), m_1=refused
    )
    assert shown(made) == {"m": {}} == shown(made, "m")
    assert not is_ready(made)


def test_a_status_of_many_models_lets_others_have_turns_and_forgets_what_goes_meanwhile(
    tmp_path: Path,
) -> None:
    names = [f"m{number:03}@1" for number in range(server_status_module.MODELS_AT_ONCE * 3)]
    made = services_of(tmp_path, [repository_entry(name) for name in names], [loaded(name) for name in names])
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            if turns == 2:
                made.catalog.replace(Catalog([repository_entry(name) for name in names[:-1]]))
            await asyncio.sleep(0)

    async def ask() -> pb.ServerStatus:
        waiting = asyncio.create_task(others())
        await asyncio.sleep(0)
        found = await server_status(counted(made), "server")
        waiting.cancel()
        return found

    found = asyncio.run(ask())
    assert turns >= 3 and sorted(found.model_status) == [name[:-2] for name in names[:-1]]


EXPLICIT = {"repository__control": "explicit"}


@pytest.mark.parametrize(
    ("preload", "mark", "state", "settings", "ready"),
    [
        (False, None, "available", EXPLICIT, True),
        (False, False, "available", EXPLICIT, True),
        (True, False, "available", EXPLICIT, True),
        (False, None, "failed", EXPLICIT, True),
        (False, True, "failed", EXPLICIT, False),
        (False, True, "loading", EXPLICIT, False),
        (True, None, "failed", EXPLICIT, False),
        (False, None, "failed", {}, False),
        (False, True, "loaded", EXPLICIT, True),
    ],
)
def test_readiness_counts_what_was_asked_to_be_loaded(
    tmp_path: Path, preload: bool, mark: bool | None, state: Any, settings: dict[str, str], ready: bool
) -> None:
    status = ModelStatus("m@1", state, config=ModelConfig("m"))
    made = services_of(tmp_path, [repository_entry("m@1", preload=preload)], [status], **settings)
    made.extensions.control.wished = lambda model: mark if model == "m" else None  # type: ignore[method-assign]
    assert is_ready(made) is ready


@pytest.mark.parametrize("asked", [{"query": "format=json"}, {"Accept": "application/json"}])
def test_json_has_the_names_of_the_original(tmp_path: Path, asked: dict[str, str]) -> None:
    made = counted(services_of(tmp_path, [entry("org/dense")], [loaded("org/dense", dims={"dense": 4})]))
    prepare_run_dir(made.settings.paths)
    made.extensions.counters.called = lambda kind, ns: None  # type: ignore[method-assign]
    resource, response = status_resource(made, Statuses(made.settings)), Response()
    asyncio.run(resource.on_get(request(b"", **asked), response))
    found = json.loads(response.data or b"")
    assert response.content_type == "application/json"
    config = found["modelStatus"]["org/dense"]["config"]
    assert config["input"][0] == {"name": "text", "dataType": "TYPE_STRING", "dims": ["1"], "reshape": {}}
    assert config["output"][0]["dims"] == ["4"] and "reshape" not in config["output"][0]
