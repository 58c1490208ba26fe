"""API keys from the command line to a running server: making them, mistakes at the start, reloads, one rate for all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frontend.access import api_keys
from penstock.cli import main
from tests.harness.keys import bearer, write_keys
from tests.harness.ports import free_port
from tests.harness.server import FAKE_CATALOG, ROOT, Server, alive, serving, wait_until

EXIT_CONFIG = 3


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment without settings in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def penstock(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def status(server: Server, key: str) -> int:
    """What a request with that key is answered."""
    return server.request("GET", "/v1/models", headers=bearer(key)).status


def replace_frontends(server: Server) -> None:
    """SIGHUP, and wait until all frontends are new ones."""
    before = server.frontend_pids()
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not any(alive(pid) for pid in before), what="the end of the old frontends")
    server.wait_ready()


def test_new_keys_can_be_appended_to_the_file_and_the_file_never_holds_them(
    environment: dict[str, str], tmp_path: Path
) -> None:
    made = [
        penstock(
            environment, "keys", "new", "web", "--share", "2.5", "--requests-per-s", "10", "--burst", "20"
        ),
        penstock(environment, "keys", "new", "ops@host", "--scope", "admin", "--scope", "infer"),
    ]
    path = tmp_path / "keys.yaml"
    path.touch(mode=0o600)
    path.write_text("".join(done.stdout for done in made))
    web, ops = api_keys.read(path)
    assert (web.name, web.scopes, web.requests_per_s, web.burst, web.share) == (
        "web",
        ("infer",),
        10,
        20,
        2.5,
    )
    assert (ops.name, ops.scopes) == ("ops@host", ("admin", "infer"))
    for done, entry in zip(made, (web, ops), strict=True):
        key = done.stderr.split()[-1]
        assert api_keys.hashed(key) == entry.hash
        assert key.split("_", 2)[2] not in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("",),
        ("a b",),
        ("pk_mine",),
        ("web", "--share", "0"),
        ("web", "--requests-per-s", "nan"),
        ("web", "--burst", "-1"),
    ],
)
def test_no_key_is_made_that_the_file_may_not_have(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", *arguments]) == EXIT_CONFIG
    said = capsys.readouterr()
    assert said.out == "" and "keys new" in said.err and "pk_0" not in said.err
    assert "regex" not in said.err


def doctor_line(environment: dict[str, str], run_dir: Path, *pairs: str) -> str:
    """What `penstock doctor` says of API keys."""
    flags = (
        "--catalog",
        FAKE_CATALOG,
        "--models",
        "fake/echo",
        "--device",
        "cpu",
        "--bind",
        f"127.0.0.1:{free_port()}",
    )
    sets = [part for pair in (f"run.dir={run_dir}", *pairs) for part in ("--set", pair)]
    lines = penstock(environment, "doctor", *flags, *sets).stdout.splitlines()
    return next(line for line in lines if "API keys" in line)


@pytest.mark.long
def test_doctor_looks_at_the_keys_file(environment: dict[str, str], tmp_path: Path) -> None:
    path, run_dir = tmp_path / "keys.json", tmp_path / "run"
    write_keys(path, {"a": {}, "b": {"scopes": ["admin"]}})
    named = f"server.keys_file={path}"
    assert doctor_line(environment, run_dir).startswith("ok   API keys: off")
    assert doctor_line(environment, run_dir, named) == f"ok   API keys: 2 in {path}, 1 with the scope admin"
    path.chmod(0o644)
    assert doctor_line(environment, run_dir, named).startswith("BAD  API keys: server.keys_file ")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command", [("-m", "penstock", "check"), ("-m", "gunicorn", "-c", "gunicorn.conf.py")]
)
def test_a_mistake_in_the_keys_file_stops_the_start_and_is_named(
    environment: dict[str, str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, {"web": {"scopes": ["infre"]}})
    settings = {
        "SERVER__KEYS_FILE": str(path),
        "CATALOG__DIRS": str(FAKE_CATALOG),
        "RUN__DIR": str(tmp_path / "run"),
    }
    environment |= {f"PENSTOCK_{name}": value for name, value in settings.items()}
    for wrong, why in ((path, "entry 1 (web), field scopes[0]"), (tmp_path / "nowhere", "No such file")):
        environment["PENSTOCK_SERVER__KEYS_FILE"] = str(wrong)
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == EXIT_CONFIG, done.stdout + done.stderr
        assert f"server.keys_file {wrong}: " in done.stderr and why in done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A settings file that names a keys file, so that both can be changed under a running server."""
    path = tmp_path / "server.yaml"
    path.write_text(f"server: {{keys_file: {tmp_path / 'keys.json'}}}\n")
    return path


def test_a_reload_takes_new_keys_in_and_old_ones_out_and_refuses_a_broken_file(
    tmp_path: Path, config: Path
) -> None:
    path = tmp_path / "keys.json"
    known = write_keys(path, {"old": {}, "kept": {}})
    with serving(tmp_path, settings={"server.frontends": 2}, config=config, workers=False) as server:
        assert [status(server, known[name]) for name in ("old", "kept")] == [200, 200]
        known |= write_keys(path, {"kept": {}, "new": {}}, known)
        assert status(server, known["new"]) == 401, "nothing changes without a signal"
        replace_frontends(server)
        assert [status(server, known[name]) for name in ("old", "kept", "new")] == [401, 200, 200]
        broken: list[tuple[Any, str]] = [
            (lambda: path.write_text("- name: ["), "neither YAML nor JSON"),
            (lambda: write_keys(path, {"kept": {"share": -1}}, known), "entry 1 (kept), field share"),
            (path.unlink, "No such file"),
        ]
        for number, (spoil, why) in enumerate(broken, 1):
            spoil()
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda seen=number: server.log.count("the old one stays") == seen, what="a refusal")
            assert why in server.log
            server.wait_ready()
            assert [status(server, known[name]) for name in ("old", "kept", "new")] == [401, 200, 200]


@pytest.mark.long
def test_switching_keys_off_takes_an_explicit_setting_and_is_said(tmp_path: Path, config: Path) -> None:
    known = write_keys(tmp_path / "keys.json", {"web": {}})
    with serving(tmp_path, config=config) as server:
        assert server.get("/v1/models").status == 401
        config.write_text('server: {keys_file: ""}\n')
        replace_frontends(server)
        assert "server.keys_file is empty now: requests need no key any more" in server.log
        assert server.get("/v1/models").status == status(server, known["web"]) == 200


@pytest.mark.long
def test_without_keys_the_start_says_so_and_a_key_that_is_sent_is_ignored(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        wait_until(lambda: "no keys (server.keys_file is empty)" in server.log, what="the start-up block")
        assert "off        API keys" in server.log
        key = api_keys.fresh()
        assert status(server, key) == 200
        assert key.split("_", 2)[2] not in server.log


def test_all_frontends_draw_on_one_rate(tmp_path: Path) -> None:
    known = write_keys(tmp_path / "keys.json", {"web": {"requests_per_s": 0.01, "burst": 12}})
    settings = {"server.keys_file": tmp_path / "keys.json", "server.frontends": 3}
    with serving(tmp_path, settings=settings, workers=False) as server:
        wait_until(lambda: len(server.frontend_pids()) == 3, what="three frontends")
        found = [status(server, known["web"]) for _ in range(40)]
        assert found.count(200) == 12 and found.count(429) == 28
        killed = server.frontend_pids()[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len({*server.frontend_pids()} - {killed}) == 3, what="another frontend")
        assert status(server, known["web"]) == 429, "a frontend that died takes no debt along"
