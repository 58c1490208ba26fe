"""The header by which clients ask for a kind of machine: checked only where the operator says what this one is."""

from __future__ import annotations

from falcon.asgi import Request

from ipc.errors import InvalidInput

HEADER = "X-SIE-MACHINE-PROFILE"
_SHOWN = 64


def check_machine_profile(req: Request, own: str) -> None:
    """Raise `InvalidInput` when the request asks for another profile than `own`; "" takes all."""
    asked = req.get_header(HEADER)
    if not own or asked is None or asked.strip().lower() == own.lower():
        return
    raise InvalidInput(
        f"{HEADER}: {asked[:_SHOWN]!r} was asked for, this server is {own!r} (server.machine_profile)",
        requested_profile=asked[:_SHOWN],
        worker_identity=own,
    )
