"""What people write in place of flags and commands of other servers: TEI, vLLM, infinity, ollama."""

from __future__ import annotations

_NAME_THE_MODEL = "name the model without a flag: `penstock serve MODEL`"
_NAME_AFTER_MODEL = "the name stands behind the model: `penstock serve MODEL=NAME`"
_KEYS = "keys lie in a file: `penstock keys new NAME` makes one, docs/access.md says how"
_ENTRY = "`penstock models add MODEL --output DIR --field {}` writes a catalog entry, `--catalog DIR` serves the entry"
_TOKEN = "set the environment variable HF_TOKEN"
_CACHE = "set the environment variable HF_HOME"
_FROM_FILES = "leave the flag out: the model's own files say what the model does"
_CUT = "leave the flag out: the routes of TEI cut long texts, unless a request has `truncate: false`"
_ONE_GPU = "not built: a model runs on one GPU; `--workers N` starts N workers, one per GPU"
_QUANTIZED = "name a GGUF file, `penstock serve owner/name:Q4_K_M`; weights in AWQ and GPTQ do not load"
_IN_TEMPLATE = "leave the flag out: the model's chat template says so"

INSTEAD = {
    "--allowed-origins": "write `--set server.cors_origins=ORIGIN,ORIGIN`",
    "--api-key": _KEYS,
    "--auto-truncate": _CUT,
    "--convert": _FROM_FILES,
    "--cors-allow-origin": "write `--set server.cors_origins=ORIGIN,ORIGIN`",
    "--data-parallel-size": "write `--workers N`: N workers, one per GPU",
    "--default-prompt": _ENTRY.format("runtime.default_instruction=TEXT"),
    "--download-dir": _CACHE,
    "--dtype": "write `--set worker.precision=float16`, bfloat16 or float32",
    "--enable-auto-tool-choice": _IN_TEMPLATE,
    "--enable-prefix-caching": "leave the flag out: beginnings of prompts are reused by default",
    "--gpu-memory-utilization": "write `--set worker.memory_pressure_percent=85`, or worker.memory_budget_bytes",
    "--hf-api-token": _TOKEN,
    "--hf-token": _TOKEN,
    "--hostname": "write `--host HOST`",
    "--huggingface-hub-cache": _CACHE,
    "--max-batch-tokens": "write `--set batch.max_tokens=N`",
    "--max-client-batch-size": "write `--set limits.max_items=N`",
    "--max-model-len": _ENTRY.format("max_sequence_length=N"),
    "--max-num-batched-tokens": "write `--set batch.max_tokens=N`",
    "--max-num-seqs": "write `--max-seqs N`",
    "--model-id": _NAME_THE_MODEL,
    "--model-name-or-path": _NAME_THE_MODEL,
    "--otlp-endpoint": "write `--set tracing.endpoint=URL`",
    "--payload-limit": "write `--set limits.max_body_bytes=SIZE`",
    "--pooling": _ENTRY.format("adapter=dense --field loadtime.pooling=mean"),
    "--prometheus-port": "write `--set server.metrics_bind=HOST:PORT`",
    "--quantization": _QUANTIZED,
    "--quantize": _QUANTIZED,
    "--reasoning-parser": _IN_TEMPLATE,
    "--revision": _ENTRY.format("'source={kind: hub, repo: MODEL, revision: REVISION}'"),
    "--runner": _FROM_FILES,
    "--served-model-name": _NAME_AFTER_MODEL,
    "--task": _FROM_FILES,
    "--tensor-parallel-size": _ONE_GPU,
    "--tokenization-workers": "write `--set worker.prepare_threads=N`",
    "--tool-call-parser": _IN_TEMPLATE,
    "--trust-remote-code": "write `--set worker.trust_remote_code=true`",
    "--uds": "write `--bind unix:PATH`",
    "--uds-path": "write `--bind unix:PATH`",
}
"""What to do instead, by flag."""

COMMANDS = {
    "cp": "a further name is given at the start: `penstock serve MODEL=NAME`",
    "create": "`penstock models add MODEL` writes the catalog entry of a model",
    "help": "`penstock --help` lists the commands",
    "push": "models are published with the tools of the hub, such as `hf upload`",
    "rm": "`penstock show MODEL` says where the files lie; `hf cache rm` removes files of the hub",
    "stop": "stop the server with Ctrl-C or SIGTERM; POST /v1/admin/unload/MODEL takes one model out of memory",
}
"""What to do in place of commands of ollama that Penstock lacks."""
