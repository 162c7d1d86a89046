"""Models in S3, and in stores with its interface: s3://bucket/folder. Its client, obstore, is optional."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.quoting import quoted

if TYPE_CHECKING:
    from obstore.store import S3Store

logger = logging.getLogger("pagewire")

OPTIONS = {  # of the client, by variables that vLLM reads; obstore reads those of AWS by itself
    "S3_ACCESS_KEY_ID": "access_key_id",
    "S3_SECRET_ACCESS_KEY": "secret_access_key",
    "S3_ENDPOINT_URL": "endpoint",
}
CHUNK_BYTES = 1 << 20  # written at a time; less is lost when a connection breaks off
NUM_THREADS = 8  # files at a time, as many as the hub's client takes
MAX_FILES = 10_000  # of a folder that are looked at; a model has some hundreds
MAX_FAILURES = 5  # in a row, none of which brings a byte of a file
RETRIES: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}  # of a request


@dataclass(frozen=True)
class StoredFile:
    """A file of a folder. path: in the bucket. name: within the folder. version: changes with its content."""

    path: str
    name: str
    num_bytes: int
    version: str

    @property
    def blob(self) -> str:
        """The name under which the cache keeps this content."""
        return _digest([self.path, self.version, str(self.num_bytes)])


def download_from_s3(
    address: str, patterns: Sequence[str], cache_dir: str | None, ignored: Sequence[str]
) -> Path:
    """The local folder with the files of s3://bucket/folder that match `patterns`, downloaded if necessary.

    The folder is another one when a file in S3 has changed, and shares what has not. What was interrupted goes on
    where it ended. Several processes may call this at the same time.

    cache_dir: where downloads are kept; None: in the hub's cache.

    Raises:
        ModelNotFoundError: the text says why, and how to fix it.
    """
    bucket, _, folder = address.removeprefix("s3://").partition("/")
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise ModelNotFoundError(f"{address}: S3 needs a package: pip install 'pagewire[s3]'") from error
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import filter_repo_objects

    folder = folder.strip("/")
    given = {option: value for name, option in OPTIONS.items() if (value := os.environ.get(name))}
    over_http = given.get("endpoint", os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://")
    try:
        store = S3Store(
            bucket,
            **given,  # type: ignore[arg-type]
            client_options={"allow_http": over_http},
            retry_config=RETRIES,
        )
        files = filter_repo_objects(
            files_of(store, folder),
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            key=lambda file: file.name,
        )
        root = Path(cache_dir or HF_HUB_CACHE) / "--".join(["s3", bucket, *folder.split("/")])
        return fetch_all(store, sorted(files, key=lambda file: file.name), root)
    except (BaseError, OSError, ValueError) as error:
        raise ModelNotFoundError(f"{address} cannot be read: {reason(error)}") from error


def files_of(store: S3Store, folder: str) -> Iterator[StoredFile]:
    """The files of a folder, and of those within it.

    Raises:
        ValueError: there are none or too many, or one has a name that no file can have here.
    """
    import obstore

    prefix = f"{folder}/" if folder else ""
    num_files = 0
    for entries in obstore.list(store, prefix or None):
        for entry in entries:
            name = entry["path"].removeprefix(prefix)
            if not name or name.endswith("/"):
                continue  # what some programs write to mark a folder
            if ".." in PurePosixPath(name).parts or name.startswith("/"):
                raise ValueError(f"{quoted(name)} is no name of a file")
            num_files += 1
            if num_files > MAX_FILES:
                raise ValueError(f"it holds over {MAX_FILES} files; name the folder of one model")
            version = entry["e_tag"] or str(entry["last_modified"])
            yield StoredFile(entry["path"], name, entry["size"], version)
    if not num_files:
        raise ValueError("there are no files of this name")


def fetch_all(store: S3Store, files: Sequence[StoredFile], root: Path) -> Path:
    """The folder of links to these files, which are in `root`, each content once.

    Raises:
        ValueError, OSError, and errors of the client: a file cannot be fetched.
    """
    blobs = root / "blobs"
    folder = root / "snapshots" / _digest([f"{file.name} {file.blob}" for file in files])
    blobs.mkdir(parents=True, exist_ok=True)
    if missing := [file for file in files if not (blobs / file.blob).is_file()]:
        size = sum(file.num_bytes for file in missing)
        logger.info("downloading %d files of %.1f MB to %s", len(missing), size / 1e6, root)
        with ThreadPoolExecutor(NUM_THREADS, "s3") as threads:
            list(threads.map(partial(fetch_object, store, blobs), missing))
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        link = folder / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            link.symlink_to(os.path.relpath(blobs / file.blob, link.parent))
        except FileExistsError:
            pass  # the name of the folder says what it holds
    return folder


def fetch_object(store: S3Store, blobs: Path, file: StoredFile) -> None:
    """Download a file, or what an earlier attempt has left of it; one process does it, others wait for that.

    Raises:
        ValueError, OSError, and errors of the client.
    """
    path, part = blobs / file.blob, blobs / f"{file.blob}.part"
    with part.open("ab") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        if path.is_file():
            part.unlink(missing_ok=True)
            return
        _continue(store, file, out)
        part.replace(path)


def _continue(store: S3Store, file: StoredFile, out: BinaryIO) -> None:
    """Append what a file lacks."""
    import obstore
    from obstore.exceptions import GenericError

    failures = 0
    while (done := out.seek(0, os.SEEK_END)) < file.num_bytes:
        options: Any = {"range": {"offset": done}, "if_match": file.version}
        try:
            for chunk in obstore.get(store, file.path, options=options).stream(CHUNK_BYTES):
                out.write(chunk)
        except (
            GenericError,
            ConnectionError,
        ):  # a connection that broke off; others concern the file or the rights
            failures = failures + 1 if out.tell() == done else 0
            if failures == MAX_FAILURES:
                raise
        else:
            if out.tell() == done:
                raise ValueError(f"{file.name} ends after {done} of {file.num_bytes} bytes")
    out.flush()
    if done > file.num_bytes:
        out.truncate(0)
        raise ValueError(f"{file.name} has over {file.num_bytes} bytes; what was there is removed")


def reason(error: Exception) -> str:
    """Why files in S3 cannot be read, in one line, and what to do."""
    from obstore.exceptions import BaseError, PreconditionError

    line = f"{next(iter(str(error).splitlines()), ''):.300}"
    if isinstance(error, PreconditionError):
        return f"{line}; a file has changed meanwhile: start again"
    if isinstance(error, BaseError):
        return (
            f"{line}; check the bucket's name, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (a public bucket: "
            "AWS_SKIP_SIGNATURE=true), AWS_REGION, and AWS_ENDPOINT_URL for another store than Amazon's"
        )
    return line


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
