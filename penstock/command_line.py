"""The commands of `penstock` with their flags, and what a mistyped command line is told.

Flags and commands of TEI, vLLM, infinity and ollama are refused with what to write instead.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ipc.settings import Settings
from ipc.version import VERSION
from penstock import (
    chat,
    completion,
    keys,
    layout,
    models,
    removal,
    run,
    status,
    target,
    terminal,
)
from penstock.bench import command as bench
from penstock.embedding import command as embedding
from penstock.tuning import command as tuning

_NAME_THE_MODEL = "name the model without a flag: `penstock serve MODEL`"
_NAME_AFTER_MODEL = "the name stands behind the model: `penstock serve MODEL=NAME`"
_KEYS = "keys lie in a file: `penstock keys new NAME` makes one, docs/access.md says how"
_ENTRY = "`penstock models add MODEL --output DIR --field {}` writes a catalog entry, `--catalog DIR` serves the entry"
_TOKEN = "set the environment variable HF_TOKEN"
_CACHE = "set the environment variable HF_HOME"
_FROM_FILES = "leave the flag out: the model's own files say what the model does"
_CUT = "leave the flag out: the routes of TEI cut long texts, unless a request has `truncate: false`"
_ONE_GPU = "not built: a model runs on one GPU; `--workers N` starts N workers, one per GPU"
_QUANTIZED = (
    "name a GGUF file, `penstock serve owner/name:Q4_K_M`, or write `--set worker.precision=int8`, int4 or fp8, which "
    "keeps weights quantised; leave the flag out for AWQ, GPTQ and FP8"
)
_IN_TEMPLATE = "leave the flag out: the model's chat template says so"
_TEMPLATE = _ENTRY.format("loadtime.chat_template=NAME") + "; NAME is a template of the model, or its text"
_ADAPTERS = "write `loras` in the catalog entry, or `--set catalog.lora_dirs=DIR`"

INSTEAD = {
    "-c": _TEMPLATE,
    "-j": _TEMPLATE,
    "--allowed-origins": "write `--set server.cors_origins=ORIGIN,ORIGIN`",
    "--api-key": _KEYS,
    "--auto-truncate": _CUT,
    "--chat-template": _TEMPLATE,
    "--convert": _FROM_FILES,
    "--cors-allow-origin": "write `--set server.cors_origins=ORIGIN,ORIGIN`",
    "--data-parallel-size": "write `--workers N`: N workers, one per GPU",
    "--default-prompt": _ENTRY.format("runtime.default_instruction=TEXT"),
    "--download-dir": _CACHE,
    "--dtype": "write `--set worker.precision=float16`, bfloat16 or float32",
    "--enable-auto-tool-choice": _IN_TEMPLATE,
    "--enable-lora": _ADAPTERS,
    "--enable-prefix-caching": "leave the flag out: beginnings of prompts are reused by default",
    "--gpu-memory-utilization": "write `--set worker.memory_pressure_percent=85`, or worker.memory_budget_bytes",
    "--hf-api-token": _TOKEN,
    "--hf-token": _TOKEN,
    "--hostname": "write `--host HOST`",
    "--huggingface-hub-cache": _CACHE,
    "--jinja-explicit": _TEMPLATE,
    "--lora-modules": _ADAPTERS,
    "--max-batch-tokens": "write `--set batch.max_tokens=N`",
    "--max-client-batch-size": "write `--set limits.max_items=N`",
    "--max-model-len": _ENTRY.format("max_sequence_length=N"),
    "--max-num-batched-tokens": "write `--set batch.max_tokens=N`",
    "--max-num-seqs": "write `--max-seqs N`",
    "--model-id": _NAME_THE_MODEL,
    "--model-name-or-path": _NAME_THE_MODEL,
    "--no-kv-cache": "leave the flag out: text is always generated with a cache; `--prefix-cache-n 0` keeps no prompts",
    "--no-ui": "leave the flag out: the page at / is part of every server, and keys decide what it shows",
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
"""What to write instead, by flag of another server."""

OTHER_COMMANDS = {
    "cp": "a further name is given at the start: `penstock serve MODEL=NAME`",
    "create": "`penstock models add MODEL` writes the catalog entry of a model",
    "help": "`penstock --help` lists the commands",
    "push": "models are published with the tools of the hub, such as `hf upload`",
    "stop": "stop the server with Ctrl-C or SIGTERM; POST /v1/admin/unload/MODEL takes one model out of memory",
}
"""What to do in place of commands of ollama that Penstock lacks."""


COMMANDS: dict[str, Callable[[argparse.Namespace, Settings], int]] = {
    "bench": bench.run,
    "chat": chat.run,
    "embed": embedding.run,
    "keys": keys.run,
    "layout": layout.run,
    "list": models.run,
    "models": models.run,
    "ps": status.run,
    "pull": models.run,
    "rm": removal.run,
    "run": run.run,
    "show": models.run,
    "status": status.run,
    "sweep": status.sweep_slots,
    "verify": models.run,
}
"""What runs each command that needs the flags and the settings only; returns the exit code."""
_EXAMPLES = {
    "serve": (
        ("serve", "serves all models of the catalog whose files are on this machine"),
        ("serve BAAI/bge-m3 ./my-model=mine --port 9000", "serves a model of the hub and a directory"),
        ("serve --config settings.yaml", "with a file of settings"),
    ),
    "check": (
        ("check --config settings.yaml", "validates the settings and the catalog that they name"),
        ("check --catalog models --json", "the same for a script"),
    ),
    "doctor": (
        ("doctor", "looks at this machine with the default settings"),
        ("doctor --device cuda --json", "with a GPU, for a script"),
    ),
    "worker": (("worker --slot 0 --config settings.yaml", "runs the worker of slot 0"),),
    "gateway": (
        ("gateway --set cluster.urls=nats://127.0.0.1:4222", "a gateway beside a broker of this host"),
        ("gateway --config gateway.yaml --bind 0.0.0.0:8080", "with a file of settings"),
    ),
    "bridge": (
        (
            "bridge --config settings.yaml",
            "with the settings of the server of this host, cluster.urls among them",
        ),
    ),
    "tools": (("tools --config settings.yaml", "runs code and shell commands of models in sandboxes"),),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest command or flag, and the help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As the base, but what this command does not understand ends the program with a hint."""
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_unknown_flags(words)
        options, rest = super().parse_known_args(words, namespace)
        if rest:
            problem = f"{rest[0][:200]!r} is one word too many for {self.prog}"
            self.error(f"{problem}; flags stand behind all other words")
        return options, rest

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        """Look before a lack of other flags is told. A command with commands below has only the flags before these."""
        leads = self._subparsers is not None
        for word in itertools.takewhile(lambda word: word != "--", words):
            flag = word.partition("=")[0]
            if leads and not word.startswith("-"):
                return
            is_flag = flag.startswith("--") or (flag in INSTEAD and self.prog.endswith(" serve"))
            if is_flag and not any(name.startswith(flag) for name in self._option_string_actions):
                near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                if self.prog.endswith(" serve") and flag in INSTEAD:
                    hint = f"; {INSTEAD[flag]}"
                behind = "; flags of a command stand behind the command" if leads and not near else ""
                self.error(f"{flag[:200]} is no flag of {self.prog}{hint}{behind}")

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit with 2."""
        if message.endswith(("required: COMMAND", "required: ACTION")):
            [choice] = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
            message = f"expected one of {', '.join(choice.choices)}"
        self.exit(2, f"{self.format_usage()}penstock: {message}; see {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            names = list(action.choices)
            if not self.prog.partition(" ")[2] and value in OTHER_COMMANDS:
                self.error(f"{value!r} is no command of {self.prog}; {OTHER_COMMANDS[value]}")
            near = difflib.get_close_matches(str(value), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(names)}"
            self.error(f"{value!r} is no {str(action.metavar).lower()} of {self.prog}; {hint}")
        super()._check_value(action, value)


def _common(parser: argparse.ArgumentParser) -> None:
    """Flags that name settings, those of every day first."""
    target.add_address(parser)
    parser.add_argument("--config", metavar="FILE", help="settings file (default: $PENSTOCK_CONFIG)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="where models run; cuda never falls back to the CPU"
    )
    parser.add_argument(
        "--workers", metavar="N", help="GPU processes (default: one per GPU, on CPU one for four cores)"
    )
    parser.add_argument(
        "--set", metavar="SECTION.FIELD=VALUE", action="append", default=[], help="any setting; may repeat"
    )
    parser.add_argument(
        "--catalog", metavar="DIR", action="append", default=[], help="directory of model files; may repeat"
    )
    parser.add_argument("--models", metavar="ID,ID", help="serve only these models: ids of the catalog")
    parser.add_argument(
        "--frontends", metavar="N", help="HTTP processes (default: one per two cores, at most 4)"
    )


def _looking(parser: argparse.ArgumentParser) -> None:
    """The same for commands that look at the processes of a running server, which `--url` names too."""
    _common(parser)
    target.add_url(parser)
    parser.set_defaults(looks=True)


def _named(parser: argparse.ArgumentParser) -> None:
    """Models by position, of commands that read a model which the catalog lacks from the model's files."""
    parser.add_argument(
        "named",
        metavar="MODEL",
        nargs="*",
        help="serve only these models: ids of catalog or hub, directories, .gguf and .onnx files; ID=NAME adds a name",
    )


