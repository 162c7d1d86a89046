"""The stack of encoder.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.cpu.batch import set_batch
from pagewire.kernels.cpu.experts import ACTIVATION_CODES, Packed, matrix
from pagewire.kernels.cpu.library import AttentionCall, structure
from pagewire.kernels.cpu.linear import PackedLinear
from pagewire.kernels.cpu.quantised import QuantisedLinear
from pagewire.kernels.cpu.tensors import DTYPES, cache_fields
from pagewire.kernels.kv_codes import head_size
from pagewire.kernels.layer import EncoderLayer, LayerNorm
from pagewire.kernels.paging import WHOLE, AttentionBatch, Cache, LogitTerms

GROUP_TOKENS = 768
"""Tokens that pass through all layers together, for each thread: two chunks of rows in linear.cpp. What lies
between two kernels then stays in the processor's caches."""

NormParameters, LayerParameters, Angles, EncoderCall = map(
    structure, ("LayerNorm", "EncoderLayer", "Angles", "EncoderCall")
)


def _products(layer: EncoderLayer) -> dict[str, Packed]:
    """The linear layers that linear.cpp and quantised.cpp compute, by name."""
    products = {"qkv": layer.qkv, "out": layer.out, "up": layer.up, "down": layer.down}
    return {
        name: product
        for name, product in products.items()
        if isinstance(product, PackedLinear | QuantisedLinear)
    }


def _norm(norm: LayerNorm, size: int, dtype: torch.dtype) -> ctypes.Structure:
    for vector in (norm.weight, norm.bias):
        if vector is not None and not (
            vector.shape == (size,) and vector.dtype == dtype and vector.is_contiguous()
        ):
            raise ValueError(f"a norm's weight and bias [{size}] of {dtype} expected")
    return NormParameters(
        norm.weight.data_ptr(), None if norm.bias is None else norm.bias.data_ptr(), norm.eps
    )


