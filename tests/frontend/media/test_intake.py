"""What a frontend makes of the core's answers about media."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from pagewire.frontend.media.access import MediaAccess
from pagewire.frontend.media.intake import media_intake
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.media import MediaInfo, MediumInfo
from tests.benchmarks.loading import load_from

files = load_from("siege", "media_files")


def test_a_layout_that_does_not_come_is_for_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits behind others of the same tenant: over HTTP that is 429, and not the server's fault."""
    at_once = msgspec.structs.replace(CALLS["media_layout"], seconds=0.0)
    monkeypatch.setitem(CALLS, "media_layout", at_once)

    def call(method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()

    info = MediaInfo({"image": MediumInfo(9, "<image>", 9)})
    intake = media_intake(info, MediaAccess(), call, max_model_len=100)
    prompt = {"multi_modal_data": {"image": files.plain_png(2, 2)}}
    with pytest.raises(EngineBusyError, match="image: others before it took 0 s"):
        intake.place([9], prompt, None)
