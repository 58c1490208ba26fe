"""ModelStatistics: what requests took, over all processes of the server."""

from __future__ import annotations

from frontend.grpc.call import Call
from frontend.protocols.kserve_v2 import describing
from frontend.protocols.kserve_v2.grpc.reading import version_of
from frontend.tensors.statistics import Duration, ModelStatistics
from ipc.protos import kserve_v2_pb2 as pb

_PHASES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_RUN_PHASES = ("compute_input", "compute_infer", "compute_output")


async def model_statistics(call: Call, message: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
    """Those of one version, of all versions of a model, or of all models."""
    call.context.model = message.name
    found = await describing.statistics(call.services, message.name, version_of(message.version))
    return pb.ModelStatisticsResponse(
        model_stats=[_message(name, state.version, counted) for name, state, counted in found]
    )


def _message(name: str, version: int, counted: ModelStatistics) -> pb.ModelStatistics:
    message = pb.ModelStatistics(
        name=name,
        version=str(version),
        last_inference=counted.last_inference_ms,
        inference_count=counted.inference_count,
        execution_count=counted.execution_count,
        inference_stats=pb.InferStatistics(
            **{phase: _duration(getattr(counted.requests, phase)) for phase in _PHASES},
            cache_hit=pb.StatisticDuration(),
            cache_miss=pb.StatisticDuration(),
        ),
    )
    for size, runs in sorted(counted.by_run_size.items()):
        phases = {phase: _duration(getattr(runs, phase)) for phase in _RUN_PHASES}
        message.batch_stats.add(batch_size=size, **phases)
    return message


def _duration(duration: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)
