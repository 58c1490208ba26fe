"""LitServe with its batching API and its ZeroMQ result queue, as its documentation shows them."""

from __future__ import annotations

import sys
from typing import Any

import litserve  # type: ignore[import-not-found]

from benchmarks.peers.minilm import BATCH_SIZE, BATCH_WAIT_MS, answer, encode_together, load_encoder, texts_of


class Embedding(litserve.LitAPI):  # type: ignore[misc]
    """Encodes one batch of requests in one call."""

    def setup(self, device: str) -> None:
        """Load the model in the worker process."""
        self._encode = load_encoder()

    # NOTE: LitServe makes an annotation of `request` into a query parameter; without one it hands over the JSON body.
    def decode_request(self, request) -> list[str]:  # type: ignore[no-untyped-def]
        """Texts of one request."""
        return texts_of(request)

    def batch(self, inputs: list[list[str]]) -> list[list[str]]:
        """A batch is the list of its requests."""
        return inputs

    def predict(self, x: list[list[str]]) -> list[Any]:
        """One array per request."""
        return encode_together(self._encode, x)

    def unbatch(self, output: list[Any]) -> list[Any]:
        """The results are already one per request."""
        return output

    def encode_response(self, output: Any) -> dict[str, Any]:
        """The answer to one request."""
        return answer(output)


def main() -> None:
    """Serve on 127.0.0.1 at the port given on the command line."""
    api = Embedding(max_batch_size=BATCH_SIZE, batch_timeout=BATCH_WAIT_MS / 1e3, api_path="/predict")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=120, fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
