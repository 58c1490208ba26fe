"""Header fields of a request that models get as parameters, by `kserve.forward_headers`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from frontend.tensors.request import TensorRequest
from ipc.errors import ConfigError

_SECRETS = frozenset(("authorization", "cookie", "proxy-authorization", "x-api-key"))


class Forwarding:
    """Which fields are forwarded: those whose lower-case name matches the whole pattern; none for ""."""

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern) if pattern else None
        except re.error as error:
            raise ConfigError(f"kserve.forward_headers: not a regular expression: {error}") from None

    @property
    def active(self) -> bool:
        """Whether any field may be forwarded."""
        return self._pattern is not None

    def apply(self, headers: Mapping[str, str | bytes], request: TensorRequest) -> None:
        """Add them to the parameters of a request; what the request itself says wins, and credentials stay here.

        `headers` are by lower-case name; binary ones, which only gRPC has, are not forwarded.
        """
        if self._pattern is None:
            return
        for name, value in headers.items():
            if isinstance(value, str) and name not in _SECRETS and self._pattern.fullmatch(name):
                request.parameters.setdefault(name, value)
