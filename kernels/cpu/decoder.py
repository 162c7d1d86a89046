"""The stack of decoder.cpp."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import AttentionCall, structure
from pagewire.kernels.cpu.linear import PackedLinear
from pagewire.kernels.cpu.tensors import DTYPES, cache_fields
from pagewire.kernels.layer import Activation, Layer, Norm
from pagewire.kernels.paging import AttentionBatch

ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1}
"""Their numbers in decoder.cpp."""
PRODUCTS = ("qkv", "out", "gate_up", "down")


Matrix, NormParameters, LayerParameters, StackCall = map(structure, ("Matrix", "Norm", "Layer", "StackCall"))


def _linears(layer: Layer) -> dict[str, PackedLinear]:
    """Those of the layer's products that linear.cpp computes."""
    products = {name: getattr(layer, name) for name in PRODUCTS}
    return {name: product for name, product in products.items() if isinstance(product, PackedLinear)}


def _norm(norm: Norm, size: int, dtype: torch.dtype) -> ctypes.Structure:
    if norm.weight.shape != (size,) or norm.weight.dtype != dtype or not norm.weight.is_contiguous():
        raise ValueError(f"a norm's weight [{size}] of {dtype} expected")
    return NormParameters(norm.weight.data_ptr(), norm.eps, norm.offset)


