"""A rank's part of a model: which rows and columns of each weight it holds, by the model's plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from pagewire.kernels.data.weight import Weight
from pagewire.workers.errors import IndivisibleError, LoadError
from pagewire.workers.module.configuration import layer_configs, state_layers
from pagewire.workers.module.matrices import is_experts, is_linear, is_stack, is_transposed
from pagewire.workers.module.parallel_plan import plan_of, style_of
from pagewire.workers.module.text_base import base_path
from pagewire.workers.ranks.cut import Axis, Cut
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.mixers import KINDS, MixerCuts, cuts_of, keeps_states
from pagewire.workers.ranks.shares import Heads, scaled, width_spans

KEY_PREFIXES = ("k_", "v_", "Wk", "Wv")
"""Of names in an attention module that belong to its keys and values."""


class Shards:
    """The parts of a causal module's weights that a rank holds.

    cuts: by the names of parameters; what is not there, every rank holds as a whole.
    heads: of each attention module that is divided, by its name. gathered: how the inputs of norms are divided that
        are over all of them, and lists of modules for each head. mixers: of each mixer with states, by its name.
        output: the layer that computes logits; None for a model that pools, whose classifier every rank has as a
        whole.
    """

    def __init__(self, causal: Any, collective: Collective) -> None:
        """Divide the module, which may be on the meta device.

        Raises:
            IndivisibleError: it has no plan, or its sizes cannot be divided over the group; the text says what can.
        """
        self.collective = collective
        self.cuts: dict[str, Cut] = {}
        self.heads: dict[str, Heads] = {}
        self.gathered: dict[str, Cut] = {}
        self.mixers: dict[str, MixerCuts] = {}
        self._config = causal.config.get_text_config()
        prefix = base_path(causal) if hasattr(causal, causal.base_model_prefix) else ""
        self._modules: dict[str, Any] = {
            name: module
            for name, module in causal.named_modules()
            if name.startswith(prefix) or not name.startswith(f"{causal.base_model_prefix}.")
        }
        try:
            if state_layers(causal.config):
                self._divide_mixers()
            self._divide_vocabulary(causal)
            self._divide_layers(causal)
        except LoadError as error:
            raise IndivisibleError(
                f"{type(causal).__name__} cannot be divided over {collective.size} ranks: {error}"
            ) from error

    def cut(self, name: str) -> Cut | None:
        """How the parameter of this name is divided; None if this rank holds all of it."""
        return self.cuts.get(name)

    def keep_only(self, prefixes: tuple[str, ...]) -> None:
        """Forget how everything is divided whose name begins with none of these."""
        parts: tuple[dict[str, Any], ...] = (self.cuts, self.heads, self.gathered, self.mixers)
        for part in parts:
            for name in [name for name in part if not name.startswith(prefixes)]:
                del part[name]

    def _divide_vocabulary(self, causal: Any) -> None:
        output, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
        names = {module: name for name, module in self._modules.items()}
        if not isinstance(output, nn.Linear | None) or not isinstance(embedding, nn.Embedding):
            raise LoadError("its embedding or output layer is of a kind that is not served")
        self.output = output
        if output is not None:
            self._add_linear(names[output], self._widths(output.out_features))
        self._add(f"{names[embedding]}.weight", self._widths(embedding.num_embeddings))

    def _divide_mixers(self) -> None:
        for name, module in self._modules.items():
            if not keeps_states(module):
                continue
            if (found := cuts_of(module, self.collective.size)) is None:
                raise LoadError(
                    f"its layers keep states, and those of {type(module).__name__} are not divided; use "
                    "pipeline_parallel_size"
                )
            self.mixers[name] = found
            for leaf, spans in found.rows.items():
                if isinstance(getattr(module, leaf), nn.Module):
                    self._add_linear(f"{name}.{leaf}", spans)
                else:
                    self._add(f"{name}.{leaf}", spans)
            leaf, spans = found.columns
            self._add_linear(f"{name}.{leaf}", spans, Axis.COLUMNS)

    def _divide_layers(self, causal: Any) -> None:
        plan = plan_of(causal)
        for name, module in self._modules.items():
            if (style := style_of(plan, name)) is not None and not is_experts(module):
                self._divide_module(name, module, style)
            for leaf, _ in module.named_parameters(recurse=False):
                if is_stack(module, leaf):
                    self._divide_experts(f"{name}.{leaf}", module, leaf)
                elif style_of(plan, f"{name}.{leaf}") == "colwise":
                    self._divide_vector(f"{name}.{leaf}", getattr(module, leaf))
        for name, module in self._modules.items():
            if is_attention(module) and not any(
                cut.axis is Axis.COLUMNS for key, cut in self.cuts.items() if key.startswith(f"{name}.")
            ):
                raise LoadError(
                    f"neither transformers nor pagewire has a plan for its attention ({name}); use one rank"
                )

    def _divide_module(self, name: str, module: Any, style: str) -> None:
        if isinstance(module, nn.ModuleList):  # one for each head
            self.gathered[name] = self._cut(Axis.ROWS, self._by_head(name, len(module)))
        elif style == "gathered":
            self.gathered[name] = self._cut(Axis.ROWS, self._part(name, module.weight.numel()))
        elif not is_linear(module):
            self._divide_vector(f"{name}.weight", module.weight)
        elif style == "rowwise":
            self._add_linear(name, self._part(name, _features(module)[1]), Axis.COLUMNS)
        elif style == "qkv_colwise":
            self._add_linear(name, self._query_key_value(name, _features(module)[0]))
        elif style == "groups_colwise":
            self._add_linear(name, self._groups(name, _features(module)[0]))
        elif style == "packed_colwise":
            width = _features(module)[0] // 2
            self._add_linear(name, tuple((own, _after(own, width)) for (own,) in self._widths(width)))
        else:
            self._add_linear(name, self._part(name, _features(module)[0]))

    def _divide_experts(self, name: str, module: Any, leaf: str) -> None:
        """Divide the width of every expert."""
        shape = getattr(module, leaf).shape
        rows, columns = shape[:0:-1] if is_transposed(module) else shape[1:]
        bias = f"{name}_bias"
        if leaf == "down_proj":
            self._add(name, self._widths(columns), Axis.COLUMNS)
            self._add(bias, self._widths(columns), Axis.COLUMNS)
            return
        spans = self._widths(rows)
        if module.has_gate:
            halves = self._widths(rows // 2)
            if getattr(module, "is_concatenated", True):
                spans = tuple((own, _after(own, rows // 2)) for (own,) in halves)
            else:
                spans = tuple((scaled(own, 2),) for (own,) in halves)
        self._add(name, spans)
        self._add(bias, spans, dim=-1)

    def _divide_vector(self, name: str, tensor: Tensor) -> None:
        self._add(name, self._by_head(name, len(tensor)))

    def _part(self, name: str, size: int) -> tuple[tuple[range, ...], ...]:
        """The spans of something in an attention module by heads, of anything else by width."""
        parent = name.rpartition(".")[0]
        return self._by_head(name, size) if is_attention(self._modules[parent]) else self._widths(size)

    def _by_head(self, name: str, size: int) -> tuple[tuple[range, ...], ...]:
        """The spans of something in an attention module; its name tells whether it has query or KV heads."""
        owner, leaf = self._attention(name)
        heads = self._heads_of(owner)
        of_keys = leaf.startswith(KEY_PREFIXES)
        width = size // (heads.num_kv if of_keys else heads.num)
        return tuple((scaled(share[of_keys], width),) for share in self._shares(heads))

    def _query_key_value(self, name: str, size: int) -> tuple[tuple[range, ...], ...]:
        heads = self._heads_of(self._attention(name)[0])
        if size % (heads.num + 2 * heads.num_kv):
            raise LoadError(f"{name} has {size} outputs for {heads.num} heads and {heads.num_kv} of keys")
        width = size // (heads.num + 2 * heads.num_kv)
        spans = []
        for query, kv in self._shares(heads):
            keys = _after(scaled(kv, width), heads.num * width)
            spans.append((scaled(query, width), keys, _after(keys, heads.num_kv * width)))
        return tuple(spans)

    def _groups(self, name: str, size: int) -> tuple[tuple[range, ...], ...]:
        """The spans of queries, key and value of each head of keys; a rank may have some of a head's queries."""
        heads = self._heads_of(self._attention(name)[0])
        per_kv = heads.num // heads.num_kv
        if size % (heads.num_kv * (per_kv + 2)):
            raise LoadError(f"{name} has {size} outputs for {heads.num} heads and {heads.num_kv} of keys")
        width = size // (heads.num_kv * (per_kv + 2))
        spans: list[tuple[range, ...]] = []
        for query, kv in self._shares(heads):
            if len(query) == len(kv) * per_kv:
                spans.append((scaled(kv, (per_kv + 2) * width),))
                continue
            own = _after(scaled(query, width), 2 * kv.start * width)
            end = kv.stop * (per_kv + 2) * width
            spans.append((own, range(end - 2 * width, end)))
        return tuple(spans)

    def _attention(self, name: str) -> tuple[str, str]:
        """The attention module that something is in, and its name within."""
        owner = name
        while owner and not is_attention(self._modules.get(owner)):
            owner = owner.rpartition(".")[0]
        if not owner:
            raise LoadError(f"{name} is in no attention module")
        return owner, name.removeprefix(f"{owner}.")

    def _heads_of(self, name: str) -> Heads:
        if name not in self.heads:
            self.heads[name] = _heads(self._modules[name], self._config)
        return self.heads[name]

    def _shares(self, heads: Heads) -> Iterator[tuple[range, range]]:
        return (heads.share(rank, self.collective.size) for rank in range(self.collective.size))

    def _widths(self, width: int) -> tuple[tuple[range, ...], ...]:
        return tuple((span,) for span in width_spans(width, self.collective.size))

    def _add_linear(self, name: str, spans: tuple[tuple[range, ...], ...], axis: Axis = Axis.ROWS) -> None:
        self._add(f"{name}.weight", spans, axis)
        self._add(f"{name}.bias", spans, axis)

    def _add(
        self, name: str, spans: tuple[tuple[range, ...], ...], axis: Axis = Axis.ROWS, dim: int = 0
    ) -> None:
        self.cuts[name] = self._cut(axis, spans, dim)

    def _cut(self, axis: Axis, spans: tuple[tuple[range, ...], ...], dim: int = 0) -> Cut:
        return Cut(axis, spans, self.collective.rank, dim)


