"""TraceSetting and LogSettings: each changes what is named and answers with the complete state."""

from __future__ import annotations

from frontend.grpc.call import Call
from frontend.protocols.kserve_v2 import describing
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb


async def trace_setting(call: Call, message: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
    """Settings of the server, or of a model. A setting without values goes back to its default."""
    settings = call.services.extensions.trace_settings
    model = describing.traced_model(call.services, message.model_name) if message.model_name else ""
    changes = {name: list(setting.value) or None for name, setting in message.settings.items()}
    if changes:
        plain = {name: _plain(values) for name, values in changes.items()}
        state = await settings.update(plain, call.context.deadline_ns, model)
    else:
        state = settings.get(model)
    answer = pb.TraceSettingResponse()
    for name, value in state.items():
        answer.settings[name].value.extend([value] if isinstance(value, str) else value)
    return answer


def _plain(values: list[str] | None) -> str | list[str] | None:
    return values[0] if values is not None and len(values) == 1 else values


async def log_settings(call: Call, message: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
    """Settings of the log."""
    settings = call.services.extensions.log_settings
    changes = {name: _value_of(name, value) for name, value in message.settings.items()}
    state = await settings.update(changes, call.context.deadline_ns) if changes else settings.get()
    answer = pb.LogSettingsResponse()
    for name, value in state.items():
        setting = answer.settings[name]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int):
            setting.uint32_param = value
        else:
            setting.string_param = value
    return answer


def _value_of(name: str, value: pb.LogSettingsRequest.SettingValue) -> bool | int | str:
    choice = value.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidInput(f"setting {name[:64]!a} has no value")
    found: bool | int | str = getattr(value, choice)
    return found
