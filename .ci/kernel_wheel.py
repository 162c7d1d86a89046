"""The wheel of `pagewire` with compiled CPU kernels: the pure wheel, the libraries, and the tag of what they need.

The libraries are compiled from the sources in the wheel itself, by the code in it, which names them by a hash of
these sources: `pagewire.kernels.cpu.build` finds them by that name only.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import platform
import re
import shlex
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
NEWEST_GCC = (4, 8)  # of libgcc_s's symbols, which each of these machines has
SHIP = """
import platform, sys
from pathlib import Path
from pagewire.kernels.cpu.build import compiled_for, ship

known = {isa.name: isa for isa in compiled_for(platform.machine())}
names = list(known) if sys.argv[2:] == ["all"] else sys.argv[2:]
if unknown := set(names) - set(known):
    sys.exit(f"no such instruction sets: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
for name in names:
    ship(known[name], Path(sys.argv[1]))
"""


def kernel_wheel(pure: Path, names: list[str], out: Path, glibc: str = "") -> Path:
    """Make a wheel with the CPU kernels for some instruction sets out of the pure wheel, and return its path.

    names: of instruction sets, as in `build.compiled_for` this machine, or only "all". glibc: the version of the C
    library that they may need, for which ziglang compiles them; by default the compiler of this machine does, for
    the C library that is here.

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
        command = [sys.executable, "-B", "-W", "ignore", "-c", SHIP, str(compiled), *names]
        environment = os.environ | {"PYTHONPATH": str(tree)} | ({"CXX": zig(glibc)} if glibc else {})
        subprocess.run(command, cwd=tree, env=environment, check=True)
        tag = f"py3-none-{platform_tag(compiled.iterdir(), glibc)}"
        return packed(tree, out / pure.name.replace("py3-none-any", tag), tag)


def zig(glibc: str) -> str:
    """The command of a C++ compiler that compiles for this machine with another version of the C library.

    Raises:
        ValueError: the package ziglang is not installed.
    """
    if find_spec("ziglang") is None:
        raise ValueError("kernels for another C library are compiled by ziglang: pip install ziglang")
    return f"{shlex.quote(sys.executable)} -m ziglang c++ -target {platform.machine()}-linux-gnu.{glibc}"


def platform_tag(libraries: Iterable[Path], glibc: str = "") -> str:
    """The tag of machines that have what the libraries need, such as manylinux_2_34_x86_64, by readelf.

    glibc: the tag says this version, and no library may need a newer one.

    Raises:
        ValueError: a library needs more than the C library and libgcc_s, or a newer C library.
    """
    newest = glibc or OLDEST_GLIBC
    for library in libraries:
        lines = subprocess.run(
            ["readelf", "-dVW", str(library)], capture_output=True, text=True, check=True
        ).stdout
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
