"""Loading holds the packed weights, and never the same weights a second time in another form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.architectures import EXPERTS, GROUPED, Architecture

MIB = 1 << 20
BIG = GROUPED | {"hidden_size": 1024, "head_dim": 64, "num_attention_heads": 16, "num_hidden_layers": 6}
DENSE = Architecture("llama", BIG | {"intermediate_size": 4096})
SPARSE = Architecture("qwen3_moe", BIG | EXPERTS | {"moe_intermediate_size": 1024})

LOAD = """if True:
    import json, sys, threading
    from pagewire.ipc.wire.worker_messages import WorkerConfig
    from pagewire.workers.process.wiring import open_runner
    import transformers.modeling_utils
    from transformers import AutoModelForCausalLM

    def anonymous():
        status = open("/proc/self/status").read()
        return int(status.split("RssAnon:")[1].split()[0]) << 10

    before = peak = anonymous()
    done = threading.Event()

    def watch():
        global peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    threading.Thread(target=watch, daemon=True).start()
    config = WorkerConfig(sys.argv[1], dtype="bfloat16", max_model_len=64, num_blocks=16, num_threads=2)
    runner, ready = open_runner(config, lambda *_: None)
    done.set()
    print(json.dumps({"taken": peak - before, "weights": ready.weight_bytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("architecture", [DENSE, SPARSE], ids=lambda a: a.name)
def test_no_weight_is_in_memory_twice(architecture: Architecture, tmp_path: Path) -> None:
    """From a checkpoint in float32, whose weights all have to be converted."""
    folder = architecture.write(tmp_path)
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["weights"] > 150 * MIB
    # A second copy would be 1.0; the rest is code that is imported, and one layer for the proof.
    assert measured["taken"] < 1.5 * measured["weights"] + 110 * MIB
