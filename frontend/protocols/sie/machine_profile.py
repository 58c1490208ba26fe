"""The header by which clients ask for a kind of machine.

1. `server.machine_profile` names this machine; requests for other machines are refused.
2. If `server.machine_profile` is empty, the header is ignored, unless `server.machine_profile_strict` is set. Then the
   header must name `server.gpu_type`, or, if this is empty, the type of the workers' GPUs. If no type is known, every
   request with the header is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from falcon.asgi import Request

from frontend.services import Services
from ipc.errors import InvalidInput, NoReplica
from ipc.machine import CPU, UNKNOWN, gpu_type
from ipc.settings import Server

HEADER = "X-SIE-MACHINE-PROFILE"
_SHOWN = 64


def check_machine_profile(req: Request, services: Services) -> None:
    """Raise `InvalidInput` when the request asks for another machine than this one.

    Raises `NoReplica` if the answer depends on the workers' devices and no worker has reported a device yet.
    """
    server = services.settings.server
    if not (server.machine_profile or server.machine_profile_strict):
        return
    asked = req.get_header(HEADER)
    if asked is None:
        return
    own = profiles_of(server, [worker.device for worker in services.directory.workers()])
    if asked.strip().lower() in (profile.lower() for profile in own):
        return
    known = " or ".join(repr(profile) for profile in own)
    raise InvalidInput(
        f"{HEADER}: {asked[:_SHOWN]!r} was asked for, "
        + (f"this server is {known}" if own else "this server does not know what it is")
        + (" (server.machine_profile)" if server.machine_profile else " (server.machine_profile_strict)"),
        requested_profile=asked[:_SHOWN],
        worker_identity=own[0] if own else UNKNOWN,
    )


def profiles_of(server: Server, devices: Sequence[str]) -> list[str]:
    """The profiles of this server, by its settings or by the names of its workers' devices ("": unknown yet)."""
    named = server.machine_profile or server.gpu_type
    if named:
        return [named]
    if not any(devices):
        raise NoReplica("no worker has told its device yet", retry_after_s=1)
    types = dict.fromkeys(gpu_type(device) for device in devices if device)
    return [found for found in types if found not in (CPU, UNKNOWN)]