TOOL_FLAGS = {
    "--search-url": (
        "agent.search_url",
        "URL",
        "URL that searches, in the form of SearXNG, in place of a public engine",
    ),
    "--search-embedding-model": (
        "agent.search_embedding_model",
        "ID",
        "embedding model of this server that puts results and passages in order",
    ),
    "--code-exec-python": ("agent.code_exec_python", "FILE", "Python of the sandbox"),
    "--code-exec-timeout": ("agent.code_exec_timeout_s", "SECONDS", "time of a call of Python (60)"),
    "--code-exec-workdir": (
        "agent.workdir",
        "DIR",
        "work directory of all sessions, in place of temporary ones",
    ),
    "--shell-path": ("agent.shell_path", "FILE", "shell of the sandbox (/bin/sh)"),
    "--shell-timeout": ("agent.shell_timeout_s", "SECONDS", "time of a call of the shell (600)"),
    "--shell-workdir": ("agent.workdir", "DIR", "the same as --code-exec-workdir"),
    "--skills-dir": (
        "state.skills_dir",
        "DIR",
        "directory of uploaded skills, in place of the state directory",
    ),
    "--agent-permission": ("agent.permission", "MODE", "auto, ask or deny"),
    "--max-tool-rounds": ("agent.max_tool_rounds", "N", "rounds of tools in a request (256)"),
    "--tool-dispatch-url": ("agent.tool_dispatch_url", "URL", "program that runs functions of clients"),
    "--mcp-port": ("server.mcp_port", "PORT", "answer MCP at /mcp on this port"),
    "--mcp-config": ("agent.mcp_config", "FILE", "MCP servers whose tools models may call"),
    "--sandbox": ("agent.sandbox", "MODE", "auto: what the machine offers; on: all layers or no start; off"),
    "--sandbox-profile": ("agent.sandbox_profile", "NAME", "developer or restricted"),
    "--sandbox-network": ("agent.sandbox_network", "NAME", "none, loopback or full"),
    "--sb-max-memory-mb": ("agent.max_memory_bytes", "N", "memory of a process in MiB (2048)"),
    "--sb-max-cpu-secs": ("agent.max_cpu_s", "N", "processor time of a process (300)"),
    "--sb-max-procs": ("agent.max_procs", "N", "processes of a sandbox (64)"),
}
"""Flags of tools with a value: the setting, the name of the value, and a help text."""


