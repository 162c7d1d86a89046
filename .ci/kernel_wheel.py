"""The wheel of `pagewire` with compiled CPU kernels: the pure wheel, the libraries, and the tag of what they need.

The libraries are compiled from the sources in the wheel itself, by the code in it, which names them by a hash of
these sources: `pagewire.kernels.cpu.build` finds them by that name only.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

FOLDER = "pagewire/kernels/compiled"  # `pagewire.kernels.native.shipped.FOLDER`
# What every Linux with glibc has (PEP 600), and PyTorch needs as well. A library that needs libstdc++ would need a
# version of it, too.
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")
OLDEST_GLIBC = "2.17"  # older ones are not worth a name
RUNTIME = ("libstdc++.a", "libgcc_eh.a")  # of g++: C++ itself, and its exceptions
NEWEST_GCC = (4, 8)  # of libgcc_s's symbols, which each of these machines has
SHIP = """
import json, platform, sys
from pathlib import Path
from pagewire.kernels.cpu.build import compiled_for, ship

folder, names, linker = json.loads(sys.argv[1])
known = {isa.name: isa for isa in compiled_for(platform.machine())}
names = list(known) if names == ["all"] else names
if unknown := set(names) - set(known):
    sys.exit(f"no such instruction sets: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
for name in names:
    ship(known[name], Path(folder), linker)
"""


def kernel_wheel(pure: Path, names: list[str], out: Path, glibc: str = "") -> Path:
    """Make a wheel with the CPU kernels for some instruction sets out of the pure wheel, and return its path.

    names: of instruction sets, as in `build.compiled_for` this machine, or only "all". glibc: the version of the C
    library that they may need; default: what the linker of this machine makes of them.

    Raises:
        ValueError: a library needs more than the C library and libgcc_s, or a newer C library than `glibc`.
        subprocess.CalledProcessError: it does not compile, or a name is unknown.
    """
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        with zipfile.ZipFile(pure) as archive:
            archive.extractall(tree)
        compiled = tree / FOLDER
        compiled.mkdir()
        wanted = json.dumps([str(compiled), names, linker(glibc) if glibc else []])
        command = [sys.executable, "-B", "-W", "ignore", "-c", SHIP, wanted]
        subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
        tag = f"py3-none-{platform_tag(compiled.iterdir(), glibc)}"
        return packed(tree, out / pure.name.replace("py3-none-any", tag), tag)


def linker(glibc: str) -> list[str]:
    """The command that links objects of g++ for a machine with another version of the C library: ziglang's linker.

    It has the symbols of every version. The C++ runtime is g++'s own, as its code wants it.

    Raises:
        ValueError: the package ziglang is not installed. subprocess.CalledProcessError: there is no g++.
    """
    if find_spec("ziglang") is None:
        raise ValueError("ziglang links for another C library than this machine's: pip install ziglang")
    target = f"{platform.machine()}-linux-gnu.{glibc}"
    return [sys.executable, "-m", "ziglang", "cc", "-target", target, *map(archive_of_gcc, RUNTIME)]


def archive_of_gcc(name: str) -> str:
    """The path of a static library of g++."""
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def platform_tag(libraries: Iterable[Path], glibc: str = "") -> str:
    """The tag of machines that have what the libraries need, such as manylinux_2_34_x86_64, by readelf.

    glibc: the tag says this version, and no library may need a newer one.

    Raises:
        ValueError: a library needs more than the C library and libgcc_s, or a newer C library, or defines symbols
            for others beside its own.
    """
    newest = glibc or OLDEST_GLIBC
    for library in libraries:
        lines = readelf(library, "-dV")
        if shown := [name for name in shown_symbols(library) if not name.startswith("pagewire_")]:
            raise ValueError(f"{library.name} shows {', '.join(shown[:3])}, which other libraries may take")
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", lines)
        if foreign := [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)]:
            raise ValueError(f"{library.name} needs {', '.join(foreign)}, which not every machine has")
        if newer := [name for name in re.findall(r"Name: GCC_([\d.]+)", lines) if version(name) > NEWEST_GCC]:
            raise ValueError(f"{library.name} needs libgcc_s of GCC {', '.join(newer)}")
        needs = max(re.findall(r"Name: GLIBC_(2\.\d+)", lines), key=version, default=newest)
        if glibc and version(needs) > version(glibc):
            raise ValueError(f"{library.name} needs glibc {needs}, newer than {glibc}")
        newest = max(newest, needs, key=version)
    return f"manylinux_{newest.replace('.', '_')}_{platform.machine()}"


def shown_symbols(library: Path) -> list[str]:
    """The symbols that a library defines for others."""
    rows = (line.split() for line in readelf(library, "--dyn-syms").splitlines())
    return [row[7] for row in rows if len(row) > 7 and row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"]


def readelf(library: Path, what: str) -> str:
    """What readelf says of a library, in wide lines."""
    return subprocess.run(
        ["readelf", "-W", what, str(library)], capture_output=True, text=True, check=True
    ).stdout


def version(text: str) -> tuple[int, ...]:
    """Major and minor number of a version."""
    return tuple(map(int, text.split(".")[:2]))


def packed(tree: Path, wheel: Path, tag: str) -> Path:
    """Pack an unpacked wheel under another tag, with a new list of its files."""
    [info] = tree.glob("*.dist-info")
    description = (
        (info / "WHEEL").read_text("utf-8").replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    )
    (info / "WHEEL").write_text(re.sub(r"(?m)^Tag: .*$", f"Tag: {tag}", description), "utf-8")
    record = info / "RECORD"
    record.unlink()
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in tree.rglob("*") if path.is_file()):
            content, name = path.read_bytes(), path.relative_to(tree).as_posix()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            writer.writerow([name, f"sha256={digest}", len(content)])
            archive.writestr(name, content)
        own = record.relative_to(tree).as_posix()
        writer.writerow([own, "", ""])
        archive.writestr(own, rows.getvalue())
    return wheel
