"""Streams of generated text as they stand on the wire: every byte of chat, completions and Messages over a socket."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from tests.fakes.generation_server import RecordedServer

_HEAD = b'"created":0,"model":"tiny/chat","system_fingerprint":"local","choices":'
_USAGE = (
    b'{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6,"avg_tok_per_sec":6.0,"avg_prompt_tok_per_sec":8.0,'
    b'"avg_compl_tok_per_sec":4.0,"total_time_sec":1.0,"total_prompt_time_sec":0.5,"total_completion_time_sec":0.5,'
    b'"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}'
)


def _chat(delta: bytes, reason: bytes = b"null", usage: bytes = b"null") -> bytes:
    return (
        b'data: {"id":"ID","object":"chat.completion.chunk",' + _HEAD + b'[{"index":0,"delta":'
        b'{"role":"assistant","content":%s,"tool_calls":null},"finish_reason":%s,"logprobs":null}],"usage":%s}\n\n'
    ) % (delta, reason, usage)


def _completion(text: bytes, reason: bytes = b"null", usage: bytes = b"null") -> bytes:
    return (
        b'data: {"id":"ID","object":"text_completion",' + _HEAD + b'[{"index":0,"text":%s,'
        b'"finish_reason":%s,"logprobs":null}],"usage":%s}\n\n'
    ) % (text, reason, usage)


def _message(name: bytes, rest: bytes) -> bytes:
    return b'event: %s\ndata: {"type":"%s"%s}\n\n' % (name, name, rest)


_DONE = b"data: [DONE]\n\n"
_STREAMS = {
    "/v1/chat/completions": _chat(b'"Hello"') + _chat(b'" you"') + _chat(b'""', b'"stop"', _USAGE) + _DONE,
    "/v1/completions": _completion(b'"Hello"')
    + _completion(b'" you"')
    + _completion(b'""', b'"stop"', _USAGE)
    + _DONE,
    "/v1/messages": b"".join(
        (
            _message(
                b"message_start",
                b',"message":{"id":"ID","type":"message","role":"assistant","content":[],"model":"tiny/chat",'
                b'"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":4,"output_tokens":0}}',
            ),
            _message(b"content_block_start", b',"index":0,"content_block":{"type":"text","text":""}'),
            _message(b"content_block_delta", b',"index":0,"delta":{"type":"text_delta","text":"Hello"}'),
            _message(b"content_block_delta", b',"index":0,"delta":{"type":"text_delta","text":" you"}'),
            _message(b"content_block_stop", b',"index":0'),
            _message(
                b"message_delta",
                b',"delta":{"stop_reason":"end_turn","stop_sequence":null},'
                b'"usage":{"input_tokens":4,"output_tokens":2}',
            ),
            _message(b"message_stop", b""),
        )
    ),
}
_BODIES = {
    "/v1/chat/completions": b'{"messages": "hi", "stream": true}',
    "/v1/completions": b'{"prompt": "hi", "stream": true}',
    "/v1/messages": b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}',
}


def _exchanged(url: str, path: str) -> tuple[bytes, bytes]:
    """(head, body without the marks of its chunks) of a raw exchange."""
    host, port = url.removeprefix("http://").split(":")
    body = _BODIES[path]
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
            b"Connection: close\r\n\r\n%s" % (path.encode(), host.encode(), len(body), body)
        )
        received = b""
        while piece := connection.recv(65536):
            received += piece
    head, _, rest = received.partition(b"\r\n\r\n")
    told = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        told, rest = told + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return head, told


def test_a_stream_is_the_same_on_the_wire_byte_by_byte(tmp_path: Path) -> None:
    server = RecordedServer(tmp_path)
    with server.listening() as url:
        found = {path: _exchanged(url, path) for path in _STREAMS}
    for path, (head, told) in found.items():
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"content-type: text/event-stream" in head.lower()
        assert b"x-accel-buffering: no" in head.lower(), "nginx would collect the events"
        told = re.sub(rb'"id":"(chatcmpl-|cmpl-|msg_)[0-9a-f]{32}"', b'"id":"ID"', told)
        assert re.sub(rb'"created":\d+', b'"created":0', told) == _STREAMS[path]
