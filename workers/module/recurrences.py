"""The recurrences of transformers' modules on state slots: convolutions, delta rules, state spaces.

Mixers of most families call functions in their own file for them, with the arguments of the kernels of
causal-conv1d, mamba-ssm and fla. So ours take the place of these functions (`FUNCTIONS`), and the mixers stay what
they are. The most common ones are computed as a whole by functions of ours (`MIXERS`), which take fewer operations.
Mixers that compute a recurrence themselves have methods of ours (`METHODS`). All are ours within a step only; the
proof at load compares them with those of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.data.layer import Activation
from pagewire.kernels.ops import (
    activate_and_mul,
    causal_conv,
    gated_delta_rule,
    linear_recurrence,
    rms_norm,
    selective_scan,
    state_space,
)
from pagewire.workers.errors import LoadError
from pagewire.workers.step.context import current_step, is_in_step
from pagewire.workers.versions import norm_group

NORM_EPS = 1e-6
"""Under the square root of the length of queries and keys, by which delta rules divide them."""


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """The causal convolution of each channel of x [T, C] with weight [C, K], then SiLU if that is the activation.

    Raises:
        LoadError: another activation.
    """
    if activation not in (None, "silu", "swish"):
        raise LoadError(f"its convolution has the activation {activation!r}, not SiLU")
    channels, width = weight.shape
    taps, inputs = weight.T.contiguous(), x.to(weight.dtype)
    out = current_step().hand_on(
        (width - 1, channels),
        inputs,
        lambda state, batch: causal_conv(inputs, taps, bias, state, batch, silu=activation is not None),
    )
    return out.to(x.dtype)


def _causal_conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Of hidden_states [1, C, T]."""
    return convolved(hidden_states[0].T, weight, bias, activation).T[None]


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *_: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **__: Any,
) -> tuple[Tensor, None]:
    """Of query, key [1, T, Hk, Dk] and value [1, T, Hv, Dv], with decays g [1, T, Hv] or [1, T, Hv, Dk]."""
    q, k, v, decay, rate = query[0], key[0], value[0], g[0].float(), beta[0]
    size = q.shape[-1]
    out = current_step().hand_on(
        (v.shape[1], size, v.shape[2]),
        v,
        lambda state, batch: gated_delta_rule(
            q,
            k,
            v,
            decay,
            rate,
            state,
            batch,
            scale=size**-0.5,
            norm_eps=NORM_EPS if use_qk_l2norm_in_kernel else None,
        ),
    )
    return out[None], None


def _state_space(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - transformers' names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *_: Any,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **__: Any,
) -> Tensor:
    """Mamba 2's, of hidden_states [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N]."""
    x, b, c = hidden_states[0].float(), B[0].float(), C[0].float()
    steps = dt[0].float() if dt_bias is None else dt[0].float() + dt_bias.float()
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    skip = None if D is None else D.float()
    out = current_step().hand_on(
        (x.shape[1], b.shape[2], x.shape[2]),
        x,
        lambda state, batch: state_space(x, steps, A, b, c, skip, state, batch),
    )
    return out[None]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
}
"""By the name of a function in a file of transformers: ours in its place."""


def replace_functions(causal: Any) -> None:
    """Replace the functions of `FUNCTIONS` in the files of a module and of those within it; outside of steps they
    stay what they are."""
    for file in {type(module).__module__ for module in causal.modules()}:
        names = vars(sys.modules[file])
        for name, ours in FUNCTIONS.items():
            if name in names and not hasattr(names[name], "replaced"):
                names[name] = in_steps(names[name], ours)