class CompiledStack:
    """Layers of one form in one call; see `pagewire.kernels.decoder.Stack`."""

    @classmethod
    def of(cls, library: ctypes.CDLL, layers: Sequence[Layer]) -> "CompiledStack | None":
        """None where the layers differ in form, or their products are not of linear.cpp."""
        forms = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
        dtypes: set[torch.dtype] = set()
        for layer in layers:
            linears = _linears(layer)
            if len(linears) < len(PRODUCTS) or layer.activation not in ACTIVATIONS:
                return None
            norms = (layer.attention_norm, layer.next_norm, *(layer.head_norms or ()))
            dtypes |= {linear.packed.dtype for linear in linears.values()} | {n.weight.dtype for n in norms}
        return cls(library, layers) if len(forms) == len(dtypes) == 1 else None

    def __init__(self, library: ctypes.CDLL, layers: Sequence[Layer]) -> None:
        self._library, self._layers = library, layers  # which own what the structs point to
        first = layers[0]
        self._num_heads, self._num_kv_heads = first.num_heads, first.num_kv_heads
        self._head_dim = first.head_dim
        self._qkv_size = (first.num_heads + 2 * first.num_kv_heads) * first.head_dim
        self._attended_size = first.num_heads * first.head_dim
        self._dtype = first.attention_norm.weight.dtype
        widest = max(_linears(layer)["down"].in_features for layer in layers)
        self._scratch_widths = (self._qkv_size, self._attended_size, 2 * widest, widest)
        self._structs = (LayerParameters * len(layers))(*map(self._struct, layers))

    def _struct(self, layer: Layer) -> ctypes.Structure:
        linears = _linears(layer)
        hidden, intermediate = linears["out"].out_features, linears["down"].in_features
        shapes = {
            "qkv": (self._qkv_size, hidden),
            "out": (hidden, self._attended_size),
            "gate_up": (2 * intermediate, hidden),
            "down": (hidden, intermediate),
        }
        matrices = {}
        for name, shape in shapes.items():
            linear = linears[name]
            if (linear.out_features, linear.in_features) != shape:
                raise ValueError(f"{name}: a weight {shape} expected")
            bias = None if linear.bias is None else linear.bias.data_ptr()
            matrices[name] = Matrix(linear.packed.data_ptr(), bias, *shape)
        norms = {"attention_norm": (layer.attention_norm, hidden), "next_norm": (layer.next_norm, hidden)}
        for name, norm in zip(("query_norm", "key_norm"), layer.head_norms or (), strict=False):
            norms[name] = norm, self._head_dim
        return LayerParameters(
            **matrices,
            **{name: _norm(norm, size, self._dtype) for name, (norm, size) in norms.items()},
            window=layer.window or 0,
            scale=layer.scale,
            activation=ACTIVATIONS[layer.activation],
        )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        caches: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """x [T, H] (overwritten), normed, to the same; residual [T, H] is overwritten.

        Raises:
            ValueError: the batch, the caches or the angles do not fit.
        """
        cos, sin = cos.contiguous(), sin.contiguous()
        if (
            sin.shape != cos.shape
            or cos.shape[0] != len(x)
            or cos.shape[1] > self._head_dim
            or cos.shape[1] % 2
        ):
            raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for {len(x)} tokens")
        if not all(
            tensor.dtype == self._dtype and tensor.is_contiguous() for tensor in (x, residual, cos, sin)
        ):
            raise ValueError(f"contiguous tensors of {self._dtype} expected")
        scratch = [x.new_empty(len(x), width) for width in self._scratch_widths]
        call = StackCall(
            ctypes.addressof(self._layer_structs(caches)),
            x.data_ptr(),
            residual.data_ptr(),
            *(tensor.data_ptr() for tensor in scratch),
            cos.data_ptr(),
            sin.data_ptr(),
            batch.slot_mapping.data_ptr(),
            len(self._structs),
            cos.shape[1] // 2,
            self._attention(batch, len(x), caches[0]),
        )
        if self._library.pagewire_decoder(ctypes.byref(call)):
            raise ValueError("lengths, slots or block numbers of the batch do not fit its tensors")
        return x

    def _layer_structs(self, caches: Sequence[tuple[Tensor, Tensor]]) -> "ctypes.Array[ctypes.Structure]":
        if len(caches) != len(self._structs):
            raise ValueError(f"caches of {len(caches)} layers for {len(self._structs)}")
        k_first, v_first = caches[0]
        for struct, (k, v) in zip(self._structs, caches, strict=True):
            if k.shape != k_first.shape or k.stride() != k_first.stride() or k.dtype != self._dtype:
                raise ValueError(f"the layers' caches differ: {tuple(k.shape)} of {k.dtype}")
            if v.shape != v_first.shape or v.stride() != v_first.stride() or v.dtype != self._dtype:
                raise ValueError(f"the layers' caches differ: {tuple(v.shape)} of {v.dtype}")
            struct.k_cache, struct.v_cache = k.data_ptr(), v.data_ptr()
        return self._structs

    def _attention(
        self, batch: AttentionBatch, num_tokens: int, caches: tuple[Tensor, Tensor]
    ) -> ctypes.Structure:
        k, v = caches
        lengths = (batch.query_start_loc, batch.seq_lens, batch.block_table)
        if (
            any(tensor.dtype != torch.int32 or not tensor.is_contiguous() for tensor in lengths)
            or batch.slot_mapping.dtype != torch.int64
            or batch.slot_mapping.shape != (num_tokens,)
            or not batch.slot_mapping.is_contiguous()
            or len(batch.query_start_loc) != len(batch.seq_lens) + 1
            or len(batch.block_table) < len(batch.seq_lens)
            or k.shape != v.shape
            or (k.shape[1], k.shape[3]) != (self._num_kv_heads, self._head_dim)
        ):
            raise ValueError(f"the batch does not fit {num_tokens} tokens and caches {tuple(k.shape)}")
        return AttentionCall(
            query_start_loc=batch.query_start_loc.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            block_table=batch.block_table.data_ptr(),
            q_token_stride=self._qkv_size,
            q_head_stride=self._head_dim,
            **cache_fields(self._library, k, v),
            block_table_stride=batch.block_table.stride(0),
            num_tokens=num_tokens,
            num_requests=len(batch.seq_lens),
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            v_head_dim=self._head_dim,
            max_blocks=batch.block_table.shape[1],
            dtype=DTYPES[self._dtype],
            num_threads=torch.get_num_threads(),
        )
