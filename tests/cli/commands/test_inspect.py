"""`pagewire inspect`: figures for people and for programs, at once, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.cli.main import main
from tests.workers.huge import write_huge

TABLE = ("embedding", "attention", "feed-forward", "output", "norms")
CPU = ("--device", "cpu")


def test_figures_are_given_without_torch() -> None:
    program = """if True:
        import sys
        from pagewire.cli.main import main
        status = main(["inspect", "demo", "--device", "cpu", "--json"])
        assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
        sys.exit(status)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["form"], found["dtype"], found["fits"]) == (
        *("demo", "safetensors", "bfloat16", True),
    )
    assert found["parameters"] == sum(part["parameters"] for part in found["parts"]) == 4_000_000
    assert found["file_bytes"] == 8_000_000
    assert found["kv_token_bytes"] == 2 * found["dimensions"]["kv_elements"]
    assert found["memory"]["resident_bytes"] > found["memory"]["weight_bytes"] + found["memory"]["kv_bytes"]
    assert found["speed"]["read_rate"] > 1e8 and found["speed"]["token_seconds"] > 0


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", *CPU, "--max-model-len", "512", "--num-threads", "1"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.startswith(TABLE)] == list(TABLE)
    assert "4,000,000 parameters, not quantised; run in bfloat16" in text
    assert "256.0 requests of 512" in text and "and 1 threads read" in text
    assert "fits      yes: " in text


def test_workers_that_share_a_machine_share_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    def total(*options: str) -> int:
        assert main(["inspect", "demo", *CPU, "--num-threads", "1", "--json", *options]) == 0
        return int(json.loads(capsys.readouterr().out)["memory"]["total_bytes"])

    alone = total()
    assert total("-tp", "2") == alone // 2
    assert total("-tp", "2", "--distributed-executor-backend", "join") == alone
    assert main(["inspect", "demo", *CPU, "-tp", "2"]) == 0
    assert "workers   2, which share this machine" in capsys.readouterr().out


def test_a_model_that_does_not_fit_has_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_huge(tmp_path))
    assert main(["inspect", folder, *CPU]) == 1
    assert "fits      no: its weights take 1536" in capsys.readouterr().out
    assert main(["inspect", folder, *CPU, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("demo", "--model", "demo"), 2, "give MODEL or --model, not both"),
        (("demo", "--device", "cuda"), 2, "give --device cpu"),
        (("demo", "--load-format", "dummy", *CPU), 2, "has no headers to read"),
        (("/nowhere", *CPU), 1, "no model folder /nowhere"),
    ],
)
def test_what_cannot_be_inspected_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, message: str
) -> None:
    assert main(["inspect", *arguments]) == status
    assert message in capsys.readouterr().err


def test_a_folder_without_weights_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", str(tmp_path), *CPU]) == 1
    assert "holds neither model.safetensors" in capsys.readouterr().err
