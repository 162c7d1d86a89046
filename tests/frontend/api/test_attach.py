"""What a frontend imports to attach and to get its first tokens: most of the time that this takes is for imports.

What is refused here takes a millisecond or more, or imports what does. Import it where it is needed first, or move
what a frontend needs of it to a module of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.frontend.conftest import FakeCore
from tests.test_imports import MODULES, run_python

ATTACH = """
import json, sys
before = set(sys.modules)
from pagewire import LLM, SamplingParams
llm = LLM.attach(sys.argv[1])
attached = set(sys.modules) - before
(output,) = llm.generate("w2 w3", SamplingParams(max_tokens=3), use_tqdm=False)
later = set(sys.modules) - before - attached
llm.shutdown()
print(json.dumps([sorted(attached), sorted(later), list(output.outputs[0].token_ids)]))
"""
LIBRARIES = {"msgspec", "tokenizers", "zmq", "cython_runtime", "typing_extensions"}  # with what they import
STANDARD = {"argparse", "asyncio", "ctypes", "difflib", "hashlib", "socket", "ssl", "subprocess", "tempfile"}
OURS = {
    "frontend.api.async_llm",  # event loops
    "frontend.core.spawn",  # cores that are spawned
    "frontend.core.spawned_cores",
    "frontend.media.intake",  # pictures and sounds
    "frontend.media.items",
    "frontend.route",  # several cores
    "frontend.server",  # HTTP
    "frontend.text.chat_template",  # chats
    "ipc.families",  # models' configurations
    "ipc.files.s3",  # downloads
    "ipc.gguf.config",  # GGUF files
    "ipc.host.job_server",  # child processes
    "ipc.host.lifeline",
    "ipc.options",  # options of an engine
}


def test_a_frontend_attaches_with_few_imports(core: FakeCore, tmp_path: Path) -> None:
    core.auto = True
    attached, later, token_ids = json.loads(run_python(ATTACH, core.address, cwd=tmp_path))
    assert token_ids == [2, 3, 4] and "pagewire.frontend.core.session" in attached
    assert later == [], "what attaching leaves out must not make the first request slow"
    tops = {name.partition(".")[0] for name in attached}
    foreign = {top for top in tops - sys.stdlib_module_names if not top.startswith("_")}
    assert foreign <= LIBRARIES | {"pagewire"}
    assert not STANDARD & tops
    refused = {f"pagewire.{name}" for name in OURS}
    assert refused <= MODULES.keys(), "one was renamed"
    assert [name for name in attached if any(f"{name}.".startswith(f"{other}.") for other in refused)] == []
