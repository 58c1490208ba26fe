"""The `penstock` command: serve, check, doctor, sweep, version, and what it says about mistakes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.processes.liveness import SlotLock
from ipc.version import VERSION
from penstock.cli import main
from tests.harness.accounting import count_server
from tests.harness.ports import free_port
from tests.harness.server import FAKE_CATALOG, ROOT, Server, alive, wait_until

EXIT_CONFIG = 3
FAKES = ("--catalog", str(FAKE_CATALOG), "--models", "fake/echo")


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


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """For commands that run in this process, without settings in its environment; what they print."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)

    def refuse(*_: object) -> None:
        raise AssertionError("the command would have become a server")

    monkeypatch.setattr(os, "execve", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return capsys


HOSTILE = (
    "workers",
    "ipc",
    "penstock",
    "penstock_server",
    "json",
    "gunicorn",
    "numpy",
    "torch",
    "setproctitle",
    "yaml",
)


def hostile_directory(place: Path) -> Path:
    """A directory of somebody's own modules, which have common names; each says so when it is executed."""
    files = [place / f"{name}.py" for name in HOSTILE] + [place / "frontend" / "__init__.py"]
    (place / "frontend").mkdir(parents=True)
    for file in files:
        file.write_text(f"open({str(place / 'executed')!r}, 'a').write(__file__ + chr(10))\n")
    return place


@pytest.fixture
def served(tmp_path: Path, environment: dict[str, str]) -> Iterator[Server]:
    """A server started by `penstock serve` with nothing but flags, where other modules with the names of ours lie."""
    here = hostile_directory(tmp_path / "here")
    port, run_dir = free_port(), tmp_path / "run"
    names = {"PENSTOCK_RUN__SHM_DIR": "/dev/shm", "PENSTOCK_RUN__INSTANCE": f"cli{port}"}
    server = Server(port, run_dir, tmp_path / "server.log", environment | names)
    flags = ("--bind", f"127.0.0.1:{port}", "--workers", "1", "--frontends", "1", "--device", "cpu", *FAKES)
    chosen = {
        "run.dir": run_dir,
        "run.instance": f"cli{port}",
        "limits.max_items": 2,
        "arena.bytes": 8 << 20,
        "server.drain_s": 0.2,
        "grpc.bind": f"127.0.0.1:{free_port()}",
        "log.format": "text",
    }
    pairs = [part for name, value in chosen.items() for part in ("--set", f"{name}={value}")]
    with server.log_path.open("wb") as log:
        count_server()
        server.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("penstock")), "serve", *flags, *pairs],
            cwd=here,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        server.wait_ready()
        yield server
        assert server.stop() == 0
        server.assert_nothing_left()
        assert strange_lines(server.log) == []
        assert not (here / "executed").exists(), (here / "executed").read_text()
    finally:
        server.kill_everything()


LINE = re.compile(
    r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(arbiter|frontend|supervisor|worker)[-\d]* +\S"
)


def strange_lines(log: str) -> list[str]:
    """Lines of a log as text that are neither in the form of all lines nor part of the start-up block."""
    lines = log.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("Penstock "))
    last = next(at for at in range(first + 1, len(lines)) if not lines[at].startswith("  "))
    return [line for line in lines[:first] + lines[last:] if not LINE.match(line)]


