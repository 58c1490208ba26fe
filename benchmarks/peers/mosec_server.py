"""mosec with one worker and dynamic batching, as its documentation shows it."""

from __future__ import annotations

from typing import Any

from mosec import Server, Worker  # type: ignore[import-not-found]

from benchmarks.peers.minilm import BATCH_SIZE, BATCH_WAIT_MS, answer, encode_together, load_encoder, texts_of


class Embedding(Worker):  # type: ignore[misc]
    """Encodes one batch of requests in one call."""

    def __init__(self) -> None:
        self._encode = load_encoder()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer per request."""
        return [
            answer(vectors)
            for vectors in encode_together(self._encode, [texts_of(request) for request in data])
        ]


def main() -> None:
    """Serve on the address that mosec's own command line names."""
    server = Server()
    server.append_worker(Embedding, num=1, max_batch_size=BATCH_SIZE, max_wait_time=BATCH_WAIT_MS)
    server.run()


if __name__ == "__main__":
    main()