def _tools(group: argparse._ArgumentGroup) -> None:
    """Flags of tools and their sandbox; `TOOL_FLAGS` has their settings."""
    group.add_argument(
        "--agent", action="store_true", help="all tools that this server has: Python, shell, web search"
    )
    group.add_argument("--enable-code-execution", action="store_true", help="models may run Python")
    group.add_argument("--enable-shell", action="store_true", help="models may run shell commands")
    group.add_argument(
        "--enable-search", action="store_true", help="models may search the web and read pages"
    )
    group.add_argument("--fetch-file-urls", action="store_true", help="messages may name files by their URL")
    group.add_argument(
        "--no-fetch-media", action="store_true", help="messages may not name pictures by their URL"
    )
    for flag, (_, metavar, text) in TOOL_FLAGS.items():
        group.add_argument(flag, metavar=metavar, help=text)


def _serving(parser: argparse.ArgumentParser) -> None:
    """Flags of `serve` alone, under the names that mistral.rs gives them."""
    parser.add_argument(
        "--max-seqs", metavar="N", help="texts that a model generates at once (default 32, on CUDA 128)"
    )
    parser.add_argument(
        "--prefix-cache-n", metavar="N", help="0: never reuse what is known of a prompt's beginning"
    )
    parser.add_argument(
        "--disable-request-id-header", action="store_true", help="answers without X-Request-ID"
    )
    _tools(parser.add_argument_group("tools that run on the server"))
    parser.add_argument("--disable-metrics", action="store_true", help="no /metrics, nothing counted for it")
    logs = parser.add_mutually_exclusive_group()
    logs.add_argument("--access-log", action="store_true", help="two lines for each HTTP request")
    logs.add_argument("--disable-access-log", action="store_true", help="no such lines, which is the default")
    parser.add_argument("--access-log-health", action="store_true", help="... also for probes")
    parser.add_argument("--access-log-format", choices=("text", "json"), help="form of all lines of the log")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = Parser(prog="penstock", description="Inference server for chat, embeddings and more.")
    root.add_argument("--version", action="version", version=VERSION)
    terminal.with_examples(
        root,
        ("serve sentence-transformers/all-MiniLM-L6-v2", "starts a server with one model"),
        ("models list", "the models of the catalog"),
        ("COMMAND --help", "flags and examples of a command"),
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="start the server: gunicorn -c gunicorn.conf.py with these settings"
    )
    check = commands.add_parser("check", help="validate settings and catalog; exit 3 when wrong")
    look = commands.add_parser("doctor", help="look at devices, limits, shared memory, ports, versions")
    for examined in (check, look):
        terminal.with_json(examined)
    worker = commands.add_parser(
        "worker", help="start one worker by hand, for frontends without a supervisor"
    )
    gateway = commands.add_parser(
        "gateway", help="start a server whose models run on the boxes behind cluster.urls"
    )
    bridge = commands.add_parser("bridge", help="take work of gateways for the workers of this host")
    tools = commands.add_parser(
        "tools", help="start the tool host by hand, for frontends without a supervisor"
    )
    for each in (tools, gateway, bridge):
        _common(each)
    for each in (serve, check, look, worker):
        _common(each)
        _named(each)
    _serving(serve)
    worker.add_argument("--slot", type=int, required=True, help="number of the worker, from 0")
    _examples({"serve": serve, "check": check, "doctor": look, "worker": worker, "tools": tools})
    _examples({"gateway": gateway, "bridge": bridge})
    status.add_sweep_parser(commands, _looking)
    status.add_parsers(commands, _looking)
    run.add_parser(commands)
    for client in (bench, chat, embedding, layout):
        client.add_parser(commands)
    models.add_parsers(commands, _common, _looking)
    removal.add_parser(commands, _common)
    tuning.add_parser(commands, _common)
    keys.add_parser(commands, _common)
    completion.add_parser(commands)
    _describing(commands)
    return root


def _describing(commands: Any) -> None:
    """The commands that print what the package knows: OpenAPI document and version."""
    document = commands.add_parser("openapi", help="print the OpenAPI document of the HTTP surface")
    terminal.with_examples(document, ("openapi > openapi.json", "for a generator of clients"))
    terminal.with_json(document, "the document is JSON always")
    version = commands.add_parser("version", help="print the version")
    terminal.with_json(version)
    terminal.with_examples(version, ("version", "the same as `penstock --version`"))


def _examples(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    for name, each in parsers.items():
        terminal.with_examples(each, *_EXAMPLES[name])
