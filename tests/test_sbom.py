"""The bill of materials names all that an installation brings along, and refuses versions that were not tested."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPT = Path(__file__).parents[1] / ".ci" / "sbom.py"


def test_the_bill_has_every_dependency_with_its_version(tmp_path: Path) -> None:
    target = tmp_path / "sbom.json"
    done = subprocess.run([sys.executable, str(SCRIPT), str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(target.read_text())
    components = {entry["name"]: entry for entry in document["components"]}
    needed = {
        canonicalize_name(Requirement(text).name)
        for text in requires("pagewire") or []
        if not text.endswith(("'dev'", "'docs'", '"dev"', '"docs"'))
    }
    assert needed <= components.keys() and not {"pytest", "mypy"} & components.keys()
    assert components["msgspec"]["purl"] == f"pkg:pypi/msgspec@{components['msgspec']['version']}"
    page = components["markdown-it"]
    assert page["purl"] == f"pkg:npm/markdown-it@{page['version']}"
    assert page["licenses"] == [{"license": {"id": "MIT"}}]
    assert {each["name"] for each in page["components"]} >= {"entities", "mdurl"}
    project = document["metadata"]["component"]["bom-ref"]
    needs = {entry["ref"]: entry["dependsOn"] for entry in document["dependencies"]}
    assert page["bom-ref"] in needs[project]
    references = {entry["bom-ref"] for entry in [*components.values(), document["metadata"]["component"]]}
    assert {entry["ref"] for entry in document["dependencies"]} == references
    assert {other for entry in document["dependencies"] for other in entry["dependsOn"]} <= references


def test_a_version_that_was_not_tested_is_named() -> None:
    problems = runpy.run_path(str(SCRIPT))["problems"]
    assert not list(problems({"msgspec": set()}, {}))
    (text,) = problems({"msgspec": set()}, {"msgspec": "0.0.1"})
    assert text.startswith("msgspec ") and text.endswith("but constraints.txt says 0.0.1")
