"""Brings a model of the hub into the folder of pulled models, and says how far it is.

plan (the hub's list of files) --> lock --> room on the disk --> each file, from where it ended --> record

The hub's client forgets what it has of a file that breaks off, so files are fetched here, by its session, addresses
and tokens. A file gets its name once its digest is the hub's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.hub import (
    DOUBLED_FILES,
    IGNORED_FILES,
    POOLING_FILES,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    also_at_the_top,
)
from pagewire.ipc.files.hub_names import HubName, choose_gguf, is_part, is_safe, left_out, quantisation_of
from pagewire.ipc.files.pulled import (
    PulledFile,
    PulledModel,
    folder_of,
    lock_model,
    pulled_models,
    pulled_root,
    write_record,
)
from pagewire.ipc.files.repository import hub_errors, list_repository
from pagewire.ipc.gguf.file import is_gguf

logger = logging.getLogger("pagewire")

CHUNK_BYTES = 1 << 20
SPARE_BYTES = 256 << 20  # left on the disk for others
MAX_FILE_BYTES = 50 * 1000**3  # what the hub gives over HTTP
MAX_FAILURES = 5  # in a row, none of which brings a byte
RETRY_SECONDS = 1.0
REPORT_SECONDS = 0.1
PART = ".part"  # after the name of a file that is not complete


class PullProgress(NamedTuple):
    """How far a pull is, in Ollama's words. digest, total, completed: of a file, in bytes; "" and 0: of none."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


Report = Callable[[PullProgress], None]


class PullStoppedError(Exception):
    """Nobody wants the pull any more. What there is of the files stays, and the next pull goes on from there."""


def pull(given: HubName, token: str | bool | None, report: Report, stop: threading.Event) -> PulledModel:
    """Bring a model. Blocks until it is complete.

    report: called with each step. stop: ends it.

    Raises:
        ModelNotFoundError: the hub lacks it or cannot be reached. BlockingIOError: another process pulls it.
        OSError: the disk has no room, or cannot be written. ValueError: a file is not what the hub says.
        PullStoppedError: `stop` was set.
    """
    report(PullProgress("pulling manifest"))
    model = plan_pull(given, token)
    with lock_model(model.given):
        known = [(one.name, one.content) for one in pulled_models()]
        if (model.name, model.content) not in known:
            check_room(model)
            for file in model.files:
                fetch(model, file, token, report, stop)
            report(PullProgress("writing manifest"))
            write_record(model)
            remove_others(model)
    report(PullProgress("success"))
    return model


def plan_pull(given: HubName, token: str | bool | None) -> PulledModel:
    """The files that a name means now: its GGUF file with all parts, or the files of a repository of safetensors.

    Raises:
        ModelNotFoundError: as `pull`. ValueError: the hub's list cannot be relied on.
    """
    repository = list_repository(given.repository, None, token)
    by_name = {file.name: file for file in repository.files}
    names, tag = choose_gguf(by_name, given), given.tag
    if names and (tag is None or not is_gguf(tag)):
        tag = quantisation_of(names[0]) or PurePosixPath(names[0]).name
    if names:
        logger.info("%s is %s of %s%s", given, names[0], given.repository, left_out(by_name))
    if not names:
        names = weights_among(by_name)
    if not any(name.endswith(".safetensors") for name in names) and tag is None:
        raise ModelNotFoundError(f"{given.repository} has neither GGUF files nor safetensors")
    files = [PulledFile(name, by_name[name].num_bytes, by_name[name].digest) for name in names]
    for file in files:
        check_file(given, file)
    if tag is not None and not is_part(tag):
        raise ModelNotFoundError(f"{names[0]} of {given.repository} has a name that no model can have here")
    content = hashlib.sha256("\0".join(f"{file.name} {file.digest}" for file in files).encode()).hexdigest()[
        :16
    ]
    return PulledModel(given.repository, tag or "", repository.commit, content, files, int(time.time()))


def weights_among(names: Iterable[str]) -> list[str]:
    """The files of a repository of safetensors that its model is made of: no pickles, no code."""
    taken = [*TOKENIZER_FILES, *WEIGHT_FILES["auto"], *POOLING_FILES]
    ignored = also_at_the_top([*IGNORED_FILES, *DOUBLED_FILES])
    return sorted(
        name for name in filter(is_safe, names) if matches(name, taken) and not matches(name, ignored)
    )