class CompiledEncoder:
    """A stack of an encoder's layers in one call; see `pagewire.kernels.encoder.EncoderStack`."""

    @classmethod
    def of(
        cls,
        library: ctypes.CDLL,
        layers: Sequence[EncoderLayer],
        input_norm: LayerNorm | None,
        *,
        norm_first: bool,
    ) -> CompiledEncoder | None:
        """None if the layers differ in shape, or their linear layers are not packed weights, dense or quantised."""
        forms = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
        radii = {layer.terms.relative_bias.shape for layer in layers if layer.terms.relative_bias is not None}
        dtypes = {norm.weight.dtype for layer in layers for norm in (layer.attention_norm, layer.output_norm)}
        for layer in layers:
            products = _products(layer)
            dtypes |= {product.dtype for product in products.values()}
            terms = layer.terms
            if terms != LogitTerms.two_sided(terms.window, terms.relative_bias):
                return None
            if len(products) < 4 or layer.activation not in ACTIVATION_CODES:
                return None
        if len(forms) > 1 or len(dtypes) > 1 or len(radii) > 1:
            return None
        return cls(library, layers, input_norm, norm_first=norm_first)

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[EncoderLayer],
        input_norm: LayerNorm | None,
        *,
        norm_first: bool,
    ) -> None:
        self._library = library
        self._owners = (layers, input_norm)  # the structs point to their memory
        first = layers[0]
        self._dtype, self._hidden_size = first.attention_norm.weight.dtype, first.qkv.in_features
        self._num_kv_heads, self._head_dim = first.num_kv_heads, first.head_dim
        self._attended_size = first.num_heads * first.head_dim
        self._qkv_size = self._attended_size + 2 * first.num_kv_heads * first.head_dim
        self._num_tables = 1 + max(-1 if layer.angles is None else layer.angles for layer in layers)
        self._structs = (LayerParameters * len(layers))(*map(self._struct, layers))
        up = max(layer.up.out_features for layer in layers)
        self._scratch = {
            "qkv": max(self._qkv_size, self._hidden_size),
            "attended": self._attended_size,
            "up": up,
            **({"normed": self._hidden_size} if norm_first else {}),
        }
        biases = [layer.terms.relative_bias for layer in layers if layer.terms.relative_bias is not None]
        attention = AttentionCall(
            q_token_stride=self._qkv_size,
            q_head_stride=self._head_dim,
            num_heads=first.num_heads,
            head_dim=self._head_dim,
            future=WHOLE,
            bias_radius=biases[0].shape[1] // 2 if biases else 0,
            dtype=DTYPES[self._dtype],
        )
        self._call = EncoderCall(
            layers=ctypes.addressof(self._structs),
            num_layers=len(layers),
            attention=attention,
            **(
                {}
                if input_norm is None
                else {"input_norm": _norm(input_norm, self._hidden_size, self._dtype)}
            ),
        )

    def _struct(self, layer: EncoderLayer) -> ctypes.Structure:
        products, hidden, inner = _products(layer), self._hidden_size, layer.down.in_features
        shapes = {
            "qkv": (self._qkv_size, hidden),
            "out": (hidden, self._attended_size),
            "up": (inner * (2 if layer.gated else 1), hidden),
            "down": (hidden, inner),
        }
        for name, shape in shapes.items():
            if (products[name].out_features, products[name].in_features) != shape:
                raise ValueError(f"{name}: a weight {shape} expected")
        bias = layer.terms.relative_bias
        if bias is not None and not (
            bias.dtype == torch.float32
            and bias.dim() == 2
            and len(bias) == layer.num_heads
            and bias.shape[1] % 2 == 0
            and bias.is_contiguous()
        ):
            raise ValueError(f"a contiguous bias [{layer.num_heads}, 2 R] of float32 expected")
        return LayerParameters(
            **{name: matrix(product) for name, product in products.items()},
            attention_norm=_norm(layer.attention_norm, hidden, self._dtype),
            output_norm=_norm(layer.output_norm, hidden, self._dtype),
            relative_bias=None if bias is None else bias.data_ptr(),
            window=layer.terms.window or 0,
            angles=-1 if layer.angles is None else layer.angles,
            scale=layer.scale,
            activation=ACTIVATION_CODES[layer.activation],
            gated=layer.gated,
        )

    def __call__(
        self,
        x: Tensor,
        batch: AttentionBatch,
        cache: Cache,
        angles: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """x [T, H], overwritten by the result.

        Raises:
            ValueError: the batch, the cache or the angles do not fit.
        """
        num_tokens = len(x)
        if x.shape != (num_tokens, self._hidden_size) or x.dtype != self._dtype or not x.is_contiguous():
            raise ValueError(f"contiguous states [T, {self._hidden_size}] of {self._dtype} expected")
        call = self._call
        held = self._take_angles(angles, num_tokens)
        self._take_cache(cache)
        call.slots = set_batch(call.attention, batch, num_tokens)
        most = max(GROUP_TOKENS * torch.get_num_threads(), batch.max_query_len)
        call.group_tokens, size = most, min(most, num_tokens)
        buffers = {name: x.new_empty(size * width) for name, width in self._scratch.items()}
        call.x = x.data_ptr()
        for name, buffer in buffers.items():
            setattr(call, name, buffer.data_ptr())
        failed = self._library.pagewire_encoder(ctypes.byref(call))
        del held
        if failed:
            raise ValueError("lengths, slots or block numbers of the batch do not fit its tensors")
        return x

    def _take_angles(self, angles: Sequence[tuple[Tensor, Tensor]], num_tokens: int) -> object:
        """Point the call to tables of cosines and sines; returns what must live until it is over."""
        if len(angles) < self._num_tables:
            raise ValueError(f"{len(angles)} tables of angles for layers that use {self._num_tables}")
        tables = [(cos.contiguous(), sin.contiguous()) for cos, sin in angles]
        size = tables[0][0].shape[-1] if tables else 0
        for cos, sin in tables:
            if cos.shape != (num_tokens, size) or sin.shape != cos.shape or size > self._head_dim or size % 2:
                raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for {num_tokens} tokens")
            if not cos.dtype == sin.dtype == self._dtype:
                raise ValueError(f"angles of {self._dtype} expected")
        structs = (Angles * len(tables))(*(Angles(cos.data_ptr(), sin.data_ptr()) for cos, sin in tables))
        self._call.angles, self._call.rotary_half = ctypes.addressof(structs), size // 2
        return tables, structs

    def _take_cache(self, cache: Cache) -> None:
        k, v, expected = cache.k, cache.v, (self._num_kv_heads, self._head_dim)
        if k.dtype != self._dtype or k.shape != v.shape or (k.shape[1], head_size(k)) != expected:
            raise ValueError(f"a cache {tuple(k.shape)} of {k.dtype} does not fit the layers")
        for name, value in cache_fields(self._library, cache).items():
            setattr(self._call.attention, name, value)
