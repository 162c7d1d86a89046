"""What the original module of a model makes of a few requests, which the transformed model must make, too."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pagewire.ipc.wire.codec import Tensor as PlainTensor
from pagewire.ipc.wire.sources import SOUND, SourceInfo, num_filled_tokens
from pagewire.workers.caches.slot_source import SlotSource
from pagewire.workers.caches.sources import Features
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import first_line
from pagewire.workers.module.lockstep import Lockstep
from pagewire.workers.module.refusals import refuse
from pagewire.workers.module.text_base import base_path, position_offset
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.module_base import base_of
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.mixers import keeps_states

logger = logging.getLogger("pagewire.worker")

BLOCK = 16
"""Tokens of a KV block in a dry run."""
SOURCES = (13, 7)
"""Tokens of the texts that are sources."""
SOUND_SECONDS = 2
LENGTHS = (20, 9)
"""Tokens of each request. The first starts at position 0, the second ends at the last possible position."""
CHUNKS = ((12, 0), (5, 9), (3, 0))
"""Tokens of each request in each of the steps."""
Places: TypeAlias = dict[str, Tensor]
"""The argument of a module with the positions of tokens; empty at the beginning of a sequence."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DryRun:
    """The requests of a dry run: token ids int64 [n] of each, and the position of its first token.

    chunks: tokens of each request in each of the steps. short_length: see `transforms.short_length`.
    num_blocks: KV blocks of a request. sources: of an encoder-decoder, with which requests begin, up to the token
    `first_target`.
    """

    token_ids: list[Tensor]
    offsets: list[int]
    chunks: tuple[tuple[int, ...], ...] = CHUNKS
    short_length: int = 0
    num_blocks: int = 3
    sources: tuple[SlotSource, ...] = ()
    first_target: int = 0

    @property
    def end(self) -> int:
        """The first position after all requests."""
        return max(map(self._end, range(len(self.offsets))))

    def _end(self, index: int) -> int:
        return self.offsets[index] + len(self.token_ids[index])

    def rows(self, index: int, places: Tensor) -> Tensor:
        """The rows of these tokens of a request in tables of angles, int64 [n]; see `RotaryTable`."""
        is_long = 0 < self.short_length < self._end(index)
        return places + self.offsets[index] + (self.short_length if is_long else 0)

    @classmethod
    def make(cls, vocab_size: int, max_model_len: int) -> DryRun:
        """Random tokens at the first and last positions, since some models change behaviour at high positions."""
        generator = torch.Generator().manual_seed(0)
        first = first_token(vocab_size)
        token_ids = [torch.randint(first, vocab_size, (n,), generator=generator) for n in LENGTHS]
        return cls(token_ids, [0, max(0, max_model_len - LENGTHS[1])])

    @classmethod
    def with_sources(cls, vocab_size: int, info: SourceInfo, max_len: int) -> DryRun:
        """Random sources, and random targets behind them, of which one is as long as the other is short."""
        generator = torch.Generator().manual_seed(0)
        hears = info.kind == SOUND
        lengths = [info.max_tokens] * len(LENGTHS) if hears else [min(n, BLOCK) for n in SOURCES]
        first = num_filled_tokens(max(lengths), BLOCK)
        targets = [min(n, info.max_target_tokens) for n in LENGTHS]
        ids = [torch.randint(5, vocab_size, (first + n,), generator=generator) for n in targets]
        sounds = [sound_of(info, generator) if hears else None for _ in lengths]
        return cls(
            ids,
            [0] * len(ids),
            ((first,) * len(ids), *CHUNKS),
            num_blocks=first // BLOCK + 2,
            sources=tuple(map(SlotSource, lengths, sounds)),
            first_target=first,
        )

    @classmethod
    def whole(cls, vocab_size: int, max_model_len: int) -> DryRun:
        """Random prompts that run as a whole, in one step."""
        generator = torch.Generator().manual_seed(0)
        lengths = tuple(min(length, max_model_len) for length in LENGTHS)
        first = first_token(vocab_size)
        ids = [torch.randint(first, vocab_size, (n,), generator=generator) for n in lengths]
        return cls(ids, [0] * len(ids), (lengths,))


