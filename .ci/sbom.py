"""Writes a software bill of materials: CycloneDX JSON of what `pip install -c constraints.txt .` brings along.

    python .ci/sbom.py [build/sbom.json]

The dependencies, optional ones included, come from the metadata of the installed packages; versions come from
constraints.txt, or from what is installed. Files of other projects that the page ships (vendored.json) are listed,
too, each with what is bundled in it. Nothing is fetched. Exit status 1: an installed package has another version
than constraints.txt.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "pagewire"
VENDORED = ROOT / "frontend" / "server" / "page" / "vendor" / "vendored.json"
DEVELOPMENT = {"dev", "docs"}  # extras that users do not install
LICENSE_WORDS = 8  # longer fields of this name hold the license's text, not its name


def pinned_versions() -> dict[str, str]:
    """The version of each package in constraints.txt, by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def found(name: str) -> Distribution | None:
    """The installed package of this name; None if it is not installed."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def requirements(name: str, extras: set[str]) -> Iterator[Requirement]:
    """What an installed package needs on this platform, with extras."""
    package = found(name)
    for text in (package.requires if package else None) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield requirement


def dependency_graph() -> dict[str, set[str]]:
    """The packages that each package needs, from the project on, by canonical name."""
    metadata = distribution(PROJECT).metadata
    extras = set(metadata.get_all("Provides-Extra") or []) - DEVELOPMENT
    graph: dict[str, set[str]] = {}
    pending = [(PROJECT, extras)]
    while pending:
        name, wanted = pending.pop()
        needed = {canonicalize_name(each.name): set(each.extras) for each in requirements(name, wanted)}
        new = needed.keys() - graph.keys() - {name}
        graph.setdefault(name, set()).update(needed)
        pending += [(other, needed[other]) for other in new]
    return graph


def licenses(package: Distribution | None) -> list[dict[str, Any]]:
    """The licenses that an installed package declares."""
    if package is None:
        return []
    if expression := package.metadata.get("License-Expression"):
        return [{"expression": expression}]
    named = [text for text in package.metadata.get_all("Classifier") or [] if text.startswith("License ::")]
    text = package.metadata.get("License") or ""
    names = [text.rpartition(" :: ")[2] for text in named] or [text]
    return [{"license": {"name": name}} for name in names if 0 < len(name.split()) <= LICENSE_WORDS]


def reference(name: str, version: str | None) -> str:
    """The package URL."""
    return f"pkg:pypi/{name}" + (f"@{version}" if version else "")


def component(name: str, version: str | None, kind: str = "library") -> dict[str, Any]:
    """A package, as CycloneDX describes it. version: None if it is neither pinned nor installed."""
    package, url = found(name), reference(name, version)
    entry: dict[str, Any] = {"type": kind, "bom-ref": url, "name": name, "purl": url}
    if version:
        entry["version"] = version
    if declared := licenses(package):
        entry["licenses"] = declared
    return entry


def vendored() -> list[dict[str, Any]]:
    """The packages of npm that the page ships a file of. What is bundled in one is known by name only."""
    entries = json.loads(VENDORED.read_text(encoding="utf-8"))
    return [
        {
            "type": "library",
            "bom-ref": (url := f"pkg:npm/{entry['name']}@{entry['version']}"),
            "name": entry["name"],
            "purl": url,
            "version": entry["version"],
            "licenses": [{"license": {"id": entry["license"]}}],
            "hashes": [{"alg": "SHA-256", "content": entry["sha256"]}],
            "components": [
                {"type": "library", "name": name, "licenses": [{"license": {"id": declared}}]}
                for name, declared in entry["bundles"].items()
            ],
        }
        for entry in entries
    ]


def bill(graph: dict[str, set[str]], versions: dict[str, str]) -> dict[str, Any]:
    """The whole document. Equal inputs give equal documents."""
    installed = {name: package.version for name in graph if (package := found(name)) is not None}
    known = {name: versions.get(name, installed.get(name)) for name in graph}
    references = {name: reference(name, version) for name, version in known.items()}
    dependencies: list[dict[str, Any]] = [
        {"ref": references[name], "dependsOn": sorted(references[other] for other in needs)}
        for name, needs in sorted(graph.items())
    ]
    shipped = vendored()
    for entry in dependencies:
        if entry["ref"] == references[PROJECT]:
            entry["dependsOn"] = sorted([*entry["dependsOn"], *(each["bom-ref"] for each in shipped)])
    dependencies += [{"ref": each["bom-ref"], "dependsOn": []} for each in shipped]
    components = [component(name, known[name]) for name in sorted(graph.keys() - {PROJECT})] + shipped
    content = json.dumps([components, dependencies], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, content).urn,
        "version": 1,
        "metadata": {"component": component(PROJECT, known[PROJECT], "application")},
        "components": components,
        "dependencies": dependencies,
    }


def problems(graph: dict[str, set[str]], versions: dict[str, str]) -> Iterator[str]:
    """Installed packages of another version than constraints.txt says. A local version (+cpu) is the same."""
    for name in sorted(graph.keys() & versions.keys()):
        package = found(name)
        if package is not None and package.version.partition("+")[0] != versions[name]:
            yield f"{name} {package.version} is installed, but constraints.txt says {versions[name]}"


def main() -> int:
    """Write the file. Returns the exit status."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "sbom.json"
    graph, versions = dependency_graph(), pinned_versions()
    if wrong := list(problems(graph, versions)):
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    document = bill(graph, versions)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{len(document['components'])} packages in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
