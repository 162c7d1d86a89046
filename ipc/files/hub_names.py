"""Names of models in a repository of the hub with a quantisation, and which of its files such a name means.

    hf:owner/repository:Q4_K_M    hf:owner/repository    hf:owner/repository:file.gguf

`hf.co/` and `huggingface.co/` in place of `hf:` mean the same, as Ollama has them. No IO.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.gguf.file import is_gguf, parts_of
from pagewire.ipc.quoting import quoted, shortened

PREFIX = "hf:"
PREFIXES = (PREFIX, "hf.co/", "huggingface.co/")
LATEST = "latest"  # Ollama's clients append it to names without a tag
MAX_NAME = 96  # characters of a repository and of a tag, as the hub has it
PART = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
# In names of files: Q4_K_M, IQ4_XS, UD-Q4_K_XL, TQ1_0, MXFP4_MOE, BF16, fp16.
QUANTISATION = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[1-8](?:_[A-Za-z0-9]{1,3})*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
ORDER = (
    *("Q4_K_M", "Q4_K_S", "Q4_K_XL", "Q4_K_L", "Q4_0", "Q4_1", "IQ4_XS", "IQ4_NL", "Q5_K_M", "Q5_K_S"),
    *("Q5_0", "Q5_1", "Q6_K", "Q8_0", "Q3_K_M", "Q3_K_L", "Q3_K_S", "Q2_K", "MXFP4", "BF16", "F16", "F32"),
)
"""What a name without a quantisation means: the first of these that a repository has, else its first file."""
PROJECTOR = "mmproj"
NOT_MODELS = (PROJECTOR, "imatrix")  # projectors of pictures, and what was measured to quantise


class HubName(NamedTuple):
    """A repository, and the quantisation or the GGUF file that is meant; None: the one that is taken by default."""

    repository: str
    tag: str | None = None

    def __str__(self) -> str:
        """The name as it is listed."""
        return f"{PREFIX}{self.repository}" + (f":{self.tag}" if self.tag else "")


def hub_name(name: str) -> HubName | None:
    """Read a name; None if it does not begin as one of these.

    Raises:
        ModelNotFoundError: it begins so, and names no repository, or nothing in one.
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return None
    repository, colon, tag = name[len(prefix) :].partition(":")
    owner, _, own = repository.partition("/")
    parts = [owner, own, tag] if colon else [owner, own]
    if len(repository) > MAX_NAME or not all(is_part(part) for part in parts) or "--" in repository:
        raise ModelNotFoundError(
            f"{quoted(name)} is no name of a model: write {PREFIX}owner/repository, with a quantisation behind it "
            f"({PREFIX}owner/repository:Q4_K_M) or a file (:file.gguf)"
        )
    if not colon or tag == LATEST:
        return HubName(repository)
    return HubName(repository, tag if is_gguf(tag) else same_case(tag))


def is_part(text: str) -> bool:
    """True for what may stand between the marks of a name: never a path, nor a part of one that leads out."""
    return len(text) <= MAX_NAME and PART.fullmatch(text) is not None and ".." not in text


def quantisation_of(file: str) -> str | None:
    """The quantisation that the path of a GGUF file names, in capitals: the last one in it."""
    found = QUANTISATION.findall(str(parts_of(Path(file))[0]).removesuffix(".gguf"))
    return same_case(found[-1]) if found else None


def same_case(quantisation: str) -> str:
    """A quantisation in capitals, with one name for each: FP16 is F16."""
    capitals = quantisation.upper()
    return capitals.replace("FP", "F", 1) if capitals.startswith("FP") else capitals


def position(labels: Sequence[str | None], tag: str | None) -> int | None:
    """Which of some quantisations a tag means; None: none of them.

    Unsloth's mixtures (UD-Q4_K_XL) go without the mark as well, where there is no other of that name.
    """
    wanted = ORDER if tag is None else (tag, same_case(tag))
    plain = [label and label.removeprefix("UD-") for label in labels]
    for one in wanted:
        for names in (labels, plain):
            if one in names:
                return names.index(one)
    return 0 if tag is None and labels else None


def choose_gguf(files: Iterable[str], given: HubName) -> list[str]:
    """The GGUF file that a name means, with all parts of a split one; none: the repository has other weights.

    files: paths in the repository. Of several with one quantisation, that with the shortest path is taken.

    Raises:
        ModelNotFoundError: there is no such file, or a part of it is missing.
    """
    names = {file for file in files if is_model(file)}
    models = sorted({str(parts_of(Path(file))[0]) for file in names}, key=lambda file: (len(file), file))
    tag = given.tag
    if tag is None and not models:
        return []
    labels = [quantisation_of(model) for model in models]
    if tag is not None and is_gguf(tag):
        matches = [
            PurePosixPath(str(parts_of(Path(tag))[0])).name == PurePosixPath(model).name for model in models
        ]
        index = matches.index(True) if any(matches) else None
    else:
        index = position(labels, tag)
    if index is None:
        there = (
            ", ".join(label or model for label, model in zip(labels, models, strict=True)) or "no GGUF file"
        )
        raise ModelNotFoundError(f"{given.repository} has no {quoted(tag)}; it has: {shortened(there, 300)}")
    parts = [str(part) for part in parts_of(Path(models[index]))]
    if missing := [part for part in parts if part not in names]:
        raise ModelNotFoundError(f"{given.repository} lacks {missing[0]}, a part of {models[index]}")
    return parts


def left_out(files: Iterable[str]) -> str:
    """A note on a repository whose GGUF files have a projector of pictures; "" if they have none."""
    found = any(is_gguf(file) and PROJECTOR in PurePosixPath(file).name.lower() for file in files)
    return "; its projector of pictures (mmproj) is left out: GGUF models read text only" if found else ""


def is_model(file: str) -> bool:
    """True for the path of a GGUF file that can be a model: a safe path, and no projector."""
    path = PurePosixPath(file)
    return is_gguf(file) and is_safe(file) and not any(word in path.name.lower() for word in NOT_MODELS)


def is_safe(file: str) -> bool:
    """True for a path that stays within the folder to which it is joined, and is no hidden file there."""
    parts = file.split("/")
    return (
        "\\" not in file and "\0" not in file and not any(not part or part.startswith(".") for part in parts)
    )
