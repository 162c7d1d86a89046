"""The stack of decoder.cpp."""

import ctypes
import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pagewire.kernels.cpu.adapters import native_rows
from pagewire.kernels.cpu.all_reduce import AllReduce
from pagewire.kernels.cpu.batch import set_batch
from pagewire.kernels.cpu.experts import ACTIVATION_CODES, CompiledExperts, Packed, matrix
from pagewire.kernels.cpu.library import AttentionCall, structure
from pagewire.kernels.cpu.linear import PackedLinear
from pagewire.kernels.cpu.quantised import QuantisedLinear
from pagewire.kernels.cpu.tensors import DTYPES, cache_fields
from pagewire.kernels.deltas import AdapterRows, Shapes
from pagewire.kernels.kv_codes import DTYPE as KV_CODES
from pagewire.kernels.kv_codes import head_size
from pagewire.kernels.layer import PRODUCTS, Layer, Mixture, Norm, mixture_products, product_shapes
from pagewire.kernels.paging import AttentionBatch, Cache, LogitTerms, check_scales
from pagewire.kernels.weight import Linear

SCRATCH = ("qkv", "attended", "gate_up", "gated", "shared", "logits", "of_experts")
"""The scratch buffers of `StackCall` for numbers of the layers' dtype."""


NormParameters, MixtureParameters, LayerParameters, StackCall = map(
    structure, ("Norm", "Mixture", "Layer", "StackCall")
)


def _products(layer: Layer) -> dict[str, Linear]:
    """The layer's linear layers but for its experts, by name."""
    products = {name: getattr(layer, name) for name in PRODUCTS}
    if layer.mixture is not None:
        products |= {"router": layer.mixture.router.linear, "shared_gate": layer.mixture.shared_gate}
    return {name: product for name, product in products.items() if product is not None}


def _linears(layer: Layer) -> dict[str, Packed]:
    """Those that linear.cpp and quantised.cpp compute."""
    return {
        name: product
        for name, product in _products(layer).items()
        if isinstance(product, PackedLinear | QuantisedLinear)
    }


def _norm(norm: Norm, size: int, dtype: torch.dtype) -> ctypes.Structure:
    if norm.weight.shape != (size,) or norm.weight.dtype != dtype or not norm.weight.is_contiguous():
        raise ValueError(f"a norm's weight [{size}] of {dtype} expected")
    return NormParameters(norm.weight.data_ptr(), norm.eps, norm.offset)


