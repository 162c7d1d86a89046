"""The Helm chart and the Kustomize folders: rendered, checked, and the same servers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pagewire.cli.commands import build_parser
from pagewire.ipc.version import __version__
from tests.deploy.go_template import render
from tests.deploy.test_deploy import DEPLOY, ROOT, nodes

CHART = DEPLOY / "helm" / "pagewire"
KUSTOMIZE = DEPLOY / "kubernetes"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
METADATA = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
AUTOSCALED = {"autoscaling": {"enabled": True}, "cache": {"accessModes": ["ReadWriteMany"]}}
OTHERS = {
    "keysSecret": "",
    "args": [],
    "image": {"tag": "cuda"},
    "model": "owner/model",
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "cache": {"storageClass": "fast"},
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
Objects = dict[str, Any]


def merged(base: Any, changes: Any) -> Any:
    """Values as Helm merges them: dictionaries by their keys, all else as a whole."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return base | {name: merged(base.get(name), item) for name, item in changes.items()}


def by_kind(documents: list[Any]) -> Objects:
    objects = {document["kind"]: document for document in documents if document}
    assert len(objects) == len([document for document in documents if document])
    return objects


def charted(changes: dict[str, Any], release: str = "pagewire") -> Objects:
    """The objects of the chart with some values."""
    values = merged(deepcopy(VALUES), changes)
    jsonschema.validate(values, SCHEMA)
    context = {
        "Values": values,
        "Release": {"Name": release},
        "Chart": {"AppVersion": METADATA["appVersion"]},
    }
    texts = [render(path.read_text("utf-8"), context) for path in sorted(CHART.glob("templates/*.yaml"))]
    return by_kind([document for text in texts for document in yaml.safe_load_all(text)])


def helm(changes: dict[str, Any], folder: Path) -> Objects:
    """The same by Helm."""
    (folder / "values.yaml").write_text(yaml.safe_dump(changes), "utf-8")
    command = ["helm", "template", "pagewire", str(CHART), "--kube-version", "1.30"]
    done = subprocess.run(
        [*command, "-f", str(folder / "values.yaml")], capture_output=True, text=True, check=True
    )
    return by_kind(list(yaml.safe_load_all(done.stdout)))


def kustomized(folder: Path) -> Objects:
    """The objects of a folder: its resources, with the patches (add, remove, replace) and images of its file."""
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    objects: Objects = {}
    for name in plan["resources"]:
        resource = folder / name
        if resource.is_dir():
            objects |= kustomized(resource)
        else:
            objects |= by_kind(list(yaml.safe_load_all(resource.read_text("utf-8"))))
    for patch in plan.get("patches", ()):
        target = objects[patch["target"]["kind"]]
        assert target["metadata"]["name"] == patch["target"]["name"]
        for operation in yaml.safe_load(patch["patch"]):
            *parents, last = operation["path"].lstrip("/").split("/")
            place = target
            for parent in parents:
                place = place[parent]
            assert last in place, operation
            if operation["op"] == "remove":
                del place[last]
            else:
                place[last] = operation["value"]
    for image in plan.get("images", ()):
        for node in nodes(list(objects.values())):
            if isinstance(node, dict) and node.get("image") == image["name"]:
                node["image"] = f"{image['name']}:{image['newTag']}"
    return objects


@pytest.mark.parametrize(
    ("changes", "folder"), [({}, KUSTOMIZE / "base"), (AUTOSCALED, KUSTOMIZE / "autoscaled")]
)
def test_the_chart_makes_what_kustomize_makes(changes: dict[str, Any], folder: Path) -> None:
    ours, theirs = charted(changes), kustomized(folder)
    container = ours["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert (
        container.pop("imagePullPolicy") == "IfNotPresent"
        and ours["Service"]["spec"].pop("type") == "ClusterIP"
    )
    assert ours == theirs
    assert ("HorizontalPodAutoscaler" in ours) == bool(changes)


