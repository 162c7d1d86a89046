"""What is published installs alone: wheels in environments without the repository, with what they depend on alone.

Nothing is fetched: an environment gets the dependencies that the wheel names as links to those of the tests' own.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.end_to_end.conftest import SMALL_CORE

pytestmark = pytest.mark.packages
ROOT = Path(__file__).parents[2]
CLIENT_BYTES = 64e6
MODULES = ("cli", "engine_core", "frontend", "ipc", "kernels", "workers")


class Packages(NamedTuple):
    """The files that are published."""

    sdist: Path
    wheel: Path
    client: Path


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(*ci_script("packages")["build"](tmp_path_factory.mktemp("dist")))


def ci_script(name: str) -> dict[str, Any]:
    """The names of a script in .ci, whose neighbours are found as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / ".ci"))
        return runpy.run_path(str(ROOT / ".ci" / f"{name}.py"))


class Environment:
    """A virtual environment with one wheel and what it depends on. folder: its place; site: where packages lie."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False)
        [self.site] = folder.glob("lib/python*/site-packages")
        install = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "--python",
            str(folder),
            "install",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run([*install, "--no-compile", str(wheel)], check=True)
        [own] = (PathDistribution(path) for path in self.site.glob("pagewire*.dist-info"))
        self.dependencies = closure(own)
        for package in self.dependencies:
            self._link(package)

    def _link(self, package: Distribution) -> None:
        """Link the top-level files and folders of a package of the tests' environment."""
        base = Path(str(package.locate_file("")))
        for name in {Path(str(file)).parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (self.site / name).exists():
                (self.site / name).symlink_to(base / name)

    @property
    def num_bytes(self) -> int:
        """Size of all that is installed, as pip unpacks it: without bytecode."""
        files = [file for package in self.dependencies for file in package.files or ()]
        own = [path for path in self.site.rglob("*") if path.is_file() and "pagewire" in str(path)]
        sizes = (Path(str(file.locate())) for file in files if file.suffix != ".pyc")
        return sum(path.stat().st_size for path in [*sizes, *own] if path.exists())

    def command(self, *words: str) -> list[str]:
        return [str(self.folder / "bin" / "pagewire"), *words]

    def run(self, *words: str, status: int = 0) -> str:
        """Run a `pagewire` command far from the repository, and return what it prints, errors included."""
        done = subprocess.run(
            self.command(*words), cwd=self.folder, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *words: str) -> tuple[subprocess.Popen[str], str]:
        """Start a server or a core, and return it with the address where it is ready."""
        process = subprocess.Popen(self.command(*words), cwd=self.folder, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        assert ready[:1] == ["ready"], ready
        return process, ready[1]


def closure(own: Distribution) -> list[Distribution]:
    """The installed packages that a distribution needs, and those that they need."""
    found: dict[str, Distribution] = {}
    open_ = list(own.requires or ())
    while open_:
        requirement = Requirement(open_.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            pytest.fail(f"{name} is needed, and the tests' environment lacks it")
        open_ += found[name].requires or ()
    return list(found.values())


def metadata(wheel: Path) -> list[str]:
    """The requirements that a wheel names."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.M)


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0


def fetched(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def full(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("full"), packages.wheel)


@pytest.fixture(scope="module")
def client(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("client"), packages.client)


@pytest.fixture(scope="module")
def core(full: Environment) -> Iterator[str]:
    """The address of a core of the installed wheel."""
    process, address = full.start(
        "core", "--model", "demo", "--listen", f"ipc://{full.folder}/core", *SMALL_CORE
    )
    yield address
    stop(process)


def test_the_wheel_has_all_of_the_product_and_nothing_else(packages: Packages) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *MODULES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wanted = {
        f"pagewire/{name}" for name in tracked.stdout.split("\0") if name and not name.endswith("README.md")
    }
    wanted |= {
        str(path.relative_to(ROOT)) for path in (ROOT / "pagewire").rglob("*.*") if path.suffix != ".pyc"
    }
    with zipfile.ZipFile(packages.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert wanted - names == set()
    inner = {path.name for path in (ROOT / "pagewire").iterdir() if path.is_dir()} - {"__pycache__"}
    assert {name.split("/")[1] for name in names if name.count("/") > 1} == inner | set(MODULES)
    with tarfile.open(packages.sdist) as archive:
        parts = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert not parts & {"tests", "benchmarks", "docs", "build"}


def test_the_client_is_a_part_of_the_package(packages: Packages) -> None:
    with zipfile.ZipFile(packages.wheel) as archive, zipfile.ZipFile(packages.client) as part:
        whole = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
        small = {name: part.read(name) for name in part.namelist() if ".dist-info/" not in name}
        versions = [name.split("-")[1] for name in (packages.wheel.name, packages.client.name)]
    assert small.items() <= whole.items() and versions[0] == versions[1]
    assert not [name for name in small if re.match(r"pagewire/(engine_core|workers|kernels|demo\w*)/", name)]
    main, own = (
        {line for line in metadata(path) if "extra ==" not in line}
        for path in (packages.wheel, packages.client)
    )
    assert own < main, "a bound of the client differs"


def test_the_wheel_serves_and_generates(full: Environment) -> None:
    assert "complete a prompt" in full.run("--help")
    assert len(full.run("generate", 'The "with" statement', "--max-tokens", "8").split()) > 3
    process, url = full.start("serve", "demo", "--port", "0", *SMALL_CORE)
    page = fetched(url)
    for name in re.findall(r'(?:src|href)="([\w./-]+\.(?:js|css|svg))"', page):
        assert fetched(f"{url}/{name.lstrip('/')}"), name
    answer = json.loads(fetched(f"{url}/v1/completions", {"model": "demo", "prompt": "The", "max_tokens": 4}))
    assert answer["usage"]["completion_tokens"] == 4
    stop(process)


def test_the_client_uses_a_core(client: Environment, core: str) -> None:
    text = client.run("generate", "The", "--max-tokens", "5", "--temperature", "0", "--attach", core)
    process, url = client.start("serve", "--attach", core, "--port", "0")
    body = {"model": "demo", "prompt": "The", "max_tokens": 5, "temperature": 0}
    [choice] = json.loads(fetched(f"{url}/v1/completions", body))["choices"]
    assert choice["text"].strip() == text.strip()
    assert "<html" in fetched(url)
    report = client.run("bench", "serve", "--base-url", url, "--num-prompts", "4")
    assert "4" in report
    assert json.loads(client.run("top", "--attach", core, "--once", "--json"))
    stop(process)


def test_the_client_is_small_and_says_what_it_lacks(client: Environment) -> None:
    names = {canonicalize_name(package.metadata["Name"]) for package in client.dependencies}
    assert not names & {"torch", "transformers", "numpy", "llguidance"}
    assert client.num_bytes < CLIENT_BYTES, f"{client.num_bytes / 1e6:.1f} MB"
    for words in (["core", "--model", "demo"], ["generate", "The"], ["inspect", "demo"]):
        assert "install pagewire in its place" in client.run(*words, status=1)
