"""A wheel with compiled CPU kernels: found where there is no compiler, and only beside their own sources."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from pagewire.kernels.cpu.build import STANDALONE, compiler_command
from tests.end_to_end.conftest import SMALL_CORE
from tests.packages.test_packages import Environment, Packages, ci_script, packages

pytestmark = pytest.mark.packages
__all__ = ["packages"]
ISA = "portable"  # the cheapest to compile
CHOOSE = """if True:
    from pagewire.kernels.cpu.library import choose, expected_isa
    chosen = choose()
    print(expected_isa(), chosen and chosen.isa.name)"""


@pytest.fixture(scope="module")
def wheel(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(
        ci_script("kernel_wheel")["kernel_wheel"](packages.wheel, [ISA], tmp_path_factory.mktemp("dist"))
    )


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("bare"), wheel)


def without_compiler(environment: Environment, *command: str) -> str:
    """What a command prints, errors included, in an environment without any program on PATH, and an empty cache."""
    cache = environment.folder / "cache"
    done = subprocess.run(
        [str(environment.folder / "bin" / command[0]), *command[1:]],
        cwd=environment.folder,
        env={"PATH": str(environment.folder / "no-programs"), "PAGEWIRE_CACHE_ROOT": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    assert not (cache / "kernels").exists(), "something was compiled"
    return done.stdout


def test_the_wheel_is_the_pure_one_with_libraries_and_their_tag(packages: Packages, wheel: Path) -> None:
    with zipfile.ZipFile(packages.wheel) as pure, zipfile.ZipFile(wheel) as archive:
        plain = {name for name in pure.namelist() if ".dist-info/" not in name}
        [library] = {name for name in archive.namelist() if ".dist-info/" not in name} - plain
        assert all(pure.read(name) == archive.read(name) for name in plain)
        [info] = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        tag = re.search(r"^Tag: py3-none-(manylinux_2_\d+_\w+)$", archive.read(info).decode(), re.M)
        assert b"Root-Is-Purelib: false" in archive.read(info)
    assert re.fullmatch(rf"pagewire/kernels/compiled/cpu-{ISA}-[0-9a-f]{{32}}\.so", library)
    assert tag is not None and tag[1] in wheel.name


def test_kernels_are_found_without_a_compiler(bare: Environment) -> None:
    assert without_compiler(bare, "python", "-c", CHOOSE).split()[-2:] == [ISA, ISA]
    said = without_compiler(bare, "pagewire", "generate", "The", "--max-tokens", "4", *SMALL_CORE)
    assert "unavailable" not in said and "compil" not in said
    assert f"{ISA}: they came with the wheel" in without_compiler(bare, "pagewire", "doctor")


def test_a_library_of_other_sources_does_not_count(bare: Environment) -> None:
    source = bare.site / "pagewire" / "kernels" / "cpu" / "prepare.cpp"
    content = source.read_text("utf-8")
    source.write_text(content + "\n", "utf-8")
    try:
        said = without_compiler(bare, "python", "-c", CHOOSE)
    finally:
        source.write_text(content, "utf-8")
    assert "no C++ compiler" in said and said.split()[-2:] == ["reference", "None"]


def test_a_library_that_needs_the_runtime_of_c_plus_plus_gets_no_tag(tmp_path: Path) -> None:
    source, library = tmp_path / "source.cpp", tmp_path / "library.so"
    source.write_text('#include <new>\nextern "C" void* f() { return ::operator new(8); }\n', "utf-8")
    compiler = [*compiler_command(), "-shared", "-fPIC", str(source), "-o", str(library)]
    platform_tag = ci_script("kernel_wheel")["platform_tag"]
    subprocess.run(compiler, check=True)
    with pytest.raises(ValueError, match=r"library\.so needs libstdc\+\+\.so\.6"):
        platform_tag([library])
    subprocess.run([*compiler, *STANDALONE], check=True)
    assert re.fullmatch(r"manylinux_2_\d\d_\w+", platform_tag([library]))