def own_part(matrix: Weight, cut: Cut | None, quantise: Callable[[Weight], Weight]) -> Weight:
    """This rank's part of a matrix, quantised as the whole would be: its scales are those of whole rows.

    cut: None: every rank has all of it.
    """
    own = quantise(matrix if cut is None else cut.rows(matrix))
    return own if cut is None else cut.columns(own)


def is_attention(module: Any) -> bool:
    """True for a module that calls attention: it knows its layer and the size of its heads.

    It is no indexer, and no mixer with states.
    """
    if type(module).__name__ in KINDS:
        return False
    sizes = ("head_dim", "head_size", "qk_head_dim")
    knows_layer = getattr(module, "layer_idx", None) is not None and not hasattr(module, "index_topk")
    return knows_layer and any(hasattr(module, name) for name in sizes)


def head_size(attention: Any) -> int:
    """The size of an attention module's query heads."""
    sizes = (getattr(attention, name, None) for name in ("qk_head_dim", "head_dim", "head_size"))
    return int(next(size for size in sizes if size))


def _heads(attention: Any, config: Any) -> Heads:
    own = layer_configs(config)[attention.layer_idx]
    num: int = own.num_attention_heads
    for name in ("k_proj", "Wk"):
        if (keys := getattr(attention, name, None)) is not None:
            return Heads(num, _features(keys)[0] // head_size(attention))
    if hasattr(attention, "kv_b_proj"):
        return Heads(num, num)
    for name in ("kv_heads", "num_kv_heads"):
        if hasattr(attention, name):
            return Heads(num, getattr(attention, name))
    return Heads(num, getattr(own, "num_key_value_heads", num))


def _features(linear: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    rows, columns = linear.weight.shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def _after(span: range, offset: int) -> range:
    return range(span.start + offset, span.stop + offset)
