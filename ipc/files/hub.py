"""Locates a model's files: the embedded model, a local folder or GGUF file, or the Hugging Face hub.

Other sources are S3, for names with s3://, and ModelScope in place of the hub (`PAGEWIRE_USE_MODELSCOPE`).
"""

from __future__ import annotations

import glob
import json
import os
import stat
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from pagewire.ipc.environment import env_flag
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.hub_names import HubName, hub_name
from pagewire.ipc.gguf.file import MAGIC, is_gguf, parts_of

EMBEDDED = {"demo": "pagewire.demo", "demo-vision": "pagewire.demo_vision"}
"""The packages of models that come with pagewire, by the models' names."""
TOKENIZER_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "config.json",
    "generation_config.json",
]
MODELOPT_FILE = "hf_quant_config.json"
"""How ModelOpt has quantised a checkpoint; its newer versions write that to config.json, too."""
WEIGHT_FILES = {  # by load format
    "auto": ["*.safetensors", "*.safetensors.index.json", MODELOPT_FILE],
    "safetensors": ["*.safetensors", "*.safetensors.index.json", MODELOPT_FILE],
    "bitsandbytes": ["*.safetensors", "*.safetensors.index.json"],
    "gguf": ["*.gguf"],
    "pt": ["*.bin", "*.bin.index.json"],  # pickles
    "dummy": [],
    "sharded_state": ["*.safetensors"],
}
GGUF_LOAD_FORMATS = ("auto", "gguf", "dummy")  # those that a GGUF file can be read with
IGNORED_FILES = ("original/**/*",)  # by default: weights in their authors' form, beside those of transformers
# Never read: Mistral's form of weights that the repository has in transformers' form as well.
DOUBLED_FILES = ("consolidated*.safetensors", "consolidated*.safetensors.index.json")
OTHER_FORMATS = (
    "'auto' takes .safetensors files, 'pt' takes .bin files: pickles, which can run code of their authors; "
    "a GGUF file is named with its repository: owner/repository/file.gguf"
)
POOLING_FILES = [  # of sentence-transformers: which modules lie behind the transformer, and their settings
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_*/config.json",
]
CODE_FILES = ["*.py"]
MAX_FILE_BYTES = 256 << 20  # of a tokenizer's file; the largest have some 35 MB
MAX_JSON_BYTES = (
    32 << 20
)  # of any other JSON file: the index of 200,000 tensors; reading it takes 2 s at most


