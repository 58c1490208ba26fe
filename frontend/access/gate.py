"""Lets a request in or not, by its head alone: the key, its scope, its rate.

| | no key | wrong key | scope missing | rate used up |
|---|---|---|---|---|
| open paths | in | in | in | in |
| admin paths | 401 | 403 | 403 | 429 |
| all others | 401 | 401 | 403 | 429 |

Without a keys file `keyless` decides.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontend.access import credentials, keyfile, keys, rules
from frontend.access.keyless import Keyless
from frontend.access.rates import RateMeter
from ipc.errors import AccessRefused, Forbidden, RateLimited, Unauthenticated
from ipc.settings import Server

SCOPE_KEY = "penstock.access"
_NOBODY_DIGEST = keys.digest("")


@dataclass(frozen=True, slots=True)
class Grant:
    """Who was let in. Without a key all fields are as here; `caller` is the public id of the key."""

    name: str = ""
    caller: str = ""
    share: float = 1.0
    admin: bool = False


ANONYMOUS = Grant()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Who calls, as far as that is known, and why he is refused, if he is."""

    grant: Grant = ANONYMOUS
    refusal: AccessRefused | None = None


class Gate:
    """The keys of a server and the rules for its paths."""

    def __init__(
        self,
        entries: tuple[keyfile.KeyEntry, ...] = (),
        open_metrics: bool = True,
        keyless: Keyless | None = None,
    ) -> None:
        self.entries, self.open_metrics, self._keyless = entries, open_metrics, keyless or Keyless()
        self.meter = RateMeter(len(entries))
        self._by_id = {entry.id: (number, entry) for number, entry in enumerate(entries)}

    @classmethod
    def of(cls, server: Server) -> Gate:
        """The gate that the settings name. Raises `ConfigError` when the keys file is wrong."""
        entries = keyfile.read(Path(server.keys_file)) if server.keys_file else ()
        return cls(entries, server.open_metrics, Keyless.of(server))

    @property
    def closed(self) -> bool:
        """Whether keys are needed at all."""
        return bool(self.entries)

    def check(self, scope: dict[str, Any]) -> Grant:
        """Who calls, for an ASGI scope of HTTP or a WebSocket. Raises an `AccessRefused`. Counts against the rate."""
        return self.check_need(scope, rules.need_of(scope["path"], self.open_metrics))

    def check_need(self, scope: dict[str, Any], need: rules.Need, spend: bool = True) -> Grant:
        """`check` where the path does not tell what is needed; without `spend` nothing is counted."""
        outcome = self._decide(scope, need, spend)
        if outcome.refusal is not None:
            raise outcome.refusal
        return outcome.grant

    def caller(self, scope: dict[str, Any]) -> Grant:
        """Whose key the head carries, whatever its scopes and rate. Raises `Unauthenticated` where keys are needed."""
        if not self.closed:
            return ANONYMOUS
        entry = self._find(credentials.presented(scope))[1]
        return Grant(entry.name, entry.id, entry.share)

    def admit(self, scope: dict[str, Any]) -> bool:
        """Check a scope once and keep the outcome in it for `outcome_of`; returns whether it was let in."""
        need = rules.need_of(scope["path"], self.open_metrics)
        outcome = scope[SCOPE_KEY] = self._decide(scope, need)
        return outcome.refusal is None

    def _decide(self, scope: dict[str, Any], need: rules.Need, spend: bool = True) -> Outcome:
        if not self.closed:
            return Outcome(refusal=self._keyless.refusal(scope, need))
        if not need:
            return Outcome()
        try:
            number, entry = self._find(credentials.presented(scope))
        except Unauthenticated as error:
            wrong = need == "admin" and error.presented
            return Outcome(refusal=Forbidden(error.message) if wrong else error)
        refusal = self._limit(number, entry, need, spend)
        return Outcome(Grant(entry.name, entry.id, entry.share, need == "admin"), refusal)

    def _find(self, key: str) -> tuple[int, keyfile.KeyEntry]:
        if not key:
            raise Unauthenticated("an API key is needed: send the header 'Authorization: Bearer KEY'")
        found = self._by_id.get(keys.id_of(key) or "")
        # NOTE: an unknown id is compared as well, so that the time does not tell which ids exist.
        known = found[1].digest if found else _NOBODY_DIGEST
        if not hmac.compare_digest(keys.digest(key), known) or found is None:
            raise Unauthenticated("the key that was sent is not valid", presented=True)
        return found

    def _limit(self, number: int, entry: keyfile.KeyEntry, need: str, spend: bool) -> AccessRefused | None:
        if need not in entry.scopes:
            return Forbidden(f"this key lacks the scope '{need}'")
        if entry.requests_per_s and spend:
            try:
                self.meter.spend(number, entry.requests_per_s, entry.allowed_burst)
            except RateLimited as error:
                return error
        return None


def outcome_of(scope: dict[str, Any]) -> Outcome:
    """What `Gate.admit` found; a scope that it never saw is refused."""
    return scope.get(SCOPE_KEY) or Outcome(refusal=Unauthenticated("the request was not checked"))
