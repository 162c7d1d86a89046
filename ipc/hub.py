"""Locates a model's files: the embedded model, a local folder, or the Hugging Face hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pagewire.ipc.errors import ModelNotFoundError

DEMO = "demo"
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
WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json", "*.py"]


def model_folder(
    name: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | None = None,
    tokenizer_only: bool = False,
) -> Path:
    """The local folder with the model's files, which are downloaded from the hub if necessary.

    name: "demo" (the embedded model), a folder, or a repository of the hub.
    revision: branch, tag or commit of the repository. tokenizer_only: do not download weights.

    Raises:
        ModelNotFoundError: there is no such folder, and the hub lacks the model, denies access or is unreachable.
        ValueError: a revision of a folder.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser fails for an unknown user
    is_folder = os.path.isdir(path)  # noqa: PTH112 - Path.is_dir fails for a name that is too long
    if revision is not None and (name == DEMO or is_folder):
        raise ValueError(
            f"revision {revision!r}: {name} is a local folder, which has no revisions; leave the revision out"
        )
    if name == DEMO:
        import pagewire.demo

        return Path(pagewire.demo.__path__[0])
    if is_folder:
        if not (path / "config.json").is_file() and not tokenizer_only:
            raise ModelNotFoundError(f"{path} holds no config.json: not a Hugging Face model folder")
        return path.resolve()
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"no model folder {name}")
    patterns = TOKENIZER_FILES if tokenizer_only else TOKENIZER_FILES + WEIGHT_FILES
    return download(name, patterns, revision, token, cache_dir, fall_back_to_bin=not tokenizer_only)


def download(
    name: str,
    patterns: list[str],
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | None,
    fall_back_to_bin: bool,
) -> Path:
    """Download the files of a hub repository that match `patterns`, with a progress bar; offline, use the cache.

    fall_back_to_bin: if there are no safetensors files, download *.bin files as well.

    Raises:
        ModelNotFoundError: the text says why, and how to fix it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    def fetch(patterns: list[str]) -> Path:
        return Path(
            snapshot_download(
                name, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=patterns
            )
        )

    try:
        folder = fetch(patterns)
        if fall_back_to_bin and not any(folder.glob("*.safetensors")):
            folder = fetch([*patterns, "*.bin", "*.bin.index.json"])
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
            "give a model folder, or model='demo' for the embedded one"
        ) from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file does not exist.

    Raises:
        ValueError: the file does not contain a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value