def model_folder(
    name: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | None = None,
    tokenizer_only: bool = False,
    load_format: str = "auto",
    trust_remote_code: bool = False,
    ignore_patterns: str | Sequence[str] = IGNORED_FILES,
) -> Path:
    """The local folder with the model's files, or its GGUF file; downloaded if necessary.

    What can run code is downloaded only on request: .bin files (pickles) by `load_format`, .py files by
    `trust_remote_code`.

    name: of an embedded model ("demo", "demo-vision"), a folder, a repository of the hub, s3://bucket/folder; or a
    GGUF file, also as the only one of a folder, or as `owner/repository/file.gguf`. Of a split file any part may
    be named. `hf:owner/repository:Q4_K_M` is the file of a repository with that quantisation (`hub_names.py`), or
    what `pagewire pull` has brought of it.
    revision: branch, tag or commit of the repository. tokenizer_only: do not download weights.
    load_format: which weights, one of `WEIGHT_FILES` or "gguf". trust_remote_code: download Python code as well.
    ignore_patterns: files of the hub not to download. `*` stands for any characters, `**/` for any folders or none.

    Raises:
        ModelNotFoundError: there is no such folder, and the hub lacks the model, denies access or is unreachable.
        ValueError: a revision of a folder, or a load format that reads no GGUF files for one.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser fails for an unknown user
    is_folder = os.path.isdir(path)  # noqa: PTH112 - Path.is_dir fails for a name that is too long
    is_file = is_gguf(name) and os.path.isfile(path)  # noqa: PTH113 - as above
    if revision is not None and (name in EMBEDDED or is_folder or is_file):
        kind = "GGUF file" if is_file else "folder"
        raise ValueError(
            f"revision {revision!r}: {name} is a local {kind}, which has no revisions; leave the revision out"
        )
    if name in EMBEDDED:
        return Path(import_module(EMBEDDED[name]).__path__[0])
    if not (is_folder or is_file) and (given := hub_name(name)) is not None:
        if given.tag is not None:
            check_gguf_format(name, load_format)
        name = given.repository
        if load_format in GGUF_LOAD_FORMATS:
            found = find_named(given, revision, token, cache_dir)
            if isinstance(found, Path):
                return found
            name = found
    if is_gguf(name) and not is_folder:
        check_gguf_format(name, load_format)
        return parts_of(path.absolute())[0] if is_file else download_file(name, revision, token, cache_dir)
    if is_folder:
        if (file := gguf_model_in(path.resolve(), load_format)) is not None:
            return file
        if not (path / "config.json").is_file() and not tokenizer_only:
            raise ModelNotFoundError(f"{path} holds no config.json: not a Hugging Face model folder")
        return path.resolve()
    if os.path.isfile(path):  # noqa: PTH113 - as above
        raise ModelNotFoundError(f"{name} is a file, and no model: {how_to_name(path)}")
    if name.startswith(("/", "./", "../", "~")) or (name.count("/") > 1 and not is_s3(name)):
        raise ModelNotFoundError(f"no model folder {name}")
    if load_format == "gguf":
        raise ModelNotFoundError(f"name the GGUF file, too: {name}/file.gguf")
    return download_folder(
        name,
        revision,
        token,
        cache_dir,
        None if tokenizer_only else WEIGHT_FILES[load_format],
        [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns),
        load_format=load_format,
        with_code=trust_remote_code,
    )


def download_folder(
    name: str,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | None,
    weights: list[str] | None,
    ignored: list[str],
    *,
    load_format: str,
    with_code: bool,
) -> Path:
    """The folder of a repository of the hub, or of s3://: its tokenizer, its configuration, its weights.

    weights: patterns of their files; None: the tokenizer alone. ignored: patterns of files not to download.
    with_code: download Python files as well.

    Raises:
        ModelNotFoundError: it lacks the model or these weights, denies access, or is unreachable.
    """
    own = [] if weights is None else weights + POOLING_FILES
    patterns = TOKENIZER_FILES + own + (CODE_FILES if with_code else [])
    folder = download(name, patterns, revision, token, cache_dir, [*ignored, *DOUBLED_FILES])
    if weights and not any(folder.glob(weights[0])):
        raise ModelNotFoundError(
            f"{name} has no {weights[0]} files, which load_format={load_format!r} takes, but for those "
            f"that are ignored ({', '.join([*ignored, DOUBLED_FILES[0]])}); {OTHER_FORMATS}"
        )
    return folder


def find_named(
    given: HubName, revision: str | None, token: str | bool | None, cache_dir: str | None
) -> Path | str:
    """The files that `pagewire pull` has brought of a name; else the repository or the file of it to download.

    Raises:
        ModelNotFoundError: see `repository.file_named`.
    """
    from pagewire.ipc.files import pulled, repository  # a frontend that attaches downloads nothing

    if revision is None and (local := pulled.find(given)) is not None:
        return pulled.weights_path(local)
    return repository.file_named(given, revision, token, cache_dir)


def how_to_name(file: Path) -> str:
    """How to name the model that a file may be a part of."""
    try:
        with file.open("rb") as opened:
            is_model = opened.read(len(MAGIC)) == MAGIC
    except OSError:
        is_model = False
    if is_model:
        return "a GGUF file has a name that ends with .gguf"
    return "a model is a folder with config.json, a GGUF file (.gguf), or owner/repository of the hub"


def download_file(name: str, revision: str | None, token: str | bool | None, cache_dir: str | None) -> Path:
    """The GGUF file `owner/repository/file.gguf` of the hub, downloaded with all its parts.

    Raises:
        ModelNotFoundError: the repository has no such file, or as `download`.
    """
    if (found := gguf_in_repository(name)) is None:
        raise ModelNotFoundError(f"no GGUF file {name}; of the hub, it would be owner/repository/file.gguf")
    repository, file, patterns = found
    path = download(repository, patterns, revision, token, cache_dir) / file
    if not path.is_file():
        raise ModelNotFoundError(f"{repository} has no file {file}")
    return path


def download(
    name: str,
    patterns: list[str],
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | None,
    ignored: Sequence[str] = (),
) -> Path:
    """Download the files of a repository or of a folder in S3 that match `patterns`; offline, use the hub's cache.

    ignored: patterns of files that are not downloaded, as `ignore_patterns` of `model_folder`.

    Raises:
        ModelNotFoundError: the text says why, and how to fix it.
    """
    ignored = also_at_the_top(ignored)
    if is_s3(name):
        from pagewire.ipc.files import s3  # a frontend that attaches downloads nothing

        if revision is not None:
            raise ValueError(f"revision {revision!r}: {name} has none; leave the revision out")
        return s3.download_from_s3(name, patterns, cache_dir, ignored)
    if env_flag("PAGEWIRE_USE_MODELSCOPE"):
        from pagewire.ipc.files import model_scope  # as above

        return model_scope.download_from_scope(name, patterns, revision, token, cache_dir, ignored)
    from huggingface_hub import snapshot_download

    from pagewire.ipc.files.repository import hub_errors

    with hub_errors(name):
        folder = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=patterns,
            ignore_patterns=ignored,
        )
    return Path(folder)


def also_at_the_top(patterns: Sequence[str]) -> list[str]:
    """Patterns in which `**/` stands for no folder as well; the hub's client takes it for at least one."""
    return [*patterns, *(pattern.replace("**/", "") for pattern in patterns)]


