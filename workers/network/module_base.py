"""Models that run the code of transformers: a base model with our attention, and the head behind it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from pagewire.kernels.data.weight import Linear
from pagewire.kernels.output import CappedOutput
from pagewire.workers.module.invariant import Invariant
from pagewire.workers.module.text_base import position_offset
from pagewire.workers.module.transforms import LinearModule, tolerance
from pagewire.workers.network.model import Head
from pagewire.workers.network.pooler import FUNCTIONS, Dense, chain
from pagewire.workers.network.road import Road
from pagewire.workers.step.context import StepContext

Arithmetic = Callable[[], AbstractContextManager[object]]
"""Makes a context in which transformers' code is batch-invariant, see `Invariant`."""


def arithmetic(batch_invariant: bool) -> Arithmetic:
    """That of a device."""
    return Invariant if batch_invariant else nullcontext


class ModuleBase:
    """A base model of transformers with its own forward, in place of a `Network`; see `ModelBase`.

    module: the base. encodes: its tokens attend to later ones, too. packed: all prompts of a step are one sequence;
    otherwise it encodes prompt by prompt. why: it is no `Network`.
    """

    network = None
    embedding_size = 0

    def __init__(
        self,
        module: Any,
        arithmetic: Arithmetic,
        *,
        encodes: bool = False,
        packed: bool = True,
        why: str = "",
    ) -> None:
        self.road = Road(None, why)
        self.module, self.encodes, self.packed = module, encodes, packed
        self._arithmetic = arithmetic
        self._accepts = set(inspect.signature(module.forward).parameters)
        self._takes_types = takes_token_types(module)
        self._first = 0 if encodes else position_offset(module)

    @property
    def name(self) -> str:
        """That of the module's class."""
        return type(self.module).__name__

    @property
    def words(self) -> Any:
        """The module that looks tokens up."""
        return self.module.get_input_embeddings()

    @property
    def tables(self) -> list[Any]:
        """See `ModelBase`: the module, which has its weights."""
        return [self.module]

    def __call__(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Hidden states [T, H] of the tokens int64 [T] of a step at positions int64 [T]."""
        with self._arithmetic():
            if self.encodes:
                return self._encoded(input_ids, positions, step)
            at = positions[None] + self._first
            return self.module(input_ids=input_ids[None], position_ids=at, use_cache=False)[0][0]  # type: ignore[no-any-return]

    def _encoded(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        inputs = {"input_ids": input_ids, "position_ids": positions}
        if self._takes_types:
            types = step.token_types
            inputs["token_type_ids"] = torch.zeros_like(input_ids) if types is None else types
        inputs = {name: value[None] for name, value in inputs.items() if name in self._accepts}
        if self.packed:
            return self.module(**inputs)[0][0]  # type: ignore[no-any-return]
        parts = [torch.split(x, step.lengths, dim=1) for x in inputs.values()]
        each = [dict(zip(inputs, part, strict=True)) for part in zip(*parts, strict=True)]
        return torch.cat([self.module(**part)[0][0] for part in each])


class ModuleHead:
    """The part of a causal module behind its base, whose place a stub takes that passes hidden states through.

    So the module's own treatment of logits (scaling, soft caps) is kept.
    """

    def __init__(self, causal: Any, arithmetic: Arithmetic) -> None:
        self.module, self._arithmetic = causal, arithmetic
        prefix = causal.base_model_prefix
        # T5's encoder and decoder stand in the causal module itself.
        for name in (prefix,) if hasattr(causal, prefix) else ("encoder", "decoder"):
            setattr(causal, name, BaseStub(getattr(causal, name)))
        accepts = inspect.signature(causal.forward).parameters
        # Code of one's own may take them without naming them.
        self._inputs = [n for n in ("inputs_embeds", "decoder_inputs_embeds") if n in accepts] or [
            "inputs_embeds"
        ]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, H]."""
        with self._arithmetic():
            inputs = dict.fromkeys(self._inputs, hidden[None])
            return self.module(**inputs, use_cache=False).logits[0]  # type: ignore[no-any-return]

    def _takes(self, hidden: Tensor) -> bool:
        """True if it takes hidden states of this dtype."""
        try:
            self(hidden)
        except (ValueError, RuntimeError):
            return False
        return True

    def shortened(self, device: torch.device, dtype: torch.dtype) -> tuple[ModuleHead | Linear, str]:
        """The output layer alone where its product is all that the causal module does, to the bit; and its name.

        Or with the factor and the cap of logits that the configuration names, if that is all it does besides. Both
        are tried on states of all sizes, since a cap leaves small logits nearly alone, and a limit all of them.

        dtype: of hidden states. An output layer of another one gets them from the module.
        """
        linears = {n: child for n, child in self.module.named_children() if isinstance(child, LinearModule)}
        if len(linears) != 1:
            return self, ""
        ((name, linear),) = linears.items()
        if linear.weight.dtype != dtype:
            return self, name
        generator = torch.Generator().manual_seed(0)
        sizes = torch.logspace(-2, 4, 7)[:, None]
        states = sizes * torch.randn(len(sizes), linear.in_features, generator=generator)
        hidden = states.to(device, dtype)
        expected, short = self(hidden), linear.product(hidden)
        if short.dtype != expected.dtype:
            # Logits are drawn from as float32 anyway; but states may be wider, too, and be narrowed here (Mamba).
            is_same = expected.dtype is torch.float32 and torch.equal(short.float(), expected)
            return (linear.product if is_same and not self._takes(hidden.float()) else self), name
        if torch.equal(short, expected):
            return linear.product, name
        for scale, softcap in logit_forms(self.module.config.get_text_config()):
            output = CappedOutput(linear.product, scale, softcap)
            if torch.allclose(output(hidden), expected, rtol=tolerance(dtype), atol=1e-6):
                return output, name
        return self, name


def linear_of(head: Head | None) -> Linear | None:
    """A head that is a linear layer; None if it is a module, or there is none."""
    return None if head is None or isinstance(head, ModuleHead) else cast("Linear", head)


def logit_forms(config: Any) -> Iterator[tuple[float, float | None]]:
    """The factors of logits that settings of families may mean, each with the cap; see `Kernels.cap`."""
    softcap: float | None = getattr(config, "final_logit_softcapping", None)
    for name in ("logit_scale", "logits_scale", "lm_head_multiplier"):
        scale = getattr(config, name, None)
        if isinstance(scale, int | float) and scale:  # of MPT it may be a word
            yield float(scale), softcap
            return
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    yield 1.0 / scaling, softcap
    yield scaling, softcap  # of HyperCLOVA X, which multiplies


class ModuleScores:
    """The part of a classifier behind its base, whose place a stub takes.

    The stub passes on a pooled state as a sequence of one token: the first token and the last are then the same.
    """

    def __init__(self, classifier: Any, base: Any, arithmetic: Arithmetic) -> None:
        self.module, self._arithmetic = classifier, arithmetic
        setattr(classifier, classifier.base_model_prefix, PooledStub(getattr(base, "pooler", None)))
        if getattr(classifier.config, "pad_token_id", None) is None:
            classifier.config.pad_token_id = (
                0  # without one, transformers classifies a single sequence at a time
            )

    def __call__(self, pooled: Tensor) -> Tensor:
        """Logits float32 [n, L] of classes, from pooled hidden states [n, H]."""
        with self._arithmetic():
            return self.module(inputs_embeds=pooled[:, None]).logits.reshape(len(pooled), -1).float()  # type: ignore[no-any-return]

    def shortened(self) -> ModuleScores | list[Dense]:
        """The classifier's linear layers alone, where they give its own scores to the bit."""
        linears = [child.product for child in self.module.modules() if isinstance(child, LinearModule)]
        if len(linears) not in (1, 2):
            return self
        states = torch.randn(5, linears[0].in_features, generator=torch.Generator().manual_seed(0))
        states = states.to(linears[0].dtype)
        expected = self(states)
        for between in (None, *FUNCTIONS) if len(linears) == 2 else (None,):
            layers = [Dense(linears[0], between), *(Dense(linear, None) for linear in linears[1:])]
            fits = all(a.out_features == b.in_features for a, b in pairwise(linears))
            if fits and torch.equal(chain(layers, states), expected):
                return layers
        return self


class BaseStub(nn.Module):
    """Stands in for a base model, and returns the hidden states that it is given.

    base: whose numbers it keeps, for some causal modules read a factor of their logits there.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        for name, value in vars(base).items():
            if type(value) in (int, float):
                setattr(self, name, value)
        self.vocabulary_mapping = getattr(base, "vocabulary_mapping", None)
        """Which tokens are parts of pictures: Chameleon's head gives them no chance."""

    def forward(
        self,
        *_: Any,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        **__: Any,
    ) -> BaseStubOutput:
        """The embeddings that it is given, in the form of a base model's output."""
        states = decoder_inputs_embeds if inputs_embeds is None else inputs_embeds
        assert states is not None, "a head runs on states"
        return BaseStubOutput((states,))

    @property
    def decoder(self) -> BaseStub:
        """This stub: some causal modules call their base's decoder directly."""
        return self


class BaseStubOutput(tuple[Tensor]):
    """A base model's output with hidden states only."""

    @property
    def last_hidden_state(self) -> Tensor:
        """Hidden states [1, T, H]."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        """None for all other outputs: caches, attentions, router logits."""
        if name.startswith("__"):
            raise AttributeError(name)


class PooledStub(nn.Module):
    """Stands in for the base of a classifier, and returns the hidden states that it is given.

    pooler: the part of the base, if any, that prepares the first token's state for the classifier, as BERT's.
    """

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> PooledStubOutput:
        """`inputs_embeds` [n, 1, H] in the form of a base model's output."""
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return PooledStubOutput((inputs_embeds, pooled))


class PooledStubOutput(tuple[Any, ...]):
    """A base model's output: hidden states, and BERT's pooled state."""

    @property
    def last_hidden_state(self) -> Tensor:
        """Hidden states [n, 1, H]."""
        return self[0]  # type: ignore[no-any-return]

    @property
    def pooler_output(self) -> Tensor:
        """BERT's pooled state [n, H]."""
        return self[1]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> None:
        """None for all other outputs: caches, attentions."""
        if name.startswith("__"):
            raise AttributeError(name)


def base_of(module: Any) -> Any:
    """The base of a classifier, or the module itself if it is a base."""
    return getattr(module, module.base_model_prefix, module)


def takes_token_types(base: Any) -> bool:
    """True if the model has embeddings of more than one token type."""
    table = getattr(getattr(base, "embeddings", None), "token_type_embeddings", None)
    return table is not None and table.weight.shape[0] > 1
