"""Compares the files of other projects in the page (frontend/server/page/vendor/) with what npm has of them.

    python .ci/vendored.py

vendored.json there names package, version, file and checksums. Needs npm and its registry. Exit status 1: something
differs. To take a newer version, copy its file and write its entry and its license anew.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

VENDOR = Path(__file__).resolve().parents[1] / "frontend" / "server" / "page" / "vendor"


def packed(name: str, version: str, folder: Path) -> Path:
    """The archive of a package, as npm fetches it into a folder.

    Raises:
        subprocess.CalledProcessError: npm found none.
    """
    command = ["npm", "pack", f"{name}@{version}", "--json"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return folder / str(json.loads(done.stdout)[0]["filename"])


def differences(entry: dict[str, str], archive: Path) -> Iterator[str]:
    """What is not as the archive has it."""
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if integrity != entry["integrity"]:
        yield f"{archive.name} has the checksum {integrity}, not {entry['integrity']}"
    with tarfile.open(archive) as files:
        member = files.extractfile(f"package/{entry['published']}")
        if member is None or member.read() != (VENDOR / entry["file"]).read_bytes():
            yield f"{entry['file']} is not {entry['published']} of {archive.name}"


def main() -> int:
    """Compare all entries. Returns the exit status."""
    entries = json.loads((VENDOR / "vendored.json").read_text(encoding="utf-8"))
    wrong = []
    for entry in entries:
        with tempfile.TemporaryDirectory() as folder:
            wrong += differences(entry, packed(entry["name"], entry["version"], Path(folder)))
    print(*(wrong or [f"{len(entries)} as published"]), sep="\n", file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