def is_s3(name: str) -> bool:
    """True for the address of a folder or a file in S3."""
    return name.startswith("s3://")


def read_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file of a model folder. Neither a pipe nor a device makes the caller wait.

    Raises:
        ValueError: it is no regular file, or has over `max_bytes` bytes. OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(
            f"{path} has over {max_bytes} bytes, the most that is read of a file of a model folder"
        )
    return content


def check_files(folder: Path) -> None:
    """Check that a folder's tokenizer can be read by a library that does not limit what it reads.

    Raises:
        ValueError: one of its files is no regular file, or has over `MAX_FILE_BYTES` bytes.
    """
    for path in {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            continue
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if info.st_size > MAX_FILE_BYTES:
            raise ValueError(
                f"{path} has over {MAX_FILE_BYTES} bytes, the most that is read of a file of a tokenizer"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file does not exist.

    Raises:
        ValueError: the file does not contain a JSON object, or is too large (`MAX_JSON_BYTES`).
    """
    if not path.is_file():
        return {}
    content = read_file(path, MAX_JSON_BYTES)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def check_gguf_format(name: str, load_format: str) -> None:
    """Raise ValueError if a GGUF file is named together with a load format of other files."""
    if load_format not in GGUF_LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r} reads no GGUF files, but {name} is one; leave it out")


def gguf_model_in(folder: Path, load_format: str) -> Path | None:
    """The GGUF model of a folder, where it is that what `load_format` takes; None if other files are.

    Raises:
        ModelNotFoundError: there are several, or none although the load format is "gguf".
    """
    if load_format not in GGUF_LOAD_FORMATS:
        return None
    # Projectors of pictures ("mmproj") are no models.
    files = (file for file in folder.iterdir() if is_gguf(file) and file.is_file())
    models = sorted({parts_of(file)[0] for file in files if not file.name.startswith("mmproj")})
    if load_format != "gguf" and (not models or has_other_files(folder, load_format)):
        return None
    if len(models) != 1:
        names = ", ".join(path.name for path in models[:10]) or "none"
        raise ModelNotFoundError(f"{folder} does not hold one GGUF model, but {names}; name the file itself")
    return models[0]


def has_other_files(folder: Path, load_format: str) -> bool:
    """True if `load_format` takes other files of a folder than GGUF files."""
    is_model = (folder / "config.json").is_file()
    return is_model and (load_format == "dummy" or any(folder.glob("*.safetensors")))


def gguf_in_repository(name: str) -> tuple[str, str, list[str]] | None:
    """The repository, the file, and patterns of all its parts, of a name `owner/repository/file.gguf`.

    None if the name is of another form.
    """
    if is_s3(name):
        folder, _, file = name.rpartition("/")
        is_complete = is_s3(folder)
    else:
        owner, _, rest = name.partition("/")
        repository, _, file = rest.partition("/")
        folder, is_complete = f"{owner}/{repository}", bool(owner.strip("~.") and repository and file)
    if not (is_gguf(name) and is_complete) or ".." in PurePosixPath(file).parts:
        return None
    first, *others = parts_of(Path(file))
    return folder, str(first), [glob.escape(str(path)) for path in (first, *others)]
