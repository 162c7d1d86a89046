"""What an engine does at its start, so that its first grammar need not wait for the tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.grammar.compile import load_tokenizer
from pagewire.engine_core.grammar.pool import Grammars
from pagewire.engine_core.grammar.prover import ConfinedProver
from pagewire.ipc.environment import env_float
from pagewire.ipc.options.structured_outputs import StructuredOutputsConfig
from pagewire.ipc.wire.worker_messages import Ready

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")


def begin_tokenizer(config: EngineConfig) -> Callable[[], LLTokenizer]:
    """Begin to load the tokenizer of an engine's grammars, if it will have any, and return what waits for it.

    The interpreter is held up meanwhile, so this should be while the worker loads the model. The function returned
    raises as `load_tokenizer`.
    """

    def load() -> LLTokenizer:
        return load_tokenizer(config.tokenizer_folder(), config.eos_token_ids)

    return begun(load) if config.prepares_grammars else load


def open_grammars(
    config: EngineConfig, load: Callable[[], LLTokenizer], ready: Ready, wake: Callable[[], None]
) -> Grammars:
    """The pool that compiles an engine's grammars; its process starts, too.

    load: of `begin_tokenizer`. ready: what the worker says of the model. wake: called once a grammar is compiled.
    """
    grammars = Grammars(
        load,
        ready.vocab_size,
        open_prover=lambda: ConfinedProver(config.tokenizer_folder(), config.eos_token_ids, ready.vocab_size),
        seconds=env_float("PAGEWIRE_GRAMMAR_TIMEOUT_S", 10.0),
        wake=wake,
        defaults=StructuredOutputsConfig.read(config.args.structured_outputs_config),
    )
    if config.prepares_grammars and ready.pooling is None:
        grammars.start()
    return grammars


def begun(work: Callable[[], T]) -> Callable[[], T]:
    """Begin work in a thread. Returns a function that waits for its result; each call repeats work that failed."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name="begun", daemon=True).start()
    return lambda: result.result() if result.exception() is None else work()
