"""The files in `deploy/`: each parses, what it names exists, and the command line knows the options in it."""

from __future__ import annotations

import configparser
import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagewire.cli.commands import build_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
YAML = sorted(
    path
    for path in [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")]
    if path.parent.name != "templates"  # of a chart: no YAML before it is rendered
)
KUBERNETES = sorted(
    path for path in (DEPLOY / "kubernetes").rglob("*.yaml") if path.name != "kustomization.yaml"
)
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile*"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
LONG_RUNNING = {"serve", "worker", "core", "route"}


def name_of(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def nodes(value: Any) -> Iterator[Any]:
    """A value and everything in it."""
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(item)


def in_text(text: str) -> list[list[str]]:
    """The `pagewire` commands in a text of shell, with values in place of its variables."""
    variable = re.compile(r"\$\{?\(?[A-Z_]+(?::-(\w+))?[)}]?")
    filled = variable.sub(lambda match: match[1] or "value", text.replace("\\\n", " "))
    lines = re.findall(r"(?:^|[\s/])pagewire ((?:serve|worker|core|route) [^&|\n]+)", filled)
    return [shlex.split(line) for line in lines]


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, as pairs of name and rest."""
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text("utf-8")).replace("\\\n", " ")
    return [
        (line.partition(" ")[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()
    ]


def commands() -> Iterator[tuple[str, list[str]]]:
    """All commands of pagewire in the files: in texts, as lists of words, and of the images' own."""
    for path in YAML:
        for node in nodes(documents(path)):
            if isinstance(node, str):
                yield from ((name_of(path), words) for words in in_text(node))
            elif isinstance(node, list) and node and str(node[0]) in LONG_RUNNING:
                yield name_of(path), [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", str(word)) for word in node]
    for path in [*UNITS, DEPLOY / "skypilot.yaml"]:
        yield from ((name_of(path), words) for words in in_text(path.read_text("utf-8")))
    for path in DOCKERFILES:
        yield name_of(path), json.loads(dict(instructions(path))["CMD"])
    entry = re.search(r"^entrypoint = (\[.*\])$", (DEPLOY / "cerebrium.toml").read_text("utf-8"), re.M)
    assert entry is not None
    yield "cerebrium.toml", json.loads(entry[1])[1:]


@pytest.mark.parametrize(("place", "words"), [pytest.param(*found, id=found[0]) for found in commands()])
def test_commands_are_known(place: str, words: list[str]) -> None:
    options = build_parser(only=words[0]).parse_args(words)
    if words[0] == "worker":
        assert options.join.startswith("tcp://")


def test_every_launcher_and_file_has_commands() -> None:
    assert len(list(commands())) >= 12
    text = " ".join(" ".join(words) for _, words in commands())
    assert "--distributed-executor-backend join" in text and "--attach" in text


@pytest.mark.parametrize("path", KUBERNETES, ids=name_of)
def test_kubernetes(path: Path) -> None:
    """Each object has its type and name, each mount its volume, each probe a path that the server answers."""
    for document in documents(path):
        assert document["apiVersion"] and document["kind"] and document["metadata"]["name"]
        for node in nodes(document):
            if not isinstance(node, dict):
                continue
            if "containers" in node:
                volumes = {volume["name"] for volume in node.get("volumes", ())}
                mounts = [mount for each in node["containers"] for mount in each.get("volumeMounts", ())]
                assert {mount["name"] for mount in mounts} <= volumes, path
                assert all(each["name"] and each["image"] for each in node["containers"])
            if "httpGet" in node:
                assert node["httpGet"]["path"] in ("/health", "/ready")


def test_the_deployment_drains_and_is_confined() -> None:
    deployment, service, claim = documents(DEPLOY / "kubernetes" / "base" / "pagewire.yaml")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
    assert (
        pod["terminationGracePeriodSeconds"] > 30 and container["securityContext"]["readOnlyRootFilesystem"]
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= labels
    assert claim["metadata"]["name"] in str(pod["volumes"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_dockerfiles(path: Path) -> None:
    lines = instructions(path)
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK"}
    assert {name for name, _ in lines} <= known | {"STOPSIGNAL", "ENTRYPOINT", "CMD"}
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    for name, rest in lines:
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in ignored, source
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(rest))
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
            assert "apt-get install" not in rest or "--no-install-recommends" in rest
    names = [name for name, _ in lines]
    assert dict(lines)["USER"] == "10001" and names.index("USER") < names.index("ENTRYPOINT")
    probe = json.loads(dict(lines)["HEALTHCHECK"].partition("CMD ")[2])
    compile(probe[2], name_of(path), "exec")


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_what_images_install_is_pinned_and_exists(path: Path) -> None:
    text, project = path.read_text("utf-8"), (ROOT / "pyproject.toml").read_text("utf-8")
    extras = set(re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.M))
    cuda = re.search(r"ARG CUDA=(\w+)", text)
    [asked] = re.findall(r"-c constraints.txt ['\"]\.\[([\w,${}]+)\]", text)
    assert set(asked.replace("${CUDA}", cuda[1] if cuda else "").split(",")) <= extras
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    assert len(re.findall(r"^torch==", constraints, re.M)) == 1, "the images install the line of torch first"


def test_compose_names_what_exists() -> None:
    [compose] = documents(DEPLOY / "compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], (
                volume
            )
        assert set(service.get("depends_on", ())) <= compose["services"].keys()
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()
        for config in service.get("configs", ()):
            assert (DEPLOY / compose["configs"][config["source"]]["file"]).exists()
    assert (DEPLOY / compose["services"]["pagewire"]["build"]["context"] / "deploy" / "Dockerfile").exists()


def test_prometheus_and_grafana_find_each_other() -> None:
    [compose] = documents(DEPLOY / "compose.yaml")
    [prometheus] = documents(DEPLOY / "prometheus" / "prometheus.yml")
    [job] = prometheus["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in compose["services"] and job["metrics_path"] == "/metrics"
    [sources] = documents(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")
    assert (
        sources["datasources"][0]["url"] == "http://prometheus:9090" and "prometheus" in compose["services"]
    )
    [boards] = documents(DEPLOY / "grafana" / "provisioning" / "dashboards" / "pagewire.yaml")
    folder = boards["providers"][0]["options"]["path"]
    assert f":{folder}/pagewire.json:" in str(compose["services"]["grafana"]["volumes"])
    dashboard = json.loads((ROOT / "frontend" / "server" / "operate" / "grafana.json").read_text("utf-8"))
    used = {
        node["uid"]
        for node in nodes(dashboard)
        if isinstance(node, dict) and node.get("type") == "prometheus" and "uid" in node
    }
    offered = {sources["datasources"][0]["uid"]}
    assert all(uid.startswith("$") or uid in offered for uid in used)


@pytest.mark.parametrize("path", UNITS, ids=name_of)
def test_units(path: Path, tmp_path: Path) -> None:
    text = path.read_text("utf-8")
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    assert {"Unit", "Service", "Install"} == set(unit.sections())
    assert unit["Service"]["NoNewPrivileges"] == "yes" and unit["Service"]["KillSignal"] == "SIGTERM"
    if shutil.which("systemd-analyze") is None:
        return
    for other in UNITS:  # units name each other
        program = f'ExecStart="{sys.executable}"'  # a checkout may lie in a folder with a space
        start = re.sub(r"ExecStart=\S+", lambda _, text=program: text, other.read_text("utf-8"))
        (tmp_path / other.name).write_text(start.replace("User=pagewire", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)], capture_output=True, text=True
    )
    complaints = [line for line in done.stderr.splitlines() if path.name in line]
    assert complaints == []


@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile", "triton/pagewire/config.pbtxt"])
def test_braces_balance(name: str) -> None:
    """No parser of these formats is at hand; what can be wrong most easily is the nesting, and an end of a line."""
    text = re.sub(r"#.*", "", (DEPLOY / name).read_text("utf-8"))
    depth = 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    if name == "nginx.conf":
        assert all(line.rstrip()[-1] in "{};" for line in text.splitlines() if line.strip())


def test_other_formats_parse() -> None:
    if sys.version_info >= (3, 11):
        import tomllib

        for path in DEPLOY.rglob("*.toml"):
            tomllib.loads(path.read_text("utf-8"))
    patterns = (DEPLOY / "cerebrium.toml").read_text("utf-8")
    included = re.findall(r'"([\w*.]+(?:/\*)?)"', re.search(r"include = \[(.*)\]", patterns)[1])  # type: ignore[index]
    names = {path.name for path in ROOT.iterdir()}
    assert all(fnmatch.filter(names, pattern.partition("/")[0]) for pattern in included)
    for path in YAML:
        assert documents(path)
    for path in DEPLOY.rglob("*.py"):
        compile(path.read_text("utf-8"), name_of(path), "exec")
