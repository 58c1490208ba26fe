"""The command line as a whole: completion, examples, and what a mistyped command is told."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc import settings
from ipc.errors import ConfigError
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.version import VERSION
from penstock import cli, command_line, target, terminal
from penstock.__main__ import main as penstock_main
from penstock.cli import main
from penstock.command_line import parser
from tools.source_tree import ROOT


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_knows_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "status" in script and "keys" in script and "run-dir" in script
    assert "penstock completion names" in script


def test_fish_completes_commands_values_and_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not installed")
    assert main(["completion", "fish"]) == 0
    (tmp_path / "mine").mkdir()
    # The function stands for `penstock completion names`, as no command of this name need be installed.
    script = f"function penstock; echo org/one; end\n{capsys.readouterr().out}"
    lines = ("penstock st", "penstock serve --device cu", "penstock serve a ./mi", "penstock verify org/")
    script += "".join(f"\ncomplete -C {shlex.quote(line)}" for line in lines)
    ended = subprocess.run(
        [fish, "--no-config"],
        input=script.encode(),
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=True,
    )
    completed = [line.partition("\t")[0] for line in ended.stdout.decode().splitlines()]
    assert completed == ["status", "cuda", "./mine/", "org/one"]
    assert not ended.stderr


def test_zsh_reads_the_script_and_completes_each_model_of_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert '"*:MODEL:_penstock_models"' in script and '"(*)' not in script
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed, so its parser has not read the script")
    (tmp_path / "_penstock").write_text(script)
    ended = subprocess.run([zsh, "-n", str(tmp_path / "_penstock")], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_shell_is_given_the_names_of_the_settings_file_and_its_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog, config = tmp_path / "models", tmp_path / "settings.yaml"
    catalog.mkdir()
    (catalog / "a.yaml").write_text("adapter: dense\nid: org/broken\n  - not YAML")
    (catalog / "b.yaml").write_text("sie_id: 'org/sie'  # of another server\nloras:\n  id: inner\n")
    config.write_text(f"catalog: {{dirs: [{catalog}], models: [./here=named, org/sie]}}")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    assert main(["completion", "names"]) == 0
    assert capsys.readouterr().out.split() == ["named", "org/broken", "org/sie"]
    config.write_text("nothing: true")
    assert main(["completion", "names"]) == 0
    assert "BAAI/bge-m3" in capsys.readouterr().out.split()


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["cp", "a"], "'cp' is no command of penstock; a further name is given at the start"),
        (["keys", "rm"], "'rm' is no action of penstock keys; expected new"),
        (["serve", "--no-ui"], "--no-ui is no flag of penstock serve; leave the flag out: the page at /"),
        (["serve", "--quantization", "awq"], "write `--set worker.precision=int8`, int4 or fp8"),
        (["serve", "--no-kv-cache"], "--no-kv-cache is no flag of penstock serve; leave the flag out"),
        (["serve", "-c", "a.jinja"], "-c is no flag of penstock serve; `penstock models add MODEL"),
        (["serve", "-j", "a.jinja"], "-j is no flag of penstock serve; `penstock models add MODEL"),
        (["serve", "--chat-template", "a"], "--chat-template is no flag of penstock serve; `penstock models"),
        (["serve", "--jinja-explicit=a"], "--jinja-explicit is no flag of penstock serve; `penstock models"),
        (["serve", "--uds-path", "a"], "is no flag of penstock serve; write `--bind unix:PATH`"),
        (["serve", "--quantization=awq"], "is no flag of penstock serve; name a GGUF file"),
        (["srve"], "'srve' is no command of penstock; did you mean 'serve'?"),
        (["keys", "lst"], "'lst' is no action of penstock keys; did you mean 'list'?"),
        (["keys", "zzz"], "expected new, list, check, revoke; see penstock keys --help"),
        (["models"], "expected one of list, show, pull, verify, add"),
        (
            ["serve", "--modle", "a"],
            "--modle is no flag of penstock serve; did you mean --models?; see penstock",
        ),
        (
            ["serve", "./a", "--served-model-name", "b"],
            "--served-model-name is no flag of penstock serve; the name stands behind the model: "
            "`penstock serve MODEL=NAME`; see penstock",
        ),
        (
            ["serve", "--model-id=a/b"],
            "; name the model without a flag: `penstock serve MODEL`; see penstock",
        ),
        (["keys", "list", "--fiel=x"], "--fiel is no flag of penstock keys list; did you mean --file?"),
        (
            ["--config", "x", "check"],
            "--config is no flag of penstock; flags of a command stand behind the command",
        ),
        (["--vresion"], "--vresion is no flag of penstock; did you mean --version?"),
        (
            ["embed", "a", "b", "--modell", "m"],
            "--modell is no flag of penstock embed; did you mean --model?",
        ),
        (["version", "-x"], "'-x' is one word too many for penstock version"),
        (["version", "now"], "'now' is one word too many for penstock version"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_nearest(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_program_alone_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: penstock") and "start the server" in out


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", ["status", "ps", "sweep", "show a", "models show a"])
def test_commands_that_look_take_an_address_of_this_machine_in_each_form(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command.split()
    for flags in (
        ["--port", "9000"],
        ["-p", "9000"],
        ["--bind", "127.0.0.1:9000"],
        ["--url", "http://127.0.0.1:9000/"],
    ):
        options = parser().parse_args([*words, *flags])
        assert cli.flags_of(options) == {"server.bind": "127.0.0.1:9000"}
    monkeypatch.setattr(socket, "gethostname", lambda: "Host7")
    for host in ("LOCALHOST", "Host7", "host7", "0.0.0.0", "[::]"):
        options = parser().parse_args([*words, "--url", f"http://{host}:9000"])
        assert cli.flags_of(options) == {"server.bind": f"{host.lower()}:9000"}
    elsewhere = ["--url", "http://other.example:9000"]
    asks = "show" in words
    if asks:
        assert cli.flags_of(parser().parse_args([*words, *elsewhere])) == {}
    for flags, told in (
        (["--url", "http://127.0.0.1:9000", "--port", "1"], "--url cannot stand beside"),
        *(() if asks else [(elsewhere, "looks at processes of this machine")]),
        (["--url", "nothing"], "is no address of a server"),
    ):
        with pytest.raises(ConfigError, match=told):
            cli.flags_of(parser().parse_args([*words, *flags]))


@pytest.mark.parametrize("command", ["bench", "chat", "run a", "embed a b --model m", "layout a"])
def test_commands_that_ask_take_an_address_in_each_form(command: str) -> None:
    for flags, url in (
        (["--port", "9000"], "http://127.0.0.1:9000"),
        (["--host", "::1", "-p", "9000"], "http://[::1]:9000"),
        (["--bind", "10.0.0.1:9000"], "http://10.0.0.1:9000"),
        (["--url", "https://other.example/models/"], "https://other.example/models"),
        (["--url", "https://other.example/team@here"], "https://other.example/team@here"),
    ):
        options = parser().parse_args([*command.split(), *flags])
        config = settings.load(None, cli.flags_of(options), {})
        assert target.url_of(options, config) == url


@pytest.mark.sample(6)
@pytest.mark.parametrize("command", ["serve", "status", "chat"])
@pytest.mark.parametrize(
    ("configured", "flags", "bind"),
    [
        ("0.0.0.0:8080", "--port 9000", "0.0.0.0:9000"),
        ("[::]:8080", "--port 9000", "[::]:9000"),
        ("0.0.0.0:81", "--host 127.0.0.1", "127.0.0.1:81"),
        ("0.0.0.0:81", "--host ::1 --port 9000", "[::1]:9000"),
        ("unix:/tmp/socket", "--port 9000", "127.0.0.1:9000"),
        ("fd://3", "--host 10.0.0.1", "10.0.0.1:8080"),
    ],
)
def test_one_half_of_an_address_leaves_the_other_to_the_configured_one(
    command: str, configured: str, flags: str, bind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [command, *flags.split()]
    monkeypatch.setenv("PENSTOCK_SERVER__BIND", configured)
    assert cli.flags_of(parser().parse_args(words)) == {"server.bind": bind}
    monkeypatch.delenv("PENSTOCK_SERVER__BIND")
    file = tmp_path / "settings.yaml"
    file.write_text(f"server:\n  bind: '{configured}'\n")
    assert cli.flags_of(parser().parse_args([*words, "--config", str(file)])) == {"server.bind": bind}


@pytest.mark.parametrize(
    ("verb", "command"), [("list", "models list"), ("show a", "models show a"), ("pull a", "models pull a")]
)
def test_verbs_of_ollama_are_actions_of_models(verb: str, command: str) -> None:
    alone, whole = (vars(parser().parse_args(line.split())) for line in (verb, command))
    assert {**alone, "command": "models"} == {**whole, "here": True}


def test_what_is_said_of_flags_of_other_servers_names_settings_that_exist() -> None:
    texts = " ".join(command_line.INSTEAD.values())
    sections = settings.Settings()
    for section, field in re.findall(r"--set (\w+)\.(\w+)=", texts):
        assert hasattr(getattr(sections, section), field)


def test_the_page_for_those_who_come_from_other_servers_names_flags_that_are_answered() -> None:
    page = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \|", page, re.MULTILINE)
    named = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row)}
    assert named and named <= command_line.INSTEAD.keys()


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """All commands: the parser, and those below."""
    yield parser
    for child in children(parser):
        yield from commands(child)


def children(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The commands directly below."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [child for group in groups for child in group.choices.values()]


def test_each_help_ends_with_examples() -> None:
    missing = [each.prog for each in commands(parser()) if "examples:\n  penstock" not in (each.epilog or "")]
    assert missing == []


def test_each_command_that_prints_a_result_takes_json() -> None:
    without = {"serve", "gateway", "bridge", "worker", "tools", "chat", "run", "completion"}
    """These become a server, talk to a person, or print a script."""
    leaves = [each for each in commands(parser()) if not children(each)]
    plain = {each.prog for each in leaves if "--json" not in each._option_string_actions}
    assert len(leaves) > 18 and plain == {f"penstock {name}" for name in without}


def test_a_result_for_a_script_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)

    def document(*line: str, code: int = 0) -> Any:
        assert main([*line, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    run = ("--set", f"run.dir={tmp_path / 'run'}")
    assert document("version") == {"version": VERSION}
    assert document("sweep", *run) == {"removed": []}
    assert document("status", *run, code=4)["runs"] is False
    assert document("keys", "new", "web")["name"] == "web"
    pulled = document("models", "pull", "sentence-transformers/all-MiniLM-L6-v2", "./nowhere", code=1)
    assert [bool(each["error"]) for each in pulled] == [False, True] and pulled[0]["bytes"] > 1e6


def test_a_check_for_a_script_has_the_mistakes_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--set", "server.nope=1", "--json"]) == 3
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert not printed.err and not found["valid"] and "nope" in found["mistakes"][0]


@pytest.mark.parametrize("line", [("sweep",), ("sweep", "--slot", "1"), ("status",)])
def test_a_file_in_the_place_of_the_run_directory_is_named(
    line: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*line, "--set", f"run.dir={tmp_path / 'file'}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"penstock: {tmp_path / 'file'}") and error.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        ("sweep", "--slot", "-1"),
        ("worker", "--slot", "-1"),
        ("chat", "--max-tokens", "0"),
        ("chat", "--temperature", "nan"),
    ],
)
def test_a_number_that_is_none_is_refused(line: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 3
    assert f"{line[1]} {line[2]}: expected a number from" in capsys.readouterr().err


@pytest.mark.sample(2)
@pytest.mark.parametrize("redirection", [">&-", "<&-", "> /dev/full", "2>&-"])
def test_closed_and_full_streams_end_a_command_in_order(redirection: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m penstock version {redirection}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    full = "full" in redirection
    assert ended.returncode == (1 if full else 0)
    assert ended.stderr == (b"penstock: No space left on device\n" if full else b"")


def test_an_interruption_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    monkeypatch.setattr(sys, "argv", ["penstock", "verify", "m"])
    monkeypatch.setattr(gc, "freeze", lambda: None)
    assert penstock_main() == 1
    assert capsys.readouterr().err == "penstock: interrupted\n"


def test_a_key_file_without_a_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    assert main(["layout", "m", "--key-file", str(file)]) == 3
    assert capsys.readouterr().err == f"penstock: --key-file {file}: the file holds no key\n"


def test_a_moving_line_never_fills_the_last_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    for columns, shown in ((10, 9), (0, 79)):
        monkeypatch.setattr(
            os, "get_terminal_size", lambda fd, columns=columns: os.terminal_size((columns, 24))
        )
        terminal.redraw("x" * 200, "\n")
        assert capsys.readouterr().err == f"\r\x1b[K{'x' * shown}\n"


@pytest.mark.parametrize(("line", "code"), [(("tune", "no-model"), 1), (("models", "show", ""), 1)])
def test_a_name_that_no_model_has_is_told_in_one_line(
    line: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == code
    error = capsys.readouterr().err
    assert error.startswith("penstock: ") and repr(line[-1]) in error and error.count("\n") == 1


def test_a_run_directory_that_cannot_be_one_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be a directory"):
            prepare_run_dir(RunPaths(root, "x"))


def test_a_trial_without_a_length_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in ("-1", "nan", "0"):
        assert main(["tune", "BAAI/bge-m3", "--seconds", seconds]) == 3
        assert "expected a number from 0.1" in capsys.readouterr().err


def test_a_place_for_copies_that_is_no_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["models", "pull", "sentence-transformers/all-MiniLM-L6-v2", "--to", str(place)]) == 3
        assert f"--to {place} cannot be a directory" in capsys.readouterr().err


def test_a_slot_of_a_server_that_never_ran_is_swept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--slot", "1", "--set", f"run.dir={tmp_path / 'never'}"]) == 0
    assert capsys.readouterr().out == "removed 0 leftovers\n"
