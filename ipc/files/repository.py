"""Files of a repository of the hub, and which of them a name with a quantisation means (`hub_names.py`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pagewire.ipc.environment import env_flag
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.hub_names import HubName, choose_gguf, left_out

logger = logging.getLogger("pagewire")

MAX_FILES = 20_000  # of a repository that are looked at


class RepositoryFile(NamedTuple):
    """A file of a repository. digest: "sha256:..." of a large file's content; else "sha1:..." of its Git blob."""

    name: str
    num_bytes: int
    digest: str


class Repository(NamedTuple):
    """The files of a repository at a commit."""

    commit: str
    files: list[RepositoryFile]


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Say what an error of the hub's client means for a repository.

    Raises:
        ModelNotFoundError: the text says why the repository cannot be read, and how to fix it.
    """
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name} is gated: accept its terms on the hub, then give hf_token or set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"no model {name!r}: neither a local folder nor a repository on the hub (a private one needs hf_token)"
        ) from error
    except Exception as error:  # the hub client raises errors of several HTTP libraries
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(
            f"{name} is not a local folder, and the hub could not be reached ({cause}); "
            "give a model folder, or demo for the model that comes with pagewire"
        ) from error


def file_named(given: HubName, revision: str | None, token: str | bool | None, cache_dir: str | None) -> str:
    """The model that a name means: owner/repository/file.gguf, or the repository if it has no GGUF files.

    Raises:
        ModelNotFoundError: the repository has no such file, or the hub cannot be read; the text says why.
    """
    if env_flag("PAGEWIRE_USE_MODELSCOPE"):
        raise ModelNotFoundError(
            f"{given}: such names are of the Hugging Face hub, and PAGEWIRE_USE_MODELSCOPE=1 takes ModelScope in "
            "its place: name owner/repository, or a file of it as owner/repository/file.gguf"
        )
    names = names_in(given.repository, revision, token, cache_dir)
    parts = choose_gguf(names, given)
    if not parts:
        return given.repository
    logger.info("%s is %s of %s%s", given, parts[0], given.repository, left_out(names))
    return f"{given.repository}/{parts[0]}"


def names_in(
    repository: str, revision: str | None, token: str | bool | None, cache_dir: str | None
) -> list[str]:
    """The paths of a repository's files; those in the hub's cache if the hub cannot be reached.

    Raises:
        ModelNotFoundError: there is no such repository, or neither.
    """
    try:
        return [file.name for file in list_repository(repository, revision, token).files]
    except ModelNotFoundError:
        if found := cached_names(repository, revision, cache_dir):
            return found
        raise


def list_repository(repository: str, revision: str | None, token: str | bool | None) -> Repository:
    """Ask the hub for the files of a repository.

    Raises:
        ModelNotFoundError: there is no such repository, it may not be read, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with hub_errors(repository):
        info = HfApi().model_info(repository, revision=revision, token=token, files_metadata=True)
    siblings = info.siblings or []
    if info.sha is None or len(siblings) > MAX_FILES:
        raise ModelNotFoundError(f"{repository} has no commit, or over {MAX_FILES} files")
    return Repository(info.sha, [file_of(sibling) for sibling in siblings])


def file_of(sibling: Any) -> RepositoryFile:
    """A file as the hub's client describes it."""
    lfs = sibling.lfs
    digest = f"sha1:{sibling.blob_id or ''}" if lfs is None else f"sha256:{lfs.sha256}"
    return RepositoryFile(sibling.rfilename, -1 if sibling.size is None else sibling.size, digest)


def cached_names(repository: str, revision: str | None, cache_dir: str | None) -> list[str]:
    """The paths of those files of a repository that the hub's cache has of a revision."""
    from huggingface_hub.constants import DEFAULT_REVISION, HF_HUB_CACHE

    folder = Path(cache_dir or HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    commit = revision or DEFAULT_REVISION
    try:
        commit = (folder / "refs" / commit).read_text(encoding="utf-8").strip()
    except OSError:
        pass  # a commit, or one that is not there
    snapshot = folder / "snapshots" / commit
    return sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file())
