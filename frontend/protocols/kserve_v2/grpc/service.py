"""The methods of `inference.GRPCInferenceService`: function, needed scope, and name in metrics of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from frontend.access.restricted import Api, Restrictions
from frontend.grpc.call import Answer, Call, Method, Several
from frontend.protocols.kserve_v2.errors import text_of
from frontend.protocols.kserve_v2.grpc import infer as counting
from frontend.protocols.kserve_v2.grpc import management
from frontend.protocols.kserve_v2.grpc.infer import RAW_INPUT, Infer
from frontend.tensors.request import Forwarding
from ipc.errors import PenstockError
from ipc.protos import kserve_v2_pb2 as pb
from ipc.settings import Kserve


class KserveService:
    """The service that this protocol brings to the gRPC server."""

    protocol = "kserve"
    descriptor = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    def __init__(self, kserve: Kserve, restrictions: Restrictions) -> None:
        table = _table(Infer(Forwarding(kserve.forward_headers)))
        self.methods: Mapping[str, Method] = {
            name: _restricted(method, api, restrictions) if kserve.restricted_file else method
            for api, methods in table.items()
            for name, method in methods.items()
        }

    def message_of(self, error: PenstockError) -> str:
        """The words of this protocol for an error."""
        return text_of(error)


def _table(infer: Infer) -> dict[Api, dict[str, Method]]:
    """All methods by the group that they may be restricted with."""
    return {
        "health": {
            "ServerLive": Method(management.server_live, need=""),
            "ServerReady": Method(management.server_ready, need=""),
            "ModelReady": Method(management.model_ready),
        },
        "metadata": {
            "ServerMetadata": Method(management.server_metadata, "metadata"),
            "ModelMetadata": Method(management.model_metadata, "metadata"),
        },
        "inference": {
            "ModelInfer": Method(
                infer.alone,
                "infer",
                raw_field=RAW_INPUT,
                check=counting.refuse_too_many_values,
                repeated=infer.repeated,
            ),
            "ModelStreamInfer": Method(
                infer.streamed,
                "infer",
                raw_field=RAW_INPUT,
                check=counting.refuse_too_many_values,
                failed=infer.failed,
            ),
        },
        "model-config": {"ModelConfig": Method(management.model_config, "config")},
        "statistics": {"ModelStatistics": Method(management.model_statistics, "statistics")},
        "model-repository": {
            "RepositoryIndex": Method(management.repository_index, "index"),
            "RepositoryModelLoad": Method(management.load, "load", "admin"),
            "RepositoryModelUnload": Method(management.unload, "unload", "admin"),
        },
        "shared-memory": {
            "SystemSharedMemoryStatus": Method(partial(management.region_status, "system"), "regions"),
            "SystemSharedMemoryRegister": Method(management.system_register, "regions", "admin"),
            "SystemSharedMemoryUnregister": Method(
                partial(management.unregister, "system"), "regions", "admin"
            ),
            "CudaSharedMemoryStatus": Method(partial(management.region_status, "cuda"), "regions"),
            "CudaSharedMemoryRegister": Method(management.cuda_register, "regions", "admin"),
            "CudaSharedMemoryUnregister": Method(partial(management.unregister, "cuda"), "regions", "admin"),
        },
        "trace": {"TraceSetting": Method(management.trace_setting, "trace", "admin")},
        "logging": {"LogSettings": Method(management.log_settings, "logging", "admin")},
    }


def _restricted(method: Method, api: Api, restrictions: Restrictions) -> Method:
    """`method` behind the secret of its group."""

    async def answer(call: Call, message: Any) -> Answer | Several:
        restrictions.require_secret(api, call.header)
        return await method.answer(call, message)

    return replace(method, answer=answer, repeated=None)