@pytest.mark.parametrize("changes", [{}, AUTOSCALED, OTHERS])
def test_objects_belong_together(changes: dict[str, Any]) -> None:
    objects = charted(changes, release="mine")
    pod = objects["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"].items()
    for selector in (
        objects["Service"]["spec"]["selector"],
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector and selector.items() <= labels
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    [port] = container["ports"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert all(probe["port"] == port["name"] for probe in probes)
    assert [probe["path"] for probe in probes] == ["/ready", "/health", "/ready"]
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    build_parser(only="serve").parse_args(container["args"])
    if scaler := objects.get("HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
        assert "replicas" not in objects["Deployment"]["spec"], "each change would undo the autoscaler's"


@pytest.mark.parametrize("changes", [{}, AUTOSCALED, OTHERS])
def test_pods_are_confined(changes: dict[str, Any]) -> None:
    """What Kubernetes' standard `restricted` asks of pods, and a root that is read only."""
    pod = charted(changes)["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    stop = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(stop[1]) + 25


def test_values_change_what_they_say() -> None:
    pod = charted(OTHERS)["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"] == ["serve", "owner/model", "--host=0.0.0.0"]
    assert container["image"] == "my-registry/pagewire:cuda" and container["resources"]["limits"]
    assert "keys" not in {volume["name"] for volume in pod["volumes"]}
    assert pod["nodeSelector"] and pod["tolerations"]
    assert (
        charted({"autoscaling": {"enabled": True, "waitingRequests": 9}})["HorizontalPodAutoscaler"]["spec"][
            "metrics"
        ][0]["pods"]["target"]["averageValue"]
        == "9"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"modle": "demo"},
        {"model": ""},
        {"args": ["--api-key=secret"]},
        {"replicas": "one"},
        {"cache": {"size": "much"}},
        {"autoscaling": {"waitingRequests": 0}},
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        charted(changes)


def test_every_value_is_used_and_has_a_schema() -> None:
    used = set(
        re.findall(r"\.Values\.(\w+)", "".join(path.read_text("utf-8") for path in CHART.glob("templates/*")))
    )
    assert used == set(VALUES) == set(SCHEMA["properties"]) - {"global"}
    assert METADATA["appVersion"] == __version__ and METADATA["name"] == CHART.name
    [image] = yaml.safe_load((KUSTOMIZE / "base" / "kustomization.yaml").read_text("utf-8"))["images"]
    assert image["newTag"] == __version__


def test_autoscalers_ask_for_a_metric_that_there_is() -> None:
    """The adapter's rule gives the metric the name that the autoscaler asks for; KEDA asks by its own name."""
    source = (ROOT / "engine_core" / "metrics" / "metrics.py").read_text("utf-8")
    [rule] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus-adapter.yaml").read_text("utf-8"))["rules"][
        "custom"
    ]
    [metric] = re.findall(r'__name__="([\w:]+)"', rule["seriesQuery"])
    assert f'gauge("{metric}"' in source
    asked = charted(AUTOSCALED)["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert asked == rule["name"]["as"] and ":" not in asked
    keda = yaml.safe_load((KUSTOMIZE / "keda.yaml").read_text("utf-8"))
    assert metric in keda["spec"]["triggers"][0]["metadata"]["query"]
    assert (
        keda["spec"]["scaleTargetRef"]["name"]
        == kustomized(KUSTOMIZE / "base")["Deployment"]["metadata"]["name"]
    )


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize("changes", [{}, AUTOSCALED, OTHERS])
def test_helm_renders_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    assert helm(changes, tmp_path) == charted(changes)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", ["base", "autoscaled"])
def test_kubectl_makes_the_same(name: str) -> None:
    command = ["kubectl", "kustomize", str(KUSTOMIZE / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert by_kind(list(yaml.safe_load_all(done.stdout))) == kustomized(KUSTOMIZE / name)
