"""Flags of `penstock serve` beside those of all commands, as settings."""

from __future__ import annotations

import pytest

from ipc.errors import ConfigError
from penstock.cli import flags_of
from penstock.command_line import parser


def settings(*arguments: str) -> dict[str, str]:
    return flags_of(parser().parse_args(["serve", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--models", "Qwen/Qwen3-0.6B"), {"catalog.models": "Qwen/Qwen3-0.6B"}),
        (("-p", "1234"), {"server.bind": "127.0.0.1:1234"}),
        (("--host", "0.0.0.0"), {"server.bind": "0.0.0.0:8080"}),
        (("--host", "::1", "--port", "9"), {"server.bind": "[::1]:9"}),
        (("--max-seqs", "8"), {"generation.max_sequences": "8"}),
        (("--prefix-cache-n", "0"), {"generation.prefix_cache": "false"}),
        (("--prefix-cache-n", "16"), {"generation.prefix_cache": "true"}),
        (("--disable-request-id-header",), {"server.request_id_header": "false"}),
        (("--agent",), {"agent.code_execution": "true", "agent.shell": "true", "agent.search": "true"}),
        (
            ("--enable-search", "--search-url", "http://a/search"),
            {"agent.search": "true", "agent.search_url": "http://a/search"},
        ),
        (("--disable-access-log",), {"log.access": "false"}),
        (("--access-log",), {"log.access": "true"}),
        (("--skills-dir", "/s"), {"state.skills_dir": "/s"}),
        (("--search-embedding-model", "e5"), {"agent.search_embedding_model": "e5"}),
        (("--fetch-file-urls",), {"fetch.file_urls": "true"}),
        (("--enable-shell", "--shell-timeout", "9"), {"agent.shell": "true", "agent.shell_timeout_s": "9"}),
        (
            ("--enable-code-execution", "--sandbox", "on"),
            {"agent.code_execution": "true", "agent.sandbox": "on"},
        ),
        (
            ("--sb-max-memory-mb", "512", "--sb-max-procs", "8"),
            {"agent.max_memory_bytes": "512MiB", "agent.max_procs": "8"},
        ),
        (("--code-exec-workdir", "/w", "--shell-workdir", "/w"), {"agent.workdir": "/w"}),
    ],
)
def test_flags_become_settings(arguments: tuple[str, ...], expected: dict[str, str]) -> None:
    assert settings(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--bind", "127.0.0.1:1", "--port", "2"), "--bind"),
        (("--prefix-cache-n", "-1"), "--prefix-cache-n -1"),
        (("--prefix-cache-n", "many"), "--prefix-cache-n many"),
        (("--code-exec-workdir", "/w", "--shell-workdir", "/v"), "--shell-workdir /v"),
    ],
)
def test_flags_that_make_no_sense_are_refused(arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings(*arguments)