def title_of(pid: int) -> str:
    """What `ps` shows of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


def test_serve_starts_a_server_with_the_settings_of_its_flags(served: Server) -> None:
    assert served.encode("fake/echo", ["a", "b"]).status == 200
    refused = served.encode("fake/echo", ["a", "b", "c"])
    assert refused.status == 400
    assert "the limit is 2 (limits.max_items)" in refused.json()["detail"]["message"]
    assert {title_of(pid) for pid in (served.process.pid, *served.pids())} == {
        "penstock: arbiter",
        "penstock: frontend 0",
        "penstock: supervisor",
        "penstock: worker 0 (cpu)",
    }
    assert [model["name"] for model in served.get("/v1/models").json()["models"]] == ["fake/echo"]
    wait_until(lambda: "8 MiB arena" in served.log, what="the start-up block")
    before = served.frontend_pids()
    served.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not any(map(alive, before)) and served.frontend_pids(), what="the new frontend")
    assert "reloading: new frontends start" in served.log
    unserved = "the catalog has the model, but this server does not serve 'fake/slow': start it with --models fake/slow"
    named = {"model": "fake/slow", "input": "x"}
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    answers = (
        served.encode("fake/slow", ["x"]).json()["detail"]["message"],
        served.post("/v1/embeddings", named).json()["error"]["message"],
        served.post("/v2/models/fake%2Fslow/infer", {"inputs": [tensor]}).json()["error"],
        served.get("/api/status/fake%2Fslow").headers["nv-status"],
    )
    assert [text for text in answers if unserved not in text.replace("\\'", "'")] == []
    assert "did you mean 'fake/echo'?" in served.encode("echo", ["x"]).json()["detail"]["message"]


def free_addresses() -> tuple[str, ...]:
    """Flags for addresses that nobody has."""
    return ("--bind", f"127.0.0.1:{free_port()}", "--set", f"grpc.bind=127.0.0.1:{free_port()}")


@contextlib.contextmanager
def taken_address() -> Iterator[str]:
    """An address on which another program listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_check_accepts_the_shipped_settings_and_names_the_models(environment: dict[str, str]) -> None:
    done = penstock(environment, "check", "--config", ROOT / "config" / "server.yaml", *free_addresses())
    assert done.returncode == 0, done.stderr
    assert "sentence-transformers/all-MiniLM-L6-v2" in done.stdout
    assert done.stderr == ""


def test_a_reader_that_has_seen_enough_is_no_error(environment: dict[str, str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        command = [sys.executable, "-m", "penstock", "models", "list"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "worker.cuont=2"), "unknown setting worker.cuont; did you mean 'count'?"),
        (("--set", "wroker.count=2"), "unknown section 'wroker'; did you mean 'worker'?"),
        (
            ("--set", "worker.count=many"),
            'worker.count = "many" (--workers): expected whole number, at least 0',
        ),
        (("--workers", "-1"), 'worker.count = "-1" (--workers): expected whole number, at least 0'),
        (("--bind", "8080"), 'server.bind = "8080" (--bind): expected HOST:PORT'),
        (("--bind", ":8080"), 'server.bind = ":8080" (--bind): expected HOST:PORT'),
        (("--bind", "localhost"), 'server.bind = "localhost" (--bind): expected HOST:PORT'),
        (("--bind", "127.0.0.1:99999"), "with a port from 1 to 65535"),
        (("--bind", "unix:/nowhere/penstock.sock"), "unix:PATH in a directory that exists"),
        (("--set", "grpc.bind=9000"), 'grpc.bind = "9000" (--set grpc.bind): expected HOST:PORT'),
        (("--set", "server.health_bind=:1"), 'server.health_bind = ":1" (--set server.health_bind)'),
        (
            ("--set", "server.allowed_hosts=a,http://b"),
            'server.allowed_hosts = ["a","http://b"] (--set server.allowed_hosts): expected list of texts like',
        ),
        (("--set", "worker.count"), "--set worker.count: expected SECTION.FIELD=VALUE"),
        (("--set", "count=2"), "--set count=2: expected SECTION.FIELD=VALUE"),
        (("--catalog", str(FAKE_CATALOG), "--models", "fake/ecoh"), "did you mean 'fake/echo'?"),
        (("--catalog", "/nowhere"), "catalog directory /nowhere does not exist"),
        (("--config", "/nowhere.yaml"), "/nowhere.yaml"),
        (("",), "the name of a model is empty"),
    ],
)
def test_check_and_serve_refuse_a_mistake_and_name_it(
    arguments: tuple[str, ...], message: str, here: pytest.CaptureFixture[str]
) -> None:
    for command in ("check", "serve"):
        assert main([command, *arguments]) == EXIT_CONFIG
        said = here.readouterr().err
        assert message in said
        assert len(said.splitlines()) == 1, "one line is enough"


