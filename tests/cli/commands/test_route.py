"""`pagewire route`: cores must be named in one way, and no option is ignored."""

from __future__ import annotations

import pytest

from pagewire.cli.main import main

CORE = ("--core", "ipc:///tmp/a.sock")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --core ADDRESS once or more, or --spawn N MODEL"),
        ((*CORE, "--spawn", "2", "demo"), "give --core ADDRESS once or more, or --spawn N MODEL"),
        ((*CORE, *CORE), "--core: the same address twice"),
        ((*CORE, "demo"), "MODEL has no effect with --core"),
        ((*CORE, "--max-model-len", "100"), "--max-model-len has no effect with --core"),
        ((*CORE, "--restarts", "2"), "--restarts has no effect"),
        ((*CORE, "--curve-secret", "x"), "CURVE needs both"),
        (("--spawn", "2"), "give a MODEL, such as demo, or --core ADDRESS"),
        (("--spawn", "2", "demo", "--restarts", "1"), "--restarts has no effect here"),
        (("--spawn", "2", "demo", "--peer-uid", "5"), "need --core"),
        (("--spawn", "0", "demo"), "must be at least 1"),
        ((*CORE, "--policy", "random"), "invalid choice"),
    ],
)
def test_bad_options_are_mistakes(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["route", *arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_bad_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--core", "udp://x", "--port", "0"]) == 1
    assert "'udp://x' must begin with ipc:// or tcp://" in capsys.readouterr().err
