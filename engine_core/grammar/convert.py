"""Converts a tokenizer that has no tokenizer.json, such as a tokenizer.model, to its content.

transformers does it, in a process of its own: it takes seconds and hundreds of megabytes to import, once, and the
core has neither.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.files.hub import check_files
from pagewire.ipc.host.lifeline import Child, die_with_parent

VOCABULARIES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
SECONDS = 300.0  # a machine that does much else takes minutes for the import


def needs_conversion(folder: Path) -> bool:
    """True if a folder has a tokenizer, but no tokenizer.json."""
    return not (folder / "tokenizer.json").is_file() and any(
        (folder / name).is_file() for name in VOCABULARIES
    )


def converted(folder: Path) -> Path:
    """A file with the content of a tokenizer.json for the tokenizer in a folder. Blocks for seconds.

    It is in memory, where the processes of this user find it for as long as this one runs.

    Raises:
        GrammarError: transformers cannot load the tokenizer, or it has no such form.
    """
    fd = os.memfd_create("tokenizer.json")
    command = [sys.executable, "-m", __name__, str(folder), "--output", str(fd)]
    child = Child(command, pass_fds=[fd])
    end = child.exit_cause(SECONDS)
    if end is None:
        child.kill()
    path = Path(f"/proc/{os.getpid()}/fd/{fd}")
    if end != "exited with status 0":
        reason = path.read_text(encoding="utf-8") or f"the process {end or f'took over {SECONDS:g} s'}"
        os.close(fd)
        raise GrammarError(
            f"structured outputs need a tokenizer.json; {folder} has none, and its tokenizer cannot be converted: "
            f"{reason}"
        )
    return path


def tokenizer_json(folder: Path) -> str:
    """The content of a tokenizer.json for the tokenizer in a folder; runs no code of the folder.

    Raises:
        ValueError, OSError: transformers cannot load it, or it is written in Python.
    """
    from transformers import AutoTokenizer

    check_files(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} is written in Python")
    content: str = backend.to_str()
    return content


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(
        description="pagewire process that converts a tokenizer (started by the core)"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.lifeline)
    with open(options.output, "w", encoding="utf-8") as output:  # noqa: PTH123
        try:
            output.write(tokenizer_json(options.folder))
        except Exception as error:
            output.write(f"{type(error).__name__}: {error}"[:1000])
            output.close()
            sys.exit(1)


if __name__ == "__main__":
    main()
