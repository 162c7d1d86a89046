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
from pagewire.kernels.paging import WHOLE, AttentionBatch

GROUP_TOKENS = 768
"""Tokens that pass through all layers together, for each thread: two chunks of rows in linear.cpp. What lies
between two kernels then stays in the processor's caches."""

NormParameters, LayerParameters, EncoderCall = map(structure, ("LayerNorm", "EncoderLayer", "EncoderCall"))


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
    def of(cls, library: ctypes.CDLL, layers: Sequence[EncoderLayer], scale: float) -> CompiledEncoder | None:
        """None if the layers differ in shape, or their linear layers are not packed weights, dense or quantised."""
        forms = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
        dtypes = {norm.weight.dtype for layer in layers for norm in (layer.attention_norm, layer.output_norm)}
        for layer in layers:
            products = _products(layer)
            dtypes |= {product.dtype for product in products.values()}
            if len(products) < 4 or layer.activation not in ACTIVATION_CODES:
                return None
        return cls(library, layers, scale) if len(forms) == len(dtypes) == 1 else None

    def __init__(self, library: ctypes.CDLL, layers: Sequence[EncoderLayer], scale: float) -> None:
        self._library = library
        self._owners = layers  # the structs point to their memory
        first = layers[0]
        self._dtype, self._hidden_size = first.attention_norm.weight.dtype, first.qkv.in_features
        self._num_kv_heads, self._head_dim = first.num_kv_heads, first.head_dim
        self._attended_size = first.num_heads * first.head_dim
        self._qkv_size = self._attended_size + 2 * first.num_kv_heads * first.head_dim
        self._structs = (LayerParameters * len(layers))(*map(self._struct, layers))
        up = max(layer.up.out_features for layer in layers)
        self._scratch_widths = (max(self._qkv_size, self._hidden_size), self._attended_size, up)
        attention = AttentionCall(
            q_token_stride=self._qkv_size,
            q_head_stride=self._head_dim,
            num_heads=first.num_heads,
            head_dim=self._head_dim,
            future=WHOLE,
            dtype=DTYPES[self._dtype],
        )
        self._call = EncoderCall(
            layers=ctypes.addressof(self._structs), num_layers=len(layers), scale=scale, attention=attention
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
        return LayerParameters(
            **{name: matrix(product) for name, product in products.items()},
            attention_norm=_norm(layer.attention_norm, hidden, self._dtype),
            output_norm=_norm(layer.output_norm, hidden, self._dtype),
            activation=ACTIVATION_CODES[layer.activation],
            gated=layer.gated,
        )

    def __call__(
        self,
        x: Tensor,
        batch: AttentionBatch,
        cache: tuple[Tensor, Tensor],
        angles: tuple[Tensor, Tensor] | None = None,
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
        self._take_cache(*cache)
        call.slots = set_batch(call.attention, batch, num_tokens)
        most = max(GROUP_TOKENS * torch.get_num_threads(), batch.max_query_len)
        call.group_tokens, size = most, min(most, num_tokens)
        buffers = [x.new_empty(size * width) for width in self._scratch_widths]
        call.x = x.data_ptr()
        call.qkv, call.attended, call.up = (buffer.data_ptr() for buffer in buffers)
        failed = self._library.pagewire_encoder(ctypes.byref(call))
        del held
        if failed:
            raise ValueError("lengths, slots or block numbers of the batch do not fit its tensors")
        return x

    def _take_angles(self, angles: tuple[Tensor, Tensor] | None, num_tokens: int) -> object:
        """Point the call to cosines and sines; returns what must live until it is over."""
        call = self._call
        call.cos = call.sin = None
        call.rotary_half = 0
        if angles is None:
            return None
        cos, sin = (table.contiguous() for table in angles)
        size = cos.shape[-1]
        if cos.shape != (num_tokens, size) or sin.shape != cos.shape or size > self._head_dim or size % 2:
            raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for {num_tokens} tokens")
        if not cos.dtype == sin.dtype == self._dtype:
            raise ValueError(f"angles of {self._dtype} expected")
        call.cos, call.sin, call.rotary_half = cos.data_ptr(), sin.data_ptr(), size // 2
        return cos, sin

    def _take_cache(self, k: Tensor, v: Tensor) -> None:
        expected = (self._num_kv_heads, self._head_dim)
        if k.dtype != self._dtype or k.shape != v.shape or (k.shape[1], head_size(k)) != expected:
            raise ValueError(f"a cache {tuple(k.shape)} of {k.dtype} does not fit the layers")
        attention = self._call.attention
        attention.k_cache, attention.v_cache = k.data_ptr(), v.data_ptr()
        for name, value in cache_fields(self._library, k, v).items():
            setattr(attention, name, value)