class CompiledStack:
    """A stack of layers of equal shapes in one call; see `pagewire.kernels.decoder.Stack`."""

    @classmethod
    def of(cls, library: ctypes.CDLL, input_norm: Norm, layers: Sequence[Layer]) -> "CompiledStack | None":
        """None if the layers differ in shape, or their linear layers are not packed weights, dense or quantised.

        Either all layers have their parts on the same ranks, or none has.
        """
        if len({id(layer.ranks) for layer in layers}) > 1:
            return None
        forms = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
        dtypes = {input_norm.weight.dtype}
        for layer in layers:
            linears = _linears(layer)
            if layer.terms != LogitTerms(window=layer.terms.window):
                return None
            if len(linears) < len(_products(layer)) or layer.activation not in ACTIVATION_CODES:
                return None
            if layer.mixture is not None:
                experts = layer.mixture.experts
                if experts.activation is None or CompiledExperts.of(library, experts) is None:
                    return None
                dtypes |= {experts.up[0].dtype, experts.down[0].dtype}
            norms = (layer.attention_norm, layer.next_norm, *(layer.head_norms or ()))
            dtypes |= {linear.dtype for linear in linears.values()} | {n.weight.dtype for n in norms}
        return cls(library, input_norm, layers) if len(forms) == len(dtypes) == 1 else None

    def __init__(self, library: ctypes.CDLL, input_norm: Norm, layers: Sequence[Layer]) -> None:
        self._library = library
        self._owners = (input_norm, layers)  # the structs point to their memory
        first = layers[0]
        self._num_heads, self._num_kv_heads = first.num_heads, first.num_kv_heads
        self._head_dim = first.head_dim
        self._qkv_size = (first.num_heads + 2 * first.num_kv_heads) * first.head_dim
        self._attended_size = first.num_heads * first.head_dim
        self._hidden_size = _linears(first)["out"].out_features
        self._dtype = first.attention_norm.weight.dtype
        self._experts = [
            None if layer.mixture is None else CompiledExperts.of(library, layer.mixture.experts)
            for layer in layers
        ]
        # The start of each scratch buffer, and the end of the last, in elements per token.
        self._scratch_widths = tuple(accumulate(self._widths(layers), initial=0))
        self._num_chosen = max(
            0 if layer.mixture is None else layer.mixture.router.num_chosen for layer in layers
        )
        numbers = mixture_products(layers)
        self._structs = (LayerParameters * len(layers))(*map(self._struct, layers, self._experts, numbers))
        self.shapes = product_shapes(layers)
        self._fitting: Shapes | None = None  # shapes of adapters that begin with these
        self._known_caches: list[weakref.ref[Cache]] = []
        self._call = self._form(_norm(input_norm, self._hidden_size, self._dtype))
        self._sum = AllReduce.of(first.ranks)
        if self._sum is not None:
            self._call.all_reduce, self._call.ranks = self._sum.function, self._sum.ranks

    def _form(self, input_norm: ctypes.Structure) -> ctypes.Structure:
        """A call with all fields that do not change from step to step."""
        attention = AttentionCall(
            q_token_stride=self._qkv_size,
            q_head_stride=self._head_dim,
            num_heads=self._num_heads,
            head_dim=self._head_dim,
            dtype=DTYPES[self._dtype],
        )
        return StackCall(
            layers=ctypes.addressof(self._structs),
            input_norm=input_norm,
            num_layers=len(self._structs),
            attention=attention,
        )

    def _widths(self, layers: Sequence[Layer]) -> tuple[int, ...]:
        """Elements per token of the buffers in `SCRATCH`."""
        widest = max(
            (_linears(layer)["down"].in_features for layer in layers if layer.down is not None), default=0
        )
        mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
        shared = self._hidden_size if any(mixture.shared_gate is not None for mixture in mixtures) else 0
        logits = max((mixture.router.linear.out_features for mixture in mixtures), default=0)
        of_experts = max(
            (
                mixture.router.num_chosen * experts.scratch_width
                for mixture, experts in zip(mixtures, filter(None, self._experts), strict=True)
            ),
            default=0,
        )
        return self._qkv_size, self._attended_size, 2 * widest, widest, shared, logits, of_experts

    def _struct(self, layer: Layer, experts: CompiledExperts | None, number: int) -> ctypes.Structure:
        linears = _linears(layer)
        hidden = linears["out"].out_features
        shapes = {"qkv": (self._qkv_size, hidden), "out": (hidden, self._attended_size)}
        if layer.mixture is None or layer.mixture.shared_gate is not None:
            intermediate = linears["down"].in_features
            shapes |= {"gate_up": (2 * intermediate, hidden), "down": (hidden, intermediate)}
        if layer.mixture is not None:
            shapes["router"] = len(layer.mixture.experts.up), hidden
        if "shared_gate" in linears:
            shapes["shared_gate"] = 1, hidden
        for name, shape in shapes.items():
            if (linears[name].out_features, linears[name].in_features) != shape:
                raise ValueError(f"{name}: a weight {shape} expected")
        matrices = {name: matrix(linears[name]) for name in PRODUCTS if name in linears}
        if layer.mixture is not None and experts is not None:
            matrices["mixture"] = self._mixture(layer.mixture, experts, linears, number)
        norms = {"attention_norm": (layer.attention_norm, hidden), "next_norm": (layer.next_norm, hidden)}
        for name, norm in zip(("query_norm", "key_norm"), layer.head_norms or (), strict=False):
            norms[name] = norm, self._head_dim
        return LayerParameters(
            **matrices,
            **{name: _norm(norm, size, self._dtype) for name, (norm, size) in norms.items()},
            window=layer.terms.window or 0,
            scale=layer.scale,
            activation=ACTIVATION_CODES[layer.activation],
        )

    def _mixture(
        self, mixture: Mixture, experts: CompiledExperts, linears: dict[str, Packed], first_product: int
    ) -> ctypes.Structure:
        router = mixture.router
        if experts.hidden_size != self._hidden_size or not 0 < router.num_chosen <= len(mixture.experts.up):
            raise ValueError(
                f"{router.num_chosen} experts of states of {experts.hidden_size} cannot be chosen"
            )
        gates = {"shared_gate": matrix(linears["shared_gate"])} if "shared_gate" in linears else {}
        return MixtureParameters(
            router=matrix(linears["router"]),
            **gates,
            experts=experts.struct,
            num_chosen=router.num_chosen,
            normalised=router.normalised,
            rounded=router.rounded,
            first_product=first_product,
        )

    def __call__(
        self,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        caches: Sequence[Cache],
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """residual [T, H], overwritten, to [T, H], normed.

        Raises:
            ValueError: the batch, the caches, the angles or the adapters do not fit.
        """
        cos, sin = cos.contiguous(), sin.contiguous()
        num_tokens, rot_dim = cos.shape
        if sin.shape != cos.shape or num_tokens != len(residual) or rot_dim > self._head_dim or rot_dim % 2:
            raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for {len(residual)} tokens")
        if residual.shape[1] != self._hidden_size:
            raise ValueError(f"states of {self._hidden_size} expected, not of {residual.shape[1]}")
        if not all(tensor.dtype == self._dtype and tensor.is_contiguous() for tensor in (residual, cos, sin)):
            raise ValueError(f"contiguous tensors of {self._dtype} expected")
        self._take_caches(caches)
        self._call.slots = set_batch(self._call.attention, batch, num_tokens)
        self._take_adapters(adapters, num_tokens)
        x = torch.empty_like(residual)
        *places, size = (num_tokens * width for width in self._scratch_widths)
        scratch = residual.new_empty(size)
        call = self._call
        call.x, call.residual = x.data_ptr(), residual.data_ptr()
        for name, place in zip(SCRATCH, places, strict=True):
            setattr(call, name, scratch.data_ptr() + place * scratch.itemsize)
        ids = torch.empty(num_tokens, self._num_chosen, dtype=torch.int64)
        weights = torch.empty(num_tokens, self._num_chosen)
        call.ids, call.weights = ids.data_ptr(), weights.data_ptr()
        call.cos, call.sin, call.rotary_half = cos.data_ptr(), sin.data_ptr(), rot_dim // 2
        failed = self._library.pagewire_decoder(ctypes.byref(call))
        if self._sum is not None:
            self._sum.check()
        if failed:
            raise ValueError("lengths, slots or block numbers of the batch do not fit its tensors")
        return x

    def _take_caches(self, caches: Sequence[Cache]) -> None:
        """Point the structs to the layers' caches: they are the same from step to step."""
        if len(caches) == len(self._known_caches) and all(
            known() is cache for known, cache in zip(self._known_caches, caches, strict=True)
        ):
            return
        self._known_caches = []
        if len(caches) != len(self._structs):
            raise ValueError(f"caches of {len(caches)} layers for {len(self._structs)}")
        k_first, v_first = caches[0].k, caches[0].v
        if k_first.dtype not in (self._dtype, KV_CODES):
            raise ValueError(f"caches of {k_first.dtype} for layers of {self._dtype}")
        for struct, cache in zip(self._structs, caches, strict=True):
            check_scales(cache)
            k, v = cache.k, cache.v
            if k.shape != k_first.shape or k.stride() != k_first.stride() or k.dtype != k_first.dtype:
                raise ValueError(f"the layers' caches differ: {tuple(k.shape)} of {k.dtype}")
            if v.shape != v_first.shape or v.stride() != v_first.stride() or v.dtype != k_first.dtype:
                raise ValueError(f"the layers' caches differ: {tuple(v.shape)} of {v.dtype}")
            struct.k_cache, struct.v_cache = k.data_ptr(), v.data_ptr()
        if k_first.shape != v_first.shape or (k_first.shape[1], head_size(k_first)) != (
            self._num_kv_heads,
            self._head_dim,
        ):
            raise ValueError(
                f"caches {tuple(k_first.shape)} and {tuple(v_first.shape)} do not fit the layers"
            )
        for name, value in cache_fields(self._library, caches[0]).items():
            setattr(self._call.attention, name, value)
        self._known_caches = [weakref.ref(cache) for cache in caches]

    def _take_adapters(self, adapters: AdapterRows | None, num_tokens: int) -> None:
        if adapters is None:
            self._call.adapters = None
            return
        shapes, dtype = adapters.adapters[0].shapes, adapters.adapters[0].dtype
        if (
            shapes is not self._fitting and shapes[: len(self.shapes)] == self.shapes
        ):  # thousands with experts
            self._fitting = shapes
        if shapes is not self._fitting or (dtype, adapters.num_rows) != (self._dtype, num_tokens):
            raise ValueError(f"adapters of another model, or of {adapters.num_rows} rows for {num_tokens}")
        self._call.adapters = ctypes.addressof(native_rows(adapters))