def test_a_mistake_in_the_file_or_the_environment_names_its_place(
    environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("server:\n  binds: 127.0.0.1:80\n")
    done = penstock(environment, "check", "--config", file)
    assert done.returncode == EXIT_CONFIG
    assert f"{file}, line 2: unknown setting server.binds; did you mean 'bind'?" in done.stderr
    done = penstock(environment | {"PENSTOCK_BATCH__MAX_TOKEN": "1"}, "check")
    assert done.returncode == EXIT_CONFIG
    assert (
        "PENSTOCK_BATCH__MAX_TOKEN: unknown setting batch.max_token; did you mean 'max_tokens'?"
        in done.stderr
    )


@pytest.mark.parametrize("setting", ["server.bind", "server.metrics_bind", "server.health_bind", "grpc.bind"])
def test_check_says_in_one_sentence_which_address_is_taken(
    here: pytest.CaptureFixture[str], tmp_path: Path, setting: str
) -> None:
    with taken_address() as address:
        flags = (*free_addresses(), "--set", f"{setting}={address}", "--set", f"run.dir={tmp_path / 'run'}")
        assert main(["check", *FAKES, *flags]) == EXIT_CONFIG
        said = f"{setting}: {address} cannot be had: another program has it"
        assert here.readouterr().err == f"penstock: {said}\n"


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "setting",
    [
        "server.bind",
        pytest.param("server.metrics_bind", marks=LONG),
        pytest.param("server.health_bind", marks=LONG),
        pytest.param("grpc.bind", marks=LONG),
    ],
)
def test_serve_says_in_one_sentence_which_address_is_taken_before_anything_is_started(
    environment: dict[str, str], tmp_path: Path, setting: str
) -> None:
    with taken_address() as address:
        flags = (*free_addresses(), "--set", f"{setting}={address}", "--set", f"run.dir={tmp_path / 'run'}")
        said = f"{setting}: {address} cannot be had: another program has it"
        served = penstock(environment, "serve", *FAKES, *flags, "--set", "log.format=json")
    assert served.returncode == EXIT_CONFIG
    [line] = served.stderr.splitlines()
    assert json.loads(line)["message"] == said
    held = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "server.lock"]
    assert held == []


MISTAKES = {
    "adapter: dens": "3: adapter: unknown adapter 'dens': did you mean dense",
    "source: {kind: directory, path: wights}": "3: source.path: the directory {}/wights does not exist; "
    "did you mean 'weights'?",
    "source: {kind: package, package: no_such}": "3: source.package: 'no_such' is not installed",
    "outputs: {dense: {dims: 512}}": "3: outputs.dense.dims: 512 is stated, the model gives 384",
    "loadtime: {poling: mean}": "3: loadtime.poling: unknown option; did you mean 'pooling'?",
    "loras: {x: {kind: directory, path: wights}}": "3: loras.x.path: the directory {}/wights does not exist",
}