def first_token(vocab_size: int) -> int:
    """The first token of a dry run: those before it are special tokens as a rule, of which some are not counted."""
    return min(5, vocab_size - 1)


@dataclass(frozen=True)
class Expected:
    """What the original module makes of each request of a dry run.

    results: logits [n, V], or hidden states [n, H] of a model that pools. scores: [1 or n, L] of a classifier.
    echoes: the results again, after the embeddings of tokens were rounded otherwise. Many layers in 16 bits magnify
        such a difference, and so do states, which carry it from token to token; other models have no echoes.
    """

    results: list[Tensor]
    scores: list[Tensor]
    echoes: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        weights: Weights,
        run: DryRun,
        device: Device,
        collective: Collective,
        *,
        pools: bool,
        features: Features | None = None,
    ) -> Expected:
        """Computed by rank 0, for all ranks. features: of an encoder-decoder that hears.

        Raises:
            LoadError: on rank 0, the module's forward pass fails.
        """
        results: list[Tensor] = []
        scores: list[Tensor] = []
        echoes: list[Tensor] = []
        if collective.rank == 0:
            if pools:
                results, scores, echoes = reference_states(weights, run)
            elif run.sources:
                results = target_logits(weights, run, features)
            else:
                results, echoes = reference_logits(weights, run)
        return cls(*(from_first(tensors, collective, device) for tensors in (results, scores, echoes)))


def reference_logits(weights: Weights, run: DryRun) -> tuple[list[Tensor], list[Tensor]]:
    """Logits [n, V] of each request by the original module, and their echoes; see `reference` and `Expected`."""
    causal = weights.causal

    def forward(ids: Tensor, places: Places) -> Tensor:
        return causal(input_ids=ids, use_cache=False, **places).logits[0]  # type: ignore[no-any-return]

    return with_echoes(weights, passes_of(weights, run, forward))


