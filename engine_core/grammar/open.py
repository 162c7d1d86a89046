"""What an engine does at its start, so that its first grammar need not wait for the tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.grammar.compile import load_tokenizer
from pagewire.engine_core.grammar.convert import converted, needs_conversion
from pagewire.engine_core.grammar.pool import Grammars
from pagewire.engine_core.grammar.prover import ConfinedProver
from pagewire.ipc.environment import env_float
from pagewire.ipc.options.structured_outputs import StructuredOutputsConfig
from pagewire.ipc.wire.worker_messages import Ready

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")


class LoadedTokenizer(NamedTuple):
    """The tokenizer of an engine's grammars, and the folder or file from which another process loads it."""

    tokenizer: LLTokenizer
    path: Path


def begin_tokenizer(config: EngineConfig) -> Callable[[], LoadedTokenizer]:
    """Begin to load the tokenizer of an engine's grammars, if it will have any, and return what waits for it.

    The interpreter is held up meanwhile, so this should be while the worker loads the model. The function returned
    raises as `load_tokenizer` and `converted`.
    """

    @cache
    def load() -> LoadedTokenizer:
        folder = config.tokenizer_folder()
        path = converted(folder) if needs_conversion(folder) else folder
        return LoadedTokenizer(load_tokenizer(path, config.eos_token_ids), path)

    return begun(load) if config.prepares_grammars else load


def open_grammars(
    config: EngineConfig, load: Callable[[], LoadedTokenizer], ready: Ready, wake: Callable[[], None]
) -> Grammars:
    """The pool that compiles an engine's grammars; its process starts, too.

    load: of `begin_tokenizer`. ready: what the worker says of the model. wake: called once a grammar is compiled.
    """
    grammars = Grammars(
        lambda: load().tokenizer,
        ready.vocab_size,
        open_prover=lambda: ConfinedProver(load().path, config.eos_token_ids, ready.vocab_size),
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