def test_check_and_doctor_name_every_bad_file_and_serve_starts_with_the_others(
    here: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"hidden_size": 384}')
    expected = []
    for number, (field, text) in enumerate(MISTAKES.items()):
        source = "" if field.startswith("source") else "\nsource: {kind: directory, path: weights}"
        (tmp_path / f"m{number}.yaml").write_text(f"id: m{number}\n\n{field}{source}\n")
        expected.append(f"{tmp_path}/m{number}.yaml:{text.format(tmp_path)}")
    (tmp_path / "torn.yaml").write_text("id: torn\nsource: {\n")
    (tmp_path / "good.yaml").write_text(
        "id: good\nsource: {kind: directory, path: weights}\noutputs: {dense: {dims: 384}}\n"
    )
    assert main(["check", "--catalog", str(tmp_path)]) == EXIT_CONFIG
    told = here.readouterr().err
    assert [line for line in expected if line not in told] == []
    assert f"{tmp_path}/torn.yaml:3: " in told and "good.yaml" not in told
    main(["doctor", "--catalog", str(tmp_path)])
    told = here.readouterr().out
    assert [line for line in expected if f"BAD  catalog: {line}" not in told] == []

    def started(*_: object) -> None:
        raise SystemExit("it would serve")

    monkeypatch.setattr(os, "execve", started)
    with pytest.raises(SystemExit, match="it would serve"):
        main(["serve", "--catalog", str(tmp_path)])


def test_an_adapter_with_a_dotted_path_is_not_imported(
    here: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.yaml").write_text(
        "id: my/model\nsource: {kind: directory, path: .}\nadapter: no_such_package:Adapter\n"
    )
    assert main(["check", "--catalog", str(tmp_path), *free_addresses()]) == 0
    assert here.readouterr().err == ""


