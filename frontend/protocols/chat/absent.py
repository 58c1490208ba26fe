"""Routes of the contract that this server does not have: each says so, with what is missing."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.generation.errors import InvalidField
from ipc.errors import Unsupported

CATEGORIES = {"/v1/images/generations": "pictures", "/v1/audio/speech": "speech"}
"""Routes of other categories of models, and what such models give."""
NOT_BUILT = {
    "/v1/models/tune": "tuning by request",
    "/re_isq": "quantizing a loaded model again",
    "/calibration/start": "calibration",
    "/calibration/status": "calibration",
    "/calibration/apply": "calibration",
    "/v1/load_lora_adapter": "loading LoRA adapters by name",
    "/v1/unload_lora_adapter": "unloading LoRA adapters by name",
    "/v1/lora_adapters": "LoRA adapters of generating models",
}


class OtherCategory:
    """A route for models of another category than text."""

    def __init__(self, product: str) -> None:
        self._product = product

    async def on_post(self, req: Request, resp: Response) -> None:
        """422, whatever the body says."""
        raise InvalidField(
            "model",
            f"the request is incompatible with the category of the model, no model here gives {self._product}",
        )


class NotBuilt:
    """A route of a feature that is not built."""

    def __init__(self, feature: str) -> None:
        self._feature = feature

    async def on_post(self, req: Request, resp: Response) -> None:
        """501, whatever the body says."""
        raise Unsupported(f"{self._feature} is not offered by this server")

    on_get = on_post
