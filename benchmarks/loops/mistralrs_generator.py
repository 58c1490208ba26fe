"""The `mistralrs` package over streams of chat, in the environment `mistralrs` of `benchmarks.peers.environments`.

The chat template of the model gives the text of a prompt as it is, and each letter of a prompt is one token.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import mistralrs  # type: ignore[import-not-found]
from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]

from benchmarks.loops.jobs import Answers, Job, Run, serve


def load() -> Run:
    """The runner of the model that the command line names."""
    _, _, model_dir, precision, *_ = sys.argv
    tokenizer = Tokenizer.from_file(f"{model_dir}/tokenizer.json")
    dtype = {"float32": mistralrs.ModelDType.F32, "bfloat16": mistralrs.ModelDType.BF16}[precision]
    plain = mistralrs.Which.Plain(model_id=model_dir, arch=mistralrs.Architecture.Llama, dtype=dtype)
    runner = mistralrs.Runner(which=plain, no_paged_attn=True, max_seqs=32, prefix_cache_n=0)

    def begin(job: Job) -> Any:
        message = {"role": "user", "content": tokenizer.decode(job[0])}
        return runner.send_chat_completion_request(
            mistralrs.ChatCompletionRequest(
                model="default", messages=[message], max_tokens=job[1], temperature=0.0, stream=True
            )
        )

    def run(jobs: Sequence[Job]) -> Answers:
        # NOTE: requests are sent by one thread. The runner refuses two threads at once.
        threads = [threading.Thread(target=list, args=(begin(job),)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return None

    return run


if __name__ == "__main__":
    serve(load)