def with_echoes(weights: Weights, passes: list[Callable[[], Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """What the passes of a module make, and their echoes; see `reference` and `Expected`."""
    causal, echoes = weights.causal, Echoes()
    if torch.finfo(causal.dtype).bits > 16 and not any(map(keeps_states, causal.modules())):
        return reference(weights, passes), []
    hook = causal.get_input_embeddings().register_forward_hook(echoes.embedded)
    try:
        found = reference(weights, passes + [partial(echoes.run, one_pass) for one_pass in passes])
    finally:
        hook.remove()
    return found[: len(passes)], found[len(passes) :]


class Echoes:
    """Passes of a module, each in a thread of its own, in which embeddings are rounded otherwise."""

    def __init__(self) -> None:
        self._threads: set[int] = set()

    def run(self, one_pass: Callable[[], Tensor]) -> Tensor:
        """Run a pass so."""
        self._threads.add(threading.get_ident())
        try:
            return one_pass()
        finally:
            self._threads.discard(threading.get_ident())

    def embedded(self, _: Any, __: Any, output: Tensor) -> Tensor:
        """Embeddings as they are or, in such a pass, each half a unit in the last place larger or smaller."""
        if threading.get_ident() not in self._threads:
            return output
        generator = torch.Generator().manual_seed(1)
        signs = 2 * torch.randint(0, 2, output.shape, generator=generator) - 1
        unit = torch.finfo(output.dtype).eps / 2 * signs.to(output.device)
        return (output.float() * (1 + unit)).to(output.dtype)


def target_logits(weights: Weights, run: DryRun, features: Features | None) -> list[Tensor]:
    """Logits [n, V] of the target of each request by the original module of an encoder-decoder; see `reference`.

    features: of a model that hears.
    """
    causal = weights.causal

    @torch.inference_mode()
    def logits(token_ids: Tensor, source: SlotSource) -> Tensor:
        device = causal.get_output_embeddings().weight.device
        inputs = (
            {"input_ids": token_ids[None, : source.length].to(device)}
            if features is None
            else {"input_features": features(source).to(device, causal.dtype)}
        )
        target = token_ids[None, run.first_target :].to(device)
        return causal(**inputs, decoder_input_ids=target, use_cache=False).logits[0].cpu()  # type: ignore[no-any-return]

    requests = zip(run.token_ids, run.sources, strict=True)
    return reference(weights, [partial(logits, *request) for request in requests])


def passes_of(
    weights: Weights, run: DryRun, forward: Callable[[Tensor, Places], Tensor]
) -> list[Callable[[], Tensor]]:
    """A pass of a module for each request.

    forward: of the module, with token ids int64 [1, n] and where they are; gives a tensor [n, ...].
    """
    causal = weights.causal
    first = position_offset(causal.get_submodule(base_path(causal)))

    @torch.inference_mode()
    def one_pass(ids: Tensor, offset: int) -> Tensor:
        device = causal.get_input_embeddings().weight.device
        positions = torch.arange(offset, offset + len(ids), device=device)[None] + first
        # The module says itself where a sequence begins.
        places = {"position_ids": positions} if offset else {}
        return forward(ids[None].to(device), places).cpu()

    return [partial(one_pass, *request) for request in zip(run.token_ids, run.offsets, strict=True)]


def reference(weights: Weights, passes: list[Callable[[], Tensor]]) -> list[Tensor]:
    """What the original module makes of each request.

    The module's weights are read layer by layer, so it never needs to be in memory as a whole; both requests run a
    layer before the next one is read.

    passes: of the module, one for each request. They are called in several threads; one runs at a time.

    Raises:
        LoadError: the module's forward pass fails.
    """
    causal = weights.causal
    lockstep = Lockstep()
    try:
        with weights.streamed(lockstep):
            return lockstep.run(passes)
    except Exception as error:
        name, reason = type(causal).__name__, first_line(error)
        logger.info("%s does not run with one layer at a time, so it is read as a whole: %s", name, reason)
    weights.fill(causal)
    try:
        return [one_pass() for one_pass in passes]
    except Exception as error:
        raise refuse(causal.config, f"its forward pass fails: {first_line(error)}") from error


def sound_of(info: SourceInfo, generator: torch.Generator) -> PlainTensor:
    """A random sound."""
    samples = torch.randn(SOUND_SECONDS * info.sampling_rate, generator=generator)
    return PlainTensor("float32", tuple(samples.shape), samples.numpy().tobytes())


def reference_states(weights: Weights, run: DryRun) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Hidden states [n, H] of each request of a dry run by the untouched module; logits of a classifier; echoes.

    Raises:
        LoadError: the module's forward pass fails.
    """
    module, base = weights.causal, base_of(weights.causal)
    scores: list[Tensor] = []
    states: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        states.append(output[0][0].cpu())

    def forward(ids: Tensor, places: Places) -> Tensor:
        output = module(input_ids=ids, **places)
        if base is not module:
            scores.append(output.logits.reshape(-1, output.logits.shape[-1]).float().cpu())
        return states[-1]

    hook = base.register_forward_hook(keep)
    try:
        hidden, echoes = with_echoes(weights, passes_of(weights, run, forward))
    finally:
        hook.remove()
    return hidden, scores[-len(hidden + echoes) :][: len(hidden)], echoes


def from_first(tensors: list[Tensor], collective: Collective, device: Device) -> list[Tensor]:
    """The matrices that rank 0 has, on all ranks: on the host, and of rank 0's dtypes."""
    if collective.size == 1:
        return tensors
    is_first, own = collective.rank == 0, device.torch_device
    count = collective.broadcast(torch.tensor([len(tensors)], device=own), 0).item()
    shared = []
    for index in range(int(count)):
        form = [*tensors[index].shape, FLOATS.index(tensors[index].dtype)] if is_first else [0, 0, 0]
        rows, columns, dtype = collective.broadcast(torch.tensor(form, device=own), 0).tolist()
        values = tensors[index].float() if is_first else torch.zeros(rows, columns)
        shared.append(collective.broadcast(values.to(own).contiguous(), 0).cpu().to(FLOATS[dtype]))
    return shared
