"""The tokens of a text, as a worker tells them: msgpack of one struct for each text."""

from __future__ import annotations

import msgspec


class TextTokens(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The tokens of a text in columns.

    ids      numbers of the vocabulary
    strings  the tokens as the vocabulary writes them
    starts   place of each token in the text, in characters
    ends     the same, exclusive
    special  whether a token was added around the text
    """

    ids: list[int]
    strings: list[str]
    starts: list[int]
    ends: list[int]
    special: list[bool]


_decoder = msgspec.msgpack.Decoder(TextTokens)


def pack(found: TextTokens) -> bytes:
    """msgpack bytes of the tokens of one text."""
    return msgspec.msgpack.encode(found)


def unpack(data: bytes | memoryview) -> TextTokens:
    """What `pack` wrote. Raises `msgspec.DecodeError` when the data is something else."""
    return _decoder.decode(data)