def matches(name: str, patterns: list[str]) -> bool:
    """True for a name of one of these patterns, as the hub's client reads them."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def check_file(given: HubName, file: PulledFile) -> None:
    """Check what the hub says of a file.

    Raises:
        ValueError: it is too large, or its size or digest is missing.
    """
    kind, _, digits = file.digest.partition(":")
    if file.num_bytes > MAX_FILE_BYTES:
        raise ValueError(
            f"{file.name} has over 50 GB, which the hub does not give here: hf download {given.repository}"
        )
    if file.num_bytes < 0 or len(digits) != {"sha256": 64, "sha1": 40}.get(kind):
        raise ValueError(
            f"the hub does not say size and digest of {file.name}: give {given.repository} itself as the model"
        )


def check_room(model: PulledModel) -> None:
    """Check that the disk has room for what is missing.

    Raises:
        OSError: it has not.
    """
    folder = folder_of(model)
    missing = sum(file.num_bytes - size_of(folder / file.name) for file in model.files)
    free = shutil.disk_usage(pulled_root()).free
    if missing + SPARE_BYTES > free:
        raise OSError(
            f"{model.name} needs {missing / 1e9:.2f} GB more in {pulled_root()}, where {free / 1e9:.2f} GB are "
            f"free ({SPARE_BYTES / 1e9:.2f} GB stay for others): remove a model (pagewire rm), or set "
            "PAGEWIRE_PULLED_DIR"
        )


def size_of(path: Path) -> int:
    """The bytes of a file that are there."""
    for place in (path, path.with_name(path.name + PART)):
        if place.is_file():
            return place.stat().st_size
    return 0


def fetch(
    model: PulledModel, file: PulledFile, token: str | bool | None, report: Report, stop: threading.Event
) -> None:
    """Bring a file, or what is missing of it. Raises as `pull`."""
    path = folder_of(model) / file.name
    status = f"pulling {file.digest.partition(':')[2][:12]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        part = path.with_name(path.name + PART)
        with part.open("a+b") as out:
            content = Content(out, file)
            said = time.monotonic()
            report(PullProgress(status, file.digest, file.num_bytes, content.num_bytes))
            for _ in receive_file(model, file, token, content, stop):
                if time.monotonic() - said > REPORT_SECONDS:
                    said = time.monotonic()
                    report(PullProgress(status, file.digest, file.num_bytes, content.num_bytes))
            out.flush()
            os.fsync(out.fileno())  # the record must not be on the disk before
        report(PullProgress(f"verifying {file.digest.partition(':')[0]} digest"))
        if content.digest() != file.digest:
            part.unlink()
            raise ValueError(
                f"{file.name} is not what the hub says of it ({file.digest}); it was removed: pull again"
            )
        part.replace(path)
    report(PullProgress(status, file.digest, file.num_bytes, file.num_bytes))


class Content:
    """The part of a file that is there, with its digest. out: the file, which may have a beginning already."""

    def __init__(self, out: BinaryIO, file: PulledFile) -> None:
        self._out, self._file = out, file
        out.seek(0, 2)
        if out.tell() > file.num_bytes:
            self.clear()
            return
        self._begin()
        out.seek(0)
        while chunk := out.read(CHUNK_BYTES):
            self._add(chunk)

    def _begin(self) -> None:
        kind = self._file.digest.partition(":")[0]
        header = b"" if kind == "sha256" else f"blob {self._file.num_bytes}\0".encode()  # as Git has it
        self._hash, self.num_bytes = hashlib.new(kind, header, usedforsecurity=False), 0

    def _add(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self.num_bytes += len(chunk)

    def clear(self) -> None:
        """Begin anew."""
        self._out.truncate(0)
        self._begin()

    def write(self, chunk: bytes) -> None:
        """Append to the file.

        Raises:
            ValueError: it would be longer than the hub says.
        """
        if self.num_bytes + len(chunk) > self._file.num_bytes:
            self.clear()
            raise ValueError(
                f"{self._file.name} is longer than the {self._file.num_bytes} bytes that the hub says"
            )
        self._out.write(chunk)
        self._add(chunk)

    def digest(self) -> str:
        """The digest, in the hub's form."""
        return f"{self._file.digest.partition(':')[0]}:{self._hash.hexdigest()}"


def receive_file(
    model: PulledModel, file: PulledFile, token: str | bool | None, content: Content, stop: threading.Event
) -> Iterator[None]:
    """Append to a file what it lacks, and yield after each part; a connection that breaks off is made again.

    Raises:
        ModelNotFoundError, OSError, ValueError, PullStoppedError: as `pull`.
    """
    failures = 0
    while content.num_bytes < file.num_bytes:
        before, cause = content.num_bytes, "it sends nothing"
        try:
            for chunk in chunks(model, file, token, content):
                if stop.is_set():
                    raise PullStoppedError
                content.write(chunk)
                yield
        except BrokenConnectionError as error:
            cause = str(error)
        failures = failures + 1 if content.num_bytes == before else 0
        if failures == MAX_FAILURES:
            raise ModelNotFoundError(f"the hub does not give {file.name} of {model.repository}: {cause}")
        if content.num_bytes < file.num_bytes and stop.wait(RETRY_SECONDS):
            raise PullStoppedError


class BrokenConnectionError(Exception):
    """A connection to the hub that may work when it is made again."""


def chunks(
    model: PulledModel, file: PulledFile, token: str | bool | None, content: Content
) -> Iterator[bytes]:
    """Yield a file's bytes from where it ends; from the first on if the hub gives no part of a file.

    Raises:
        BrokenConnectionError: it broke off. ModelNotFoundError: the hub refuses.
    """
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = build_hf_headers(token=token) | {"Accept-Encoding": "identity"}
    if content.num_bytes:
        headers["Range"] = f"bytes={content.num_bytes}-"
    url, seconds = (
        hf_hub_url(model.repository, file.name, revision=model.commit),
        constants.HF_HUB_DOWNLOAD_TIMEOUT,
    )
    try:
        with get_session().stream("GET", url, headers=headers, timeout=seconds) as response:
            hf_raise_for_status(response)
            if content.num_bytes and response.status_code != 206:
                content.clear()
            yield from response.iter_bytes()
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (408, 429, 500, 502, 503, 504):
            raise BrokenConnectionError(f"it answers {error.response.status_code}") from error
        with hub_errors(model.repository):
            raise
    except OSError:  # of the hub's client, where it is to be offline
        with hub_errors(model.repository):
            raise
    except Exception as error:  # of the HTTP library
        raise BrokenConnectionError(str(error).strip() or type(error).__name__) from error


def remove_others(model: PulledModel) -> None:
    """Remove what earlier pulls of a model have brought; an engine that has it in memory keeps it."""
    own = folder_of(model)
    for other in own.parent.iterdir():
        if other != own:
            shutil.rmtree(other, ignore_errors=True)
