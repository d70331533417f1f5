"""The manifests in `deploy/kubernetes`: valid, whole, and with settings that Penstock takes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.entry import main
from penstock.config import parse_config
from tests.serve.conftest import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
FILES = sorted(FOLDER.glob("*.yaml"))
MONITOR = "pod-monitor.yaml"
VERSIONS = ("1.31", "1.37")
"""Those that the page names."""
RUN_S = 120.0


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


OBJECTS = [(path.name, each) for path in FILES for each in documents(path)]
WORKLOADS = [
    pytest.param(file, each, id=each["metadata"]["name"])
    for file, each in OBJECTS
    if "template" in each.get("spec", {})
]


def of_kind(kind: str, *, file: str = "") -> list[dict[str, Any]]:
    return [each for name, each in OBJECTS if each["kind"] == kind and file in {"", name}]


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    found = workload["spec"]["template"]
    assert isinstance(found, dict)
    return found


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    [found] = pod_of(workload)["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def pods() -> list[dict[str, Any]]:
    return [pod_of(each) for _, each in OBJECTS if "template" in each.get("spec", {})]


def gib_of(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


@pytest.mark.skipif(
    find_spec("kubernetes_validate") is None, reason="there is no kubernetes-validate"
)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", [each for each in FILES if each.name != MONITOR], ids=str)
def test_kubernetes_knows_every_field(path: Path, version: str) -> None:
    import kubernetes_validate  # noqa: PLC0415  # Many megabytes of schemas.

    for each in documents(path):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("config", of_kind("ConfigMap"), ids=range(3))
def test_every_file_of_settings_is_read(config: dict[str, Any]) -> None:
    for text in config["data"].values():
        parse_config(text)


@pytest.mark.parametrize(("file", "workload"), WORKLOADS)
def test_a_pod_finds_all_that_it_names(file: str, workload: dict[str, Any]) -> None:
    pod, container = pod_of(workload), container_of(workload)
    assert workload["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()

    volumes = {each["name"]: each for each in pod["spec"].get("volumes", [])}
    claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])}
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == volumes.keys() | claims
    named = {each["configMap"]["name"] for each in volumes.values() if "configMap" in each}
    assert named <= {each["metadata"]["name"] for each in of_kind("ConfigMap", file=file)}
    secrets = {each["secret"]["secretName"] for each in volumes.values() if "secret" in each}
    made = re.findall(r"create secret generic ([\w-]+(?:\$name)?)", text_of_comments())
    keys = {made_key.replace("$name", role) for made_key in made for role in roles()}
    assert secrets <= keys


def text_of_comments() -> str:
    return "".join(re.findall(r"^#.*\n", "".join(map(Path.read_text, FILES)), re.MULTILINE))


def roles() -> list[str]:
    found = re.search(r"kubernetes/keys keys ([\w ]+)\n", text_of_comments())
    assert found is not None
    return found[1].split()


@pytest.mark.parametrize("service", of_kind("Service"), ids=lambda each: each["metadata"]["name"])
def test_a_service_leads_to_a_pod_with_its_port(service: dict[str, Any]) -> None:
    selected = [
        pod
        for pod in pods()
        if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    ]

    [pod] = selected
    [container] = pod["spec"]["containers"]
    ports = {each["name"] for each in container.get("ports", [])}
    assert {each["targetPort"] for each in service["spec"].get("ports", [])} <= ports


def test_what_has_metrics_is_scraped() -> None:
    [monitor] = of_kind("PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    scraped = [pod for pod in pods() if wanted <= pod["metadata"]["labels"].items()]

    assert len(scraped) == 2
    for pod in scraped:
        [container] = pod["spec"]["containers"]
        assert endpoint["port"] in {each["name"] for each in container["ports"]}
        assert monitor["spec"]["jobLabel"] in pod["metadata"]["labels"]


@pytest.mark.parametrize(("file", "workload"), WORKLOADS)
def test_a_pod_has_memory_for_its_tiers_and_shared_memory(
    file: str, workload: dict[str, Any]
) -> None:
    volumes = pod_of(workload)["spec"]["volumes"]
    container = container_of(workload)
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    shared = [each["emptyDir"] for each in volumes if "emptyDir" in each]
    assert all(each["medium"] == "Memory" for each in shared)
    needed = sum(gib_of(each["sizeLimit"]) for each in shared)
    if "nvidia.com/gpu" in limits:
        [config] = of_kind("ConfigMap", file=file)
        kinds = parse_config(config["data"]["penstock.toml"]).tier_kinds
        needed += round(sum(each.gib or 0 for each in kinds if each.name == "host")) + 16

    assert gib_of(limits["memory"]) >= needed
    assert requests["memory"] == limits["memory"]
    assert "cpu" not in limits


@pytest.mark.parametrize(("file", "workload"), WORKLOADS)
def test_what_answers_requests_has_probes(file: str, workload: dict[str, Any]) -> None:
    container = container_of(workload)

    ports = {each["name"] for each in container.get("ports", [])}
    probed = {
        probe.get("httpGet", probe.get("tcpSocket", {}))["port"]
        for probe in (container.get("readinessProbe"), container.get("livenessProbe"))
        if probe
    }
    assert probed == ports, file


def test_the_disk_of_a_pod_has_room_for_its_tier_below_the_mount() -> None:
    [workload] = of_kind("StatefulSet", file="vllm.yaml")
    [config] = of_kind("ConfigMap", file="vllm.yaml")
    [claim] = workload["spec"]["volumeClaimTemplates"]
    room = gib_of(claim["spec"]["resources"]["requests"]["storage"])

    [disk] = [
        each
        for each in parse_config(config["data"]["penstock.toml"]).tier_kinds
        if each.name == "disk"
    ]

    # An eighth of it stays free for the file system.
    assert (disk.gib or 0) <= room * 7 / 8
    mounts = {each["name"]: each["mountPath"] for each in container_of(workload)["volumeMounts"]}
    assert Path(str(disk.options["path"])).parent == Path(mounts[claim["metadata"]["name"]])


def test_keys_of_pods_and_the_commands_of_the_roles_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "penstock"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    program.chmod(0o755)
    keys = tmp_path / "keys"
    subprocess.run(
        [FOLDER / "keys", keys, *roles()],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
        timeout=RUN_S,
        capture_output=True,
    )
    (tmp_path / "api.key").write_text("of the clients")
    (tmp_path / "api.key").chmod(0o600)
    make_checkpoint(tmp_path / "my-model")
    [config] = of_kind("ConfigMap", file="prefill-decode.yaml")
    settings = config["data"]["penstock.toml"].replace("/models/", f"{tmp_path}/")
    (tmp_path / "penstock.toml").write_text(settings)
    begun = []

    for workload in of_kind("Deployment", file="prefill-decode.yaml"):
        container = container_of(workload)
        role = workload["metadata"]["name"].removeprefix("penstock-")
        places = {
            "/etc/penstock/penstock.toml": str(tmp_path / "penstock.toml"),
            "/etc/penstock-keys/machine.keys": str(keys / role),
            "/etc/penstock-api/key": str(tmp_path / "api.key"),
            "--device=cuda": "--device=cpu",
        }
        program_name, *arguments = [*container["command"], *container["args"]]
        for inside, here in places.items():
            arguments = [each.replace(inside, here) for each in arguments]
        assert program_name == "penstock"
        assert main([*arguments, "--print-config"]) == 0, capsys.readouterr().err
        printed = capsys.readouterr().out
        begun += re.findall(r'^role = "(\w+)"', printed, re.MULTILINE)
        assert pod_of(workload)["spec"]["hostname"] == workload["metadata"]["name"]

    assert sorted(begun) == sorted(roles())


def test_the_commands_of_the_page_and_of_the_comments_name_files_that_exist() -> None:
    texts = [PAGE, text_of_comments()]
    named = [
        word
        for text in texts
        for line in re.findall(r"^[$#] +((?:kubectl|deploy/).*)$", text, re.MULTILINE)
        for word in shlex.split(line.partition(";")[0])
        if word.startswith("deploy/")
    ]

    assert len(named) > 6
    assert all((ROOT / each).is_file() for each in named)
    assert f"{VERSIONS[0]} and {VERSIONS[1]}" in PAGE
