"""A server whose model follows the script in a conversation, for agents; it runs in the project's Python.

All is real but for the core, which is the fake one of the frontend's tests. A script is a list of replies in the
first message of a user, encoded so that no client changes it (`scripts.py`): the first reply is for a prompt
without earlier replies, the second for one with one reply, and so on.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.text.tokenizer import load_tokenizer
from pagewire.ipc.wire.messages import Deltas, EngineInfo, Request
from pagewire.ipc.wire.params import StructuredOutputsParams
from tests.frontend.conftest import FakeCore
from tests.serving import serving

SCRIPT = re.compile(r"\[\[script:([A-Za-z0-9+/=]+)\]\]")
TURN = "<|im_start|>assistant\n"
NO_SCRIPT = "There is no script."
SECONDS_PER_TOKEN = 0.002


class PacedCore(FakeCore):
    """A core whose tokens come one by one, so that clients see streams of many events."""

    def _reply(self, message: Any) -> None:
        super()._reply(message)
        if isinstance(message, Deltas):
            time.sleep(SECONDS_PER_TOKEN)


def reply_to(prompt: str, constraint: StructuredOutputsParams | None) -> str:
    """Return the next reply of the prompt's script: a text, or a call in the form that the request wants."""
    if (found := SCRIPT.search(prompt)) is None:
        return NO_SCRIPT
    replies: list[Any] = json.loads(base64.b64decode(found[1]))
    reply = replies[min(prompt.count(TURN), len(replies)) - 1]
    if isinstance(reply, str):
        return reply
    schema = None if constraint is None else constraint.json
    if schema is None:  # the model chooses to call
        return f"<tool_call>\n{json.dumps(reply)}\n</tool_call>"
    wanted = json.loads(schema) if isinstance(schema, str) else schema
    if wanted.get("type") == "array":  # any tool is required
        return json.dumps([{"name": reply["name"], "parameters": reply["arguments"]}])
    return json.dumps(reply["arguments"])  # this tool is


def main(demo: Path, template: str) -> None:
    """Serve until SIGTERM. demo: folder with the tokenizer. template: chat template."""
    tokenizer = load_tokenizer(demo)

    def answer(request: Request, index: int) -> list[int]:
        prompt = tokenizer.decode(request.prompt.token_ids, skip_special_tokens=False)
        return tokenizer.encode(reply_to(prompt, request.params.structured_outputs), add_special_tokens=False)

    info = EngineInfo(
        model="demo",
        model_path=str(demo),
        tokenizer=str(demo),
        served_model_names=["demo"],
        architecture="LlamaForCausalLM",
        dtype="float32",
        device="cpu",
        vocab_size=tokenizer.vocab_size,
        max_model_len=1 << 17,
        block_size=16,
        num_blocks=1 << 14,
        max_num_seqs=16,
        max_logprobs=20,
        max_n=8,
        seed=0,
        eos_token_id=tokenizer.eos_token_id,
        generation_config={},
    )
    options = ServerOptions(port=0, chat_template=template)
    with tempfile.TemporaryDirectory() as folder:
        core = PacedCore(f"ipc://{folder}/core.sock", info)
        core.auto, core.answer, core.reason = True, answer, "stop"
        core.calls["metrics"] = list
        with serving(core.address, options) as url:
            print(f"ready {url}", flush=True)
            signal.sigwait({signal.SIGTERM, signal.SIGINT})
        core.close()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(Path(sys.argv[1]), sys.argv[2])
