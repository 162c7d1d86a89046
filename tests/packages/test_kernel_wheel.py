"""A wheel with compiled CPU kernels: found where there is no compiler, and only beside their own sources."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from pagewire.kernels.cpu.build import EXPORTS, STANDALONE, compiler_command
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


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """A command that compiles an object whose code allocates as C++ does, and links it as `library.so`."""
    source = tmp_path / "source.cpp"
    source.write_text(
        '#include <new>\nextern "C" void* pagewire_f() { return ::operator new(8); }\n', "utf-8"
    )
    return [*compiler_command(), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "library.so")]


def hidden(folder: Path) -> list[str]:
    """The linker's flags of a library in a wheel."""
    exports = folder / "exports.map"
    exports.write_text(EXPORTS, "utf-8")
    return [*STANDALONE, f"-Wl,--version-script={exports}"]


def test_a_library_that_needs_the_runtime_of_c_plus_plus_gets_no_tag(
    small: list[str], tmp_path: Path
) -> None:
    library, platform_tag = tmp_path / "library.so", ci_script("kernel_wheel")["platform_tag"]
    subprocess.run(small, check=True)
    with pytest.raises(ValueError, match=r"library\.so needs libstdc\+\+\.so\.6"):
        platform_tag([library])
    subprocess.run([*small, *hidden(tmp_path)], check=True)
    assert re.fullmatch(r"manylinux_2_\d\d_\w+", platform_tag([library]))
    with pytest.raises(ValueError, match=r"needs glibc 2\.\d+, newer than 2\.1$"):
        platform_tag([library], "2.1")


def test_a_library_that_shows_its_runtime_to_others_gets_no_tag(small: list[str], tmp_path: Path) -> None:
    subprocess.run([*small, "-static-libstdc++"], check=True)
    with pytest.raises(ValueError, match=r"library\.so shows \w+"):
        ci_script("kernel_wheel")["platform_tag"]([tmp_path / "library.so"])


def test_a_library_is_linked_for_an_older_c_library(small: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="`make packages-kernels` installs it")
    script, parts = ci_script("kernel_wheel"), [tmp_path / "object.o", tmp_path / "library.so"]
    compiler = [word for word in small[:-2] if word != "-shared"]
    subprocess.run([*compiler, "-c", "-o", str(parts[0])], check=True)
    link = [*script["linker"]("2.28"), "-shared", str(parts[0]), "-o", str(parts[1])]
    subprocess.run([*link, *hidden(tmp_path)], check=True)
    assert script["platform_tag"]([parts[1]], "2.28").startswith("manylinux_2_28_")
    assert script["shown_symbols"](parts[1]) == ["pagewire_f"]
