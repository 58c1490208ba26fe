"""Which messages go from a frontend to a worker, and which from a worker to a frontend."""

from __future__ import annotations

from ipc.wire.messages import (
    Cancel,
    Credits,
    Failure,
    Goodbye,
    Hello,
    Inputs,
    Leaving,
    Load,
    Models,
    Ping,
    Pong,
    Release,
    Result,
    Submit,
    Unload,
    Unread,
    Watch,
    Welcome,
)
from ipc.wire.stats import Stats
from ipc.wire.streams import Part, Taken

ToWorker = Hello | Submit | Cancel | Release | Taken | Load | Unload | Ping | Watch | Inputs | Goodbye
ToFrontend = Welcome | Result | Part | Failure | Unread | Credits | Models | Stats | Leaving | Pong | Goodbye
