"""Models of ModelScope, in place of the Hugging Face hub. Its client, modelscope-hub, is an optional package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagewire.ipc.errors import ModelNotFoundError


def download_from_scope(
    name: str,
    patterns: Sequence[str],
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | None,
    ignored: Sequence[str],
) -> Path:
    """Download the files of a repository that match `patterns`; see `hub.download`. The client resumes files.

    token: of ModelScope; None or True: $MODELSCOPE_API_TOKEN, or the stored one.

    Raises:
        ModelNotFoundError: the text says why, and how to fix it.
    """
    try:
        from modelscope_hub import HubApi
        from modelscope_hub.errors import AuthenticationError, HubError, NotExistError, PermissionDeniedError
    except ImportError as error:
        raise ModelNotFoundError(
            f"{name}: PAGEWIRE_USE_MODELSCOPE=1 needs a package: pip install 'pagewire[modelscope]'"
        ) from error
    try:
        return HubApi(token=token if isinstance(token, str) else None).download_repo(
            name,
            "model",
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
        )
    except (AuthenticationError, PermissionDeniedError) as error:
        raise ModelNotFoundError(
            f"{name} of ModelScope may not be read: give its token as hf_token or MODELSCOPE_API_TOKEN"
        ) from error
    except NotExistError as error:
        raise ModelNotFoundError(
            f"no model {name!r}: neither a local folder nor a repository of ModelScope, which "
            "PAGEWIRE_USE_MODELSCOPE=1 takes in place of the Hugging Face hub"
        ) from error
    except (HubError, OSError, ValueError) as error:
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelNotFoundError(f"{name} cannot be had of ModelScope: {line:.300}") from error
