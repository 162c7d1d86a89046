"""Triton's Python backend over `AsyncLLM`: texts and parameters of sampling in, text out, as a stream where asked.

The engine is a process of its own, so Triton's process holds no model.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from pagewire import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams


class TritonPythonModel:
    """What Triton loads: one engine, whose requests run in an event loop beside Triton's calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine with the options in the parameter `engine_args` of config.pbtxt."""
        parameters = json.loads(args["model_config"])["parameters"]
        options = json.loads(parameters["engine_args"]["string_value"])
        self.engine = AsyncLLM.from_engine_args(EngineArgs.from_kwargs(options), restarts=10)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Begin requests; their answers go through each one's own sender."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self.answer(request), self.loop)

    async def answer(self, request: Any) -> None:
        """Send the text of a request: in pieces if it wants a stream, else as a whole."""
        sender = request.get_response_sender()
        try:
            text = value(request, "text_input", b"").decode()
            stream = bool(value(request, "stream", False))
            fields = json.loads(value(request, "sampling_parameters", b"{}"))
            kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
            params = SamplingParams(**fields, output_kind=kind)
            async for output in self.engine.generate(text, params, uuid.uuid4().hex):
                sender.send(response(output.outputs[0].text))
                if sender.is_cancelled():
                    break  # which aborts the request
        except (ValueError, TypeError, RuntimeError) as error:
            sender.send(triton.InferenceResponse(error=triton.TritonError(str(error))))
        sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        """End the engine."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.engine.shutdown()


def value(request: Any, name: str, default: Any) -> Any:
    """Return the first element of an input, or `default` if the request lacks it."""
    tensor = triton.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


def response(text: str) -> Any:
    """Return a response with one text."""
    tensor = triton.Tensor("text_output", np.array([text.encode()], dtype=np.object_))
    return triton.InferenceResponse(output_tensors=[tensor])