def test_gunicorn_itself_refuses_a_mistake_with_exit_code_3(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gunicorn", "-c", "gunicorn.conf.py"],
        cwd=ROOT,
        env=environment | {"PENSTOCK_SERVER__BNID": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_CONFIG
    assert "did you mean 'bind'?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("RESTRICTED_FILE", "- apis: [everything]\n", "kserve.restricted_file {}: "),
        ("RESTRICTED_FILE", None, "kserve.restricted_file {}: No such file or directory"),
        ("FORWARD_HEADERS", "(", "kserve.forward_headers: not a regular expression: "),
    ],
)
def test_a_mistake_in_what_restricts_or_forwards_is_one_sentence_before_anything_starts(
    here: pytest.CaptureFixture[str],
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str | None,
    told: str,
) -> None:
    file = tmp_path / "restricted.yaml"
    if text is not None:
        file.write_text(text)
        file.chmod(0o600)
    setting, value = f"PENSTOCK_KSERVE__{name}", str(file) if name == "RESTRICTED_FILE" else "("
    done = subprocess.run(
        [sys.executable, "-m", "gunicorn", "-c", "gunicorn.conf.py"],
        cwd=ROOT, env=environment | {setting: value}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    monkeypatch.setenv(setting, value)
    for code, said in (
        (done.returncode, done.stderr),
        (main(["check", *FAKES]), here.readouterr().err),
    ):
        assert code == EXIT_CONFIG
        assert said.startswith("penstock: " + told.format(file)) and said.count("\n") == 1


@pytest.mark.parametrize("arguments", [("swerve",), ("serve", "--device", "tpu")])
def test_an_unknown_command_line_ends_with_2(
    arguments: tuple[str, ...], here: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2


def test_version_prints_the_version(environment: dict[str, str]) -> None:
    assert penstock(environment, "version").stdout == f"{VERSION}\n"


def doctor(
    printed: pytest.CaptureFixture[str], tmp_path: Path, port: int, *more: str
) -> tuple[int, list[str]]:
    """Exit code and lines of `penstock doctor` on a machine without a GPU."""
    pairs = (f"run.dir={tmp_path / 'run'}", f"grpc.bind=127.0.0.1:{free_port()}", *more)
    flags = ("--bind", f"127.0.0.1:{port}", "--device", "cpu", "--workers", "1", "--frontends", "1")
    arguments = [part for pair in pairs for part in ("--set", pair)]
    code = main(["doctor", *FAKES, *flags, *arguments])
    return code, printed.readouterr().out.splitlines()


def test_doctor_finds_nothing_wrong_with_a_good_configuration(
    here: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, lines = doctor(here, tmp_path, free_port(), "server.max_connections=100")
    assert code == 0, lines
    assert all(line.startswith("ok ") for line in lines)
    text = "\n".join(lines)
    for word in (
        "penstock",
        "torch",
        "cores",
        "/dev/shm",
        "open files",
        "run directory",
        "is free",
        "fake/echo",
    ):
        assert word in text


def test_doctor_names_a_port_in_use_and_shared_memory_that_is_too_small(
    here: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, lines = doctor(here, tmp_path, port, f"arena.bytes={1 << 50}")
    assert code == 1
    bad = [line for line in lines if line.startswith("BAD ")]
    assert f"BAD  server.bind: 127.0.0.1:{port} cannot be had: another program has it" in bad
    assert any("/dev/shm" in line and f"{1 << 30} MiB needed" in line for line in bad)


@pytest.mark.parametrize(
    ("host", "wrong", "said"),
    [
        ("127.0.0.1", "fetch.allowed_networks=nothing", "fetch.allowed_networks: 'nothing' is no network"),
        (
            "127.0.0.1",
            "agent.mcp_config=/absent.json",
            "agent.mcp_config = /absent.json: No such file or directory",
        ),
        ("0.0.0.0", "agent.search=true", "tools are enabled and server.keys_file is empty"),
    ],
)
def test_check_and_doctor_find_mistakes_of_tools_that_stop_the_start(
    here: pytest.CaptureFixture[str], tmp_path: Path, host: str, wrong: str, said: str
) -> None:
    pairs = (wrong, f"grpc.bind=127.0.0.1:{free_port()}", f"run.dir={tmp_path / 'run'}", "server.keys_file=")
    flags = ("--bind", f"{host}:{free_port()}", *(part for pair in pairs for part in ("--set", pair)))
    assert main(["doctor", *FAKES, *flags]) == 1
    assert [line for line in here.readouterr().out.splitlines() if said in line and line.startswith("BAD ")]
    assert main(["check", *FAKES, *flags]) == EXIT_CONFIG
    assert said in here.readouterr().err


def test_sweep_finds_the_server_by_its_address_as_serve_names_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment |= {"XDG_RUNTIME_DIR": str(tmp_path), "PENSTOCK_RUN__SHM_DIR": str(tmp_path)}
    names = [f"penstock.{port}.0.0123456789abcdef" for port in (9000, 9001)]
    for name in names:
        (tmp_path / name).touch()
    done = penstock(environment, "sweep", *FAKES, "--bind", "127.0.0.1:9000", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("penstock.*")] == names[1:]


def test_sweep_removes_what_dead_processes_left_and_nothing_of_live_ones(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run_dir, shm = tmp_path / "run", tmp_path / "shm"
    run_dir.mkdir()
    shm.mkdir()
    settings = {"RUN__DIR": run_dir, "RUN__SHM_DIR": shm, "RUN__INSTANCE": "swept"}
    environment |= {f"PENSTOCK_{name}": str(value) for name, value in settings.items()}
    for slot in (0, 1):
        (shm / f"penstock.swept.{slot}.0123456789abcdef").touch()
        (run_dir / f"worker-{slot}.sock").touch()
    (shm / "penstock.other.0.0123456789abcdef").touch()
    with SlotLock(run_dir / "worker-1.lock"):
        done = penstock(environment, "sweep", *FAKES)
        assert done.returncode == 0, done.stderr
        assert "removed 2 leftovers" in done.stdout
        assert sorted(path.name for path in shm.iterdir()) == [
            "penstock.other.0.0123456789abcdef",
            "penstock.swept.1.0123456789abcdef",
        ]
        assert (run_dir / "worker-1.sock").exists()
        refused = penstock(environment, "sweep", *FAKES, "--slot", "1")
        assert refused.returncode == 1
        assert "worker-1.lock is held" in refused.stderr
    assert penstock(environment, "sweep", *FAKES, "--slot", "1").returncode == 0
    assert [path.name for path in shm.iterdir()] == ["penstock.other.0.0123456789abcdef"]
