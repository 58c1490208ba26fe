"""Settings: order of the sources, conversion, limits, and names of what is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ipc import setting_sources, settings
from ipc.errors import ConfigError


def server_yaml(tmp_path: Path, text: str) -> Path:
    """A settings file."""
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_the_environment_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = server_yaml(tmp_path, "batch: {max_items: 1, max_tokens: 1, bulk_tokens: 1}\n")
    environ = {"PENSTOCK_BATCH__MAX_ITEMS": "2", "PENSTOCK_BATCH__MAX_TOKENS": "2"}
    found = settings.load(path, {"batch.max_items": "3"}, environ)
    assert (found.batch.max_items, found.batch.max_tokens, found.batch.bulk_tokens) == (3, 2, 1)
    assert found.batch.starve_after_s == settings.Batch().starve_after_s


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = server_yaml(tmp_path, "worker: {count: 7}\n")
    assert settings.load(environ={"PENSTOCK_CONFIG": str(path)}).worker.count == 7


def test_names_of_sie_mean_settings_here_and_ours_win_over_them(tmp_path: Path) -> None:
    path = server_yaml(tmp_path, "worker: {max_loras: 3}\n")
    environ = {"SIE_MAX_LORAS_PER_MODEL": "4", "SIE_PRELOAD_MODELS": "a/b,c/d", "SIE_UNHEARD_OF": "5"}
    found = settings.load(path, {}, environ)
    assert (found.worker.max_loras, found.catalog.preload) == (4, ("a/b", "c/d"))
    found = settings.load(path, {}, {**environ, "PENSTOCK_WORKER__MAX_LORAS": "5"})
    assert found.worker.max_loras == 5
    for name, place in settings.SIE_NAMES.items():
        section, _, field = place.partition(".")
        assert field in {spot.name for spot in msgspec.structs.fields(getattr(settings, section.title()))}, (
            name
        )


@pytest.mark.parametrize(
    ("given", "seconds"), [("2500", 2.5), ("0", 10), ("-1", 10), ("soon", 10), ("", 10), ("9" * 5000, 10)]
)
def test_the_keep_alive_of_mistral_rs_counts_where_it_is_a_number(given: str, seconds: float) -> None:
    environ = {"KEEP_ALIVE_INTERVAL": given}
    assert settings.load(environ=environ).generation.keep_alive_s == seconds
    environ["PENSTOCK_GENERATION__KEEP_ALIVE_S"] = "3"
    assert settings.load(environ=environ).generation.keep_alive_s == 3


def test_the_sandbox_of_mistral_rs_counts_where_nothing_else_sets_the_mode(tmp_path: Path) -> None:
    environ = {"MISTRALRS_SANDBOX": "on"}
    assert settings.load(environ=environ).agent.sandbox == "on"
    assert (
        settings.load(server_yaml(tmp_path, "agent: {sandbox: auto}"), environ=environ).agent.sandbox
        == "auto"
    )
    assert settings.load(flags={"agent.sandbox": "off"}, environ=environ).agent.sandbox == "off"
    with pytest.raises(
        ConfigError, match=r'agent.sandbox = "maybe" \(MISTRALRS_SANDBOX\): expected auto, off, on'
    ):
        settings.load(environ={"MISTRALRS_SANDBOX": "maybe"})


def test_no_source_at_all_gives_the_defaults() -> None:
    assert settings.load(environ={}) == settings.Settings()
    assert settings.load(environ={"PATH": "/bin", "PENSTOCK_NOTIFY_SOCKET": "x"}) == settings.Settings()


def test_an_empty_file_is_no_mistake(tmp_path: Path) -> None:
    assert settings.load(server_yaml(tmp_path, ""), environ={}) == settings.Settings()


def test_text_is_converted_to_the_declared_types() -> None:
    found = settings.load(
        environ={
            "PENSTOCK_WORKER__TRUST_REMOTE_CODE": "true",
            "PENSTOCK_WORKER__HANG_TIMEOUT_S": "2.5",
            "PENSTOCK_CATALOG__DIRS": "/a:1, /b,",
            "PENSTOCK_CATALOG__MODELS": "one,two",
        }
    )
    assert found.worker.trust_remote_code is True
    assert found.worker.hang_timeout_s == 2.5
    assert found.catalog.dirs == ("/a:1", "/b"), "one separator for all lists"
    assert found.catalog.models == ("one", "two")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PENSTOCK_BACTH__MAX_ITEMS": "1"}, "unknown section 'bacth'; did you mean 'batch'?"),
        ({"PENSTOCK_BATCH__MAX_ITEM": "1"}, "unknown setting batch.max_item; did you mean 'max_items'?"),
        ({"PENSTOCK_QUEUE__ZZZ": "1"}, "PENSTOCK_QUEUE__ZZZ: unknown setting queue.zzz"),
        ({"PENSTOCK_BATCH__MAX_ITEMS": "0"}, "batch.max_items"),
        ({"PENSTOCK_BATCH__MAX_ITEMS": "many"}, "batch.max_items"),
        ({"PENSTOCK_WORKER__DEVICE": "tpu"}, "worker.device"),
        ({"PENSTOCK_ARENA__BYTES": "1000"}, "arena.bytes"),
        ({"PENSTOCK_RUN__INSTANCE": "../x"}, "run.instance"),
        ({"PENSTOCK_CONFIG": "/no/such/file"}, "/no/such/file"),
        ({"PENSTOCK_SERVER_BIND": "127.0.0.1:1"}, "did you mean 'PENSTOCK_SERVER__BIND'?"),
        ({"PENSTOCK_CONFG": "/etc/x"}, "PENSTOCK_CONFG: unknown variable; did you mean 'PENSTOCK_CONFIG'?"),
        ({"PENSTOCK_WHATEVER": "1"}, "PENSTOCK_WHATEVER: unknown variable"),
        (
            {"PENSTOCK_SERVER__BIND": "8080"},
            'server.bind = "8080" (PENSTOCK_SERVER__BIND): expected HOST:PORT',
        ),
        ({"PENSTOCK_GRPC__BIND": ":1"}, 'grpc.bind = ":1" (PENSTOCK_GRPC__BIND): expected HOST:PORT'),
        ({"SIE_DEVICE": "tpu"}, 'worker.device = "tpu" (SIE_DEVICE): expected auto, cpu, cuda'),
        ({"PENSTOCK_WORKER__PREPARE_THREADS": "16"}, "expected whole number, above 0, at most 15"),
        ({"PENSTOCK_ARENA__BYTES": "64KiB"}, "arena.bytes = 64KiB (PENSTOCK_ARENA__BYTES): expected bytes"),
        ({"PENSTOCK_ARENA__BYTES": "64 pages"}, 'arena.bytes = "64 pages"'),
        ({"PENSTOCK_ARENA__BYTES": "0.3B"}, "at least 1MiB"),
    ],
)
def test_a_mistake_names_the_setting(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings.load(environ=environ)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "expected a map of sections"),
        ("batch: 3\n", "section 'batch' must be a map"),
        ("batch: {max_itmes: 3}\n", "did you mean 'max_items'?"),
        ("batch: {max_items: -3}\n", "batch.max_items"),
        ("batch: [", "server.yaml"),
    ],
)
def test_a_mistake_in_the_file_names_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings.load(server_yaml(tmp_path, text), environ={})
    assert message in refused.value.message


def test_an_unknown_flag_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"--set worker\.cuont: .*did you mean 'count'"):
        settings.load(flags={"worker.cuont": "1"}, environ={})


def test_flags_survive_the_way_through_the_environment_of_a_child() -> None:
    flags = {"worker.count": "3", "catalog.models": "a,b"}
    assert settings.load(flags=flags, environ={}) == settings.load(environ=settings.to_environ(flags))


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        settings.Settings().worker.count = 1  # type: ignore[misc]


def test_the_instance_follows_the_port_unless_it_is_set() -> None:
    assert settings.load(environ={"PENSTOCK_SERVER__BIND": "0.0.0.0:9000"}).instance == "9000"
    assert settings.load(environ={"PENSTOCK_RUN__INSTANCE": "blue"}).instance == "blue"


def test_every_field_can_be_set_by_a_variable_of_its_name() -> None:
    for section in msgspec.structs.fields(settings.Settings):
        for field in msgspec.structs.fields(section.type):
            value = getattr(section.default, field.name)
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            name = f"PENSTOCK_{section.name}__{field.name}".upper()
            assert settings.load(environ={name: text}) == settings.Settings(), name


def test_sizes_have_units_in_every_source(tmp_path: Path) -> None:
    path = server_yaml(tmp_path, "limits: {max_body_bytes: 64 MiB, max_text_bytes: 4096}\n")
    environ = {"PENSTOCK_ARENA__BYTES": "1.5GiB"}
    found = settings.load(path, {"arena.slice_bytes": "64kB"}, environ)
    assert (found.limits.max_body_bytes, found.limits.max_text_bytes) == (64 << 20, 4096)
    assert (found.arena.bytes, found.arena.slice_bytes) == (3 << 29, 64000)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0"), (1, "1"), (1024, "1KiB"), (256 << 20, "256MiB"), (3 << 29, "1536MiB"), (1 << 40, "1TiB")],
)
def test_a_shown_size_is_read_as_the_same_size(nbytes: int, text: str) -> None:
    assert setting_sources.shown_size(nbytes) == text
    assert setting_sources.size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "server:\n  bind: 127.0.0.1:1\nlog: {}\nserver:\n  frontends: 1\n",
            "'server' stands twice: in line 1 and in line 4",
        ),
        ("log:\n  level: info\n  level: debug\n", "'level' stands twice: in line 2 and in line 3"),
        ("log: {level: info, level: debug}\n", "'level' stands twice: in line 1 and in line 1"),
        ("log:\n  level: loud\n", "line 2): expected debug, error, info, warning"),
        ("log: [1]\n", "line 1: section 'log' must be a map"),
        ("log:\n\n  levl: info\n", "line 3: unknown setting log.levl; did you mean 'level'?"),
        ("worker:\n  count: [1]\n", "worker.count = [1] ("),
        ("a: [\n", "line 2, column 1"),
    ],
)
def test_a_mistake_in_the_file_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = server_yaml(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        settings.load(path, environ={})
    assert message in refused.value.message
    assert str(path) in refused.value.message


def test_variables_of_kubernetes_services_are_no_mistake() -> None:
    names = (
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT",
        "PORT_8080_TCP",
        "PORT_8080_TCP_ADDR",
    )
    environ = {f"PENSTOCK_{service}{name}": "x" for service in ("", "GRPC_", "BATCH_JOBS_") for name in names}
    assert (
        settings.load(environ=environ | {"PENSTOCK_KEY": "k", "PENSTOCK_SUPERVISE": "0"})
        == settings.Settings()
    )


def test_grpc_that_is_off_needs_no_address() -> None:
    environ = {"PENSTOCK_GRPC__ENABLED": "false", "PENSTOCK_GRPC__BIND": ""}
    assert settings.load(environ=environ).grpc.bind == ""


@pytest.mark.parametrize(
    ("bind", "instance"),
    [("127.0.0.1:9000", "9000"), ("[::1]:80", "80"), ("unix:/run/p.sock", "run-p-sock"), ("fd://3", "3")],
)
def test_the_instance_follows_from_the_address(bind: str, instance: str) -> None:
    assert settings.Settings(server=settings.Server(bind=bind)).instance == instance


def test_state_lasts_unless_the_run_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def root(**names: str) -> Path:
        return settings.load(
            None, {name.replace("__", "."): value for name, value in names.items()}, {}
        ).state_root

    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("platform.node", lambda: "../host.example")
    assert root() == tmp_path / "state/penstock/---host-example/8080", "hosts may share a home"
    assert root(server__bind="127.0.0.1:9000") == tmp_path / "state/penstock/---host-example/9000"
    monkeypatch.setattr("platform.node", lambda: "")
    assert root(run__dir=str(tmp_path / "run")) == tmp_path / "run/state"
    assert root(run__dir=str(tmp_path / "run"), run__state_dir="/var/lib/x") == Path("/var/lib/x")
    monkeypatch.setenv("STATE_DIRECTORY", f"{tmp_path / 'unit'}:/other")
    assert root() == tmp_path / "unit/8080"
    monkeypatch.delenv("STATE_DIRECTORY")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert root() == tmp_path / "home/.local/state/penstock/localhost/8080"
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert root() == settings.load(None, {}, {}).paths.root / "state"
