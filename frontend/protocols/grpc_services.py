"""The services of the gRPC server, apart from the protocols of HTTP, since they import gRPC."""

from __future__ import annotations

from frontend.grpc.call import GrpcService
from frontend.protocols.kserve_v2.grpc.service import KserveService
from frontend.protocols.trtis_v1.grpc import TrtisService
from frontend.services import Services


def grpc_services(services: Services) -> list[GrpcService]:
    """All services. To be called in frontends only."""
    return [KserveService(services.settings.kserve, services.restrictions), TrtisService(services)]
