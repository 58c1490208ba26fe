"""A session: what one client does on one connection, step by step, and its form as text.

door http                the port: http or grpc
send GET / HTTP/1.1\\r\\n  bytes, with escapes
wait                     until something comes, for a moment at most
half                     end the own direction
close, reset             go, politely or not; a session without either stays until the server has no more to say
"""

from __future__ import annotations

from dataclasses import dataclass

DOORS = ("http", "grpc")
VERBS = ("send", "wait", "half", "close", "reset")
Step = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class Session:
    """Which port, and the steps: a verb and, for `send`, bytes."""

    door: str
    steps: tuple[Step, ...]

    @property
    def sent(self) -> bytes:
        """All bytes that are sent."""
        return b"".join(data for _, data in self.steps)

    def dump(self) -> bytes:
        """It as text."""
        lines = [f"door {self.door}"]
        for verb, data in self.steps:
            text = data.decode("latin-1").encode("unicode_escape").decode("ascii")
            lines.append(f"{verb} {text}" if verb == "send" else verb)
        return "".join(f"{line}\n" for line in lines).encode("ascii")


def load(text: bytes) -> Session:
    """A session from its text. Raises `ValueError`."""
    door, steps = "", []
    for line in text.decode("ascii").split("\n"):
        verb, _, rest = line.partition(" ")
        if verb == "door" and rest in DOORS:
            door = rest
        elif verb in VERBS:
            steps.append((verb, rest.encode("ascii").decode("unicode_escape").encode("latin-1")))
        elif line:
            raise ValueError(f"no step of a session: {line[:80]!r}")
    if not door:
        raise ValueError("the door is missing")
    return Session(door, tuple(steps))