def in_steps(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function or method that is `ours` within a step, and `theirs`, its attribute `replaced`, outside of one."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return (ours if is_in_step() else theirs)(*args, **kwargs)

    function.replaced = theirs  # type: ignore[attr-defined]
    return function


def scanned(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Mamba 1's state space of x [T, C], with dt [T, C] before its softplus, a_log [C, N], b and c [T, N]."""
    a, steps = -torch.exp(a_log.float()).T.contiguous(), F.softplus(dt.float())
    return current_step().hand_on(
        tuple(a.shape), x, lambda state, batch: selective_scan(x, steps, a, b, c, d.float(), state, batch)
    )


def _mamba(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Of Mamba 1, Falcon Mamba and Jamba; the last two norm what a token makes of its step, input and output."""
    x, gate = module.in_proj(hidden_states)[0].chunk(2, -1)
    x = convolved(x, module.conv1d.weight.squeeze(1), module.conv1d.bias, module.activation)
    sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
    dt, b, c = torch.split(module.x_proj(x[None]), sizes, -1)
    if hasattr(module, "dt_layernorm"):
        dt, b, c = module.dt_layernorm(dt), module.b_layernorm(b), module.c_layernorm(c)
    y = scanned(x, module.dt_proj(dt)[0], module.A_log, b[0], c[0], module.D)
    return module.out_proj((y * module.act(gate))[None])  # type: ignore[no-any-return]


def _zamba(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Of Zamba, where each head has products of its own."""
    x, gate = module.in_proj(hidden_states)[0].unflatten(-1, (-1, 2)).unbind(-1)
    x = convolved(x, module.conv1d.weight.squeeze(1), module.conv1d.bias, module.activation)
    heads = []
    for head, own in enumerate(x.chunk(module.n_mamba_heads, -1)):
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        dt, b, c = torch.split(F.linear(own, module.x_proj_weight[head]), sizes, -1)
        dt = F.linear(dt, module.dt_proj_weight[head], module.dt_proj_bias[head])
        heads.append(scanned(own, dt, module.A_log[head], b, c, module.D[head]))
    return module.out_proj((torch.cat(heads, -1) * F.silu(gate))[None])  # type: ignore[no-any-return]


def _lightning(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Of MiniMax-01 and M1: linear attention with one decay per head."""
    joined = module.act_fn(module.qkv_proj(hidden_states))[0]
    q, k, v = joined.unflatten(-1, (module.num_attention_heads, -1)).split(module.head_dim, -1)
    steps = v.new_ones(v.shape[:2], dtype=torch.float32)
    decay = -module.slope_rate.flatten().float()
    mixed = current_step().hand_on(
        (v.shape[1], q.shape[2], v.shape[2]),
        v,
        lambda state, batch: state_space(v, steps, decay, k, q, None, state, batch),
    )
    mixed = module.norm(mixed.flatten(1)[None])
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * mixed), None


def _griffin(
    module: Any, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Of RecurrentGemma: a convolution and a real-gated linear recurrent unit (RG-LRU)."""
    unit, conv = module.rg_lru, module.conv_1d
    x = convolved(module.linear_x(input_states)[0], conv.weight.squeeze(1), conv.bias)
    own = x.view(len(x), unit.num_attention_heads, -1)

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        parts = [F.linear(own[:, head], weight[head].T, bias[head]) for head in range(own.shape[1])]
        return torch.sigmoid(torch.cat(parts, -1))

    log_decay = -8.0 * gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_decay = log_decay * F.softplus(unit.recurrent_param)
    first = position_ids[0, :, None] == 0
    decay = torch.exp(log_decay).masked_fill(first, 0.0)
    size = torch.sqrt(1 - torch.exp(2 * log_decay)).masked_fill(first, 1.0)
    inputs = x * gate(unit.input_gate_weight, unit.input_gate_bias) * size.to(x.dtype)
    y = current_step().hand_on(
        (x.shape[1],), x, lambda state, batch: linear_recurrence(inputs, decay, state, batch)
    )
    return module.linear_out(y[None] * module.act_fn(module.linear_y(input_states))), None


def delayed(x: Tensor) -> Tensor:
    """x [T, C] of the token before each; 0 for a sequence's first one."""
    taps = torch.tensor([1.0, 0.0], device=x.device).to(x.dtype)[:, None].expand(-1, x.shape[1]).contiguous()
    return current_step().hand_on(
        (1, x.shape[1]), x, lambda state, batch: causal_conv(x, taps, None, state, batch, silu=False)
    )


def _zaya_projection(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of ZAYA: queries and keys of two convolutions, of channels and of heads, and half of the values a token late.

    The second convolution begins with what the first one makes of zeros, which is its bias.
    """
    q, k = module.q_proj(hidden_states)[0], module.k_proj(hidden_states)[0]
    first, second = module.conv_qk_depthwise, module.conv_qk_grouped
    mixed = convolved(torch.cat([q, k], -1), first.weight.squeeze(1), None)
    inputs = [mixed]
    while len(inputs) < second.kernel_size[0]:
        inputs.insert(0, delayed(inputs[0]))
    stacked = torch.stack([x + first.bias for x in inputs], -1)
    shifted = torch.unflatten(stacked, 1, (second.groups, -1)).flatten(2)
    weights, biases = (part.unflatten(0, (second.groups, -1)) for part in (second.weight, second.bias))
    heads = [
        F.linear(x, weight.flatten(1), bias)
        for x, weight, bias in zip(shifted.unbind(1), weights, biases, strict=True)
    ]
    size, repeats = module.head_dim, module.num_key_value_groups
    query, key = torch.unflatten(q, -1, (-1, size)), torch.unflatten(k, -1, (-1, size))
    query = (query + key.repeat_interleave(repeats, 1)) * 0.5
    key = torch.unflatten(query, 1, (-1, repeats)).mean(2)
    of_queries, of_keys = torch.split(torch.stack(heads, 1), [query.shape[1], key.shape[1]], 1)
    before = module.v_proj_delayed(torch.zeros_like(hidden_states[:, :1]))[0]
    late = delayed(module.v_proj_delayed(hidden_states)[0] - before) + before
    value = torch.unflatten(torch.cat([module.v_proj_current(hidden_states)[0], late], -1), -1, (-1, size))
    return (query + of_queries)[None], (key + of_keys)[None], value[None]


def gated(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) * x of two tensors [..., n], in float32."""
    return activate_and_mul(torch.cat([gate.float(), x.float()], -1), Activation.SILU)


def _short_conv(module: Any, x: Tensor) -> Tensor:
    """Of LFM2 and LFM3: a convolution between two gates."""
    before, after, values = module.in_proj(x).chunk(3, -1)
    mixed = convolved(before * values, module.conv.weight.squeeze(1), module.conv.bias)
    return module.out_proj(after * mixed)  # type: ignore[no-any-return]


def _gated_delta(module: Any, x: Tensor) -> Tensor:
    """Of Qwen3.5, whose linear layers give queries, keys and values together, and the rest apart."""
    qkv, z = module.in_proj_qkv(x), module.in_proj_z(x)
    return _delta_mixed(module, qkv, z, module.in_proj_b(x), module.in_proj_a(x))


def _gated_delta_by_head(module: Any, x: Tensor) -> Tensor:
    """Of Qwen3-Next, whose linear layers give what belongs to a head of keys together."""
    both = module.in_proj_qkvz(x)[None], module.in_proj_ba(x)[None]
    query, key, value, z, b, a = module.fix_query_key_value_ordering(*both)
    qkv = torch.cat([part[0].flatten(1) for part in (query, key, value)], -1)
    return _delta_mixed(module, qkv, z[0].flatten(1), b[0], a[0])


def _delta_mixed(module: Any, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """A gated delta rule, its norm of each head, and a gate.

    qkv: [T, 2 Hk Dk + Hv Dv], queries, keys and values before their convolution. z: [T, Hv Dv]. b, a: [T, Hv].
    """
    qkv = convolved(qkv, module.conv1d.weight.squeeze(1), module.conv1d.bias, module.activation)
    query, key, value = torch.split(qkv, [module.key_dim, module.key_dim, module.value_dim], -1)
    q, k = (torch.unflatten(part, -1, (-1, module.head_k_dim)) for part in (query, key))
    v = torch.unflatten(value, -1, (-1, module.head_v_dim))
    steps = elementwise(F.softplus, a.float() + module.dt_bias)
    decay, rate = steps * -torch.exp(module.A_log.float()), elementwise(torch.sigmoid, b)
    parts = (part[None] for part in (q, k, v, decay, rate))
    mixed = _delta_rule(*parts, use_qk_l2norm_in_kernel=True)[0][0]
    normed = rms_norm(mixed, module.norm.weight, module.norm.variance_epsilon)
    mixed = gated(z.view(normed.shape), normed).flatten(1)
    return module.out_proj(mixed.to(z.dtype))  # type: ignore[no-any-return]


def _mamba2(module: Any, x: Tensor) -> Tensor:
    """Of Mamba 2 and the families that have its mixer: the gate comes before a norm of each group of heads.

    Several ranks may have heads of the same group, which `gather` brings together.
    """
    sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
    gate, joined, dt = torch.split(module.in_proj(x), sizes, -1)
    joined = convolved(joined, module.conv1d.weight.squeeze(1), module.conv1d.bias, module.activation)
    size = module.n_groups * module.ssm_state_size
    values, b, c = torch.split(joined, [module.intermediate_size, size, size], -1)
    mixed = _state_space(
        torch.unflatten(values, -1, (module.num_heads, -1))[None],
        elementwise(F.softplus, dt.float() + module.dt_bias.float())[None],
        -torch.exp(module.A_log.float()),
        torch.unflatten(b, -1, (module.n_groups, -1))[None],
        torch.unflatten(c, -1, (module.n_groups, -1))[None],
        D=module.D,
        dt_limit=module.time_step_limit,
    )
    norm, gather = module.norm, getattr(module, "gather", None)
    values = gated(gate, mixed[0].flatten(1))
    values = values if gather is None else gather(values)
    values = values.unflatten(-1, (-1, norm_group(norm, values.shape[-1])))
    values = rms_norm(values, torch.ones_like(values[0, 0]), norm.variance_epsilon).flatten(1)
    values = (norm.weight * values).to(x.dtype)
    return module.out_proj(values if gather is None else values[:, gather.own.start : gather.own.stop])  # type: ignore[no-any-return]


MIXERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    **dict.fromkeys(("Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv"), _short_conv),
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _gated_delta),
    "Qwen3NextGatedDeltaNet": _gated_delta_by_head,
    **dict.fromkeys(("BambaMixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer"), _mamba2),
    **dict.fromkeys(("NemotronHMamba2Mixer", "Zamba2MambaMixer"), _mamba2),
}
"""By the class of a module: what it makes of states [T, H] in a step. A row's bits do not depend on the others."""


def _of_sequence(mixer: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A mixer as a method of a module, which takes states [1, T, H]."""

    def forward(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return mixer(module, hidden_states[0])[None]

    return forward


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    **{name: ("forward", _of_sequence(mixer)) for name, mixer in MIXERS.items()},
    "FalconMambaMixer": ("forward", _mamba),
    "JambaMambaMixer": ("forward", _mamba),
    "MambaMixer": ("forward", _mamba),
    "MiniMaxLightningAttention": ("forward", _lightning),
    "RecurrentGemmaRecurrentBlock": ("forward", _griffin),
    "ZambaMambaMixer": ("forward", _zamba),
    "ZayaCCAProjection": ("forward", _zaya_projection),
}
"""By the class of a module: the name of its method, and ours in its place."""


def lay_taps(module: nn.Module) -> None:
    """Lay the weights [C, 1, K] of convolutions of single channels in memory as the kernel reads them, [K, C]."""
    for child in module.modules():
        if type(child) is nn.Conv1d and child.groups == child.in_channels:
            weight = child.weight.detach()
            child.weight = nn.Parameter(
                weight.movedim(-1, 0).contiguous().movedim(0, -1), requires_grad=False
            )
