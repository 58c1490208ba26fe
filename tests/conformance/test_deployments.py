"""Files of deploy/ for containers, compose and Kubernetes: their forms, and that they agree with the server's settings.

No cluster and no container runs here. Kubernetes' own schemas come with a package, and the parts of custom resources
that are pods are checked as pods.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ipc import settings
from penstock import cli
from penstock.command_line import parser
from tests.conformance.required_tool import required_tool
from tests.conformance.test_prometheus_rules import promtool
from tools.source_tree import ROOT

CONTAINER, KUBERNETES = ROOT / "deploy" / "container", ROOT / "deploy" / "kubernetes"
FILES = sorted(path.name for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
VERSIONS = ("1.29", kubernetes_validate.latest_version())
CUSTOM = {"PodMonitor", "ClusterServingRuntime"}
RUNTIME_FIELDS = {"annotations", "containers", "protocolVersions", "supportedModelFormats", "volumes"}


def read(path: Path) -> Any:
    """A YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def as_pod(spec: dict[str, Any]) -> dict[str, Any]:
    """A pod with the containers and volumes of another resource."""
    parts = {name: spec[name] for name in ("containers", "volumes")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": parts}


DEPLOYMENT = read(KUBERNETES / "deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
[SERVER] = POD["containers"]
COMPOSE = read(CONTAINER / "compose.yaml")


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> settings.Settings:
    """The settings that the image brings in its environment."""
    text = (CONTAINER / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^ENV (.*)$", text, re.MULTILINE):
        for pair in shlex.split(line):
            name, _, value = pair.partition("=")
            if name.startswith("PENSTOCK_"):
                monkeypatch.setenv(name, value)
    return settings.load(None, {})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_a_manifest_has_the_form_of_its_kind(name: str, version: str) -> None:
    manifest = read(KUBERNETES / name)
    if manifest["kind"] not in CUSTOM:
        kubernetes_validate.validate(manifest, version, strict=True)
    elif manifest["kind"] == "ClusterServingRuntime":
        kubernetes_validate.validate(as_pod(manifest["spec"]), version, strict=True)
        assert set(manifest["spec"]) == RUNTIME_FIELDS


def test_a_misspelt_field_is_noticed() -> None:
    wrong = json.loads(
        json.dumps(DEPLOYMENT).replace("terminationGracePeriodSeconds", "terminationGraceSeconds")
    )
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGraceSeconds"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)
    runtime = read(KUBERNETES / "cluster-serving-runtime.yaml")
    runtime["spec"]["containers"][0]["argz"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="argz"):
        kubernetes_validate.validate(as_pod(runtime["spec"]), VERSIONS[-1], strict=True)


def test_the_kustomization_lists_what_every_cluster_takes() -> None:
    listed = set(read(KUBERNETES / "kustomization.yaml")["resources"])
    assert listed == {name for name in FILES if read(KUBERNETES / name)["kind"] not in CUSTOM}


def test_ports_probes_and_selectors_are_those_of_the_image(image: settings.Settings) -> None:
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    server = image.server
    assert server.metrics_bind == server.health_bind
    addresses = {"http": server.bind, "grpc": image.grpc.bind, "metrics": server.metrics_bind}
    assert {name: address.rpartition(":")[2] for name, address in addresses.items()} == {
        name: str(port) for name, port in ports.items()
    }
    for probe, path in (
        ("startupProbe", "/livez"),
        ("livenessProbe", "/livez"),
        ("readinessProbe", "/readyz"),
    ):
        assert SERVER[probe]["httpGet"] == {"path": path, "port": "metrics"}
    assert {port["targetPort"] for port in read(KUBERNETES / "service.yaml")["spec"]["ports"]} <= set(ports)
    monitor = read(KUBERNETES / "podmonitor.yaml")["spec"]
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == ["metrics"]
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    assert read(KUBERNETES / "service.yaml")["spec"]["selector"] == labels
    exposed = re.search(r"^EXPOSE (.*)$", (CONTAINER / "Containerfile").read_text(), re.MULTILINE)
    assert exposed is not None and set(map(int, exposed[1].split())) == set(ports.values())


def test_a_stop_has_time_for_all_that_the_server_does(image: settings.Settings) -> None:
    drain_s = image.server.graceful_timeout_s + image.worker.drain_timeout_s
    pause_s = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > drain_s + pause_s
    assert int(COMPOSE["services"]["penstock"]["stop_grace_period"].removesuffix("s")) > drain_s


def test_shared_memory_holds_the_arenas_of_a_worker_and_of_all_frontends(image: settings.Settings) -> None:
    [shared] = [volume["emptyDir"] for volume in POD["volumes"] if volume["name"] == "shared-memory"]
    most = image.arena.bytes + 4 * image.arena.input_bytes
    assert shared["medium"] == "Memory"
    assert int(shared["sizeLimit"].removesuffix("Gi")) << 30 >= most
    assert int(COMPOSE["services"]["penstock"]["shm_size"].removesuffix("gb")) << 30 >= most


def test_the_settings_of_the_config_map_are_valid(image: settings.Settings, tmp_path: Path) -> None:
    [(name, text)] = read(KUBERNETES / "configmap.yaml")["data"].items()
    (tmp_path / name).write_text(text)
    found = settings.load(tmp_path / name, {})
    assert {"penstock", "penstock.default.svc.cluster.local"} <= set(found.server.allowed_hosts)
    assert {"name": "PENSTOCK_CONFIG", "value": f"/etc/penstock/{name}"} in SERVER["env"]


def test_the_arguments_of_the_runtime_are_flags_of_the_command(image: settings.Settings) -> None:
    [container] = read(KUBERNETES / "cluster-serving-runtime.yaml")["spec"]["containers"]
    found = settings.load(None, cli.flags_of(parser().parse_args(container["args"])))
    assert list(found.repository.dirs) == ["/mnt/models"] and found.grpc.bind == "0.0.0.0:9000"
    assert container["name"] == "kserve-container"
    port = container["ports"][0]["containerPort"]
    assert found.server.bind == f"0.0.0.0:{port}"
    assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {port}


def test_compose_mounts_files_that_exist_and_names_its_own_services() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (CONTAINER / source).is_file(), volume
    [source] = read(CONTAINER / "datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    [job] = read(CONTAINER / "prometheus.yml")["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert services["penstock"]["environment"]["PENSTOCK_SERVER__ALLOWED_HOSTS"] == host and port == "8081"
    shipped = read(ROOT / "deploy" / "prometheus" / "prometheus.yml")
    shipped["scrape_configs"][0]["static_configs"] = job["static_configs"]
    assert read(CONTAINER / "prometheus.yml") == shipped
    dashboards = read(ROOT / "deploy" / "grafana" / "provisioning" / "dashboards" / "penstock.yaml")
    place = dashboards["providers"][0]["options"]["path"]
    assert any(f":{place}/penstock.json" in volume for volume in services["grafana"]["volumes"])


def test_prometheus_takes_the_configuration_of_compose(tmp_path: Path) -> None:
    required_tool("promtool")
    for source in (CONTAINER / "prometheus.yml", ROOT / "deploy" / "prometheus" / "penstock.rules.yml"):
        shutil.copy(source, tmp_path)
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stderr
