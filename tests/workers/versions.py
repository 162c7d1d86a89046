"""What tests leave out with an older transformers, their oracle: what it lacks, and what it computes wrongly."""

from __future__ import annotations

import pytest

from pagewire.workers.versions import SINCE, transformers_version

KNOWN_SINCE = SINCE | {"qwen4_exp_text": (5, 18)}  # refused by all versions, but its layers had other names
RIGHT_SINCE = {"doge": (5, 18), "umt5": (5, 18), "cohere_compass": (5, 23)}
"""Model types that transformers itself computes otherwise before this version: it leaves masks out, so that its
tokens are other ones, or cannot make a small model."""


def skip_before(since: tuple[int, int], reason: str) -> None:
    """Skip a test with versions of transformers before this one."""
    if transformers_version() < since:
        pytest.skip(f"needs transformers>={since[0]}.{since[1]}: {reason}")


def skip_unless_known(model_type: str) -> None:
    """Skip a test of a model type that the installed version does not have."""
    skip_before(KNOWN_SINCE.get(model_type, (0, 0)), f"{model_type} is served with it")


def skip_unless_right(model_type: str) -> None:
    """Skip a test that takes for right what transformers computes for a model type, where it is not."""
    skip_before(RIGHT_SINCE.get(model_type, (0, 0)), f"it computes {model_type} rightly")
