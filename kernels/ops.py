"""The kernels as functions: each calls the fastest implementation for its tensors.

`Kernels` and `StateKernels` document them. All raise NotImplementedError where the tensors' device is not
served, see `dispatch.implementation_for`.
"""

from pagewire.kernels.dispatch import dispatched, dispatched_states
from pagewire.kernels.reference.kernels import Kernels
from pagewire.kernels.reference.states import StateKernels

paged_attention = dispatched(Kernels.paged_attention)
store_kv = dispatched(Kernels.store_kv)
rotate_and_store = dispatched(Kernels.rotate_and_store)
rotary = dispatched(Kernels.rotary)

rms_norm = dispatched(Kernels.rms_norm)
add_rms_norm = dispatched(Kernels.add_rms_norm)
layer_norm = dispatched(Kernels.layer_norm)
activate_each = dispatched(Kernels.activate_each)
activate_and_mul = dispatched(Kernels.activate_and_mul)
fixed_sums = dispatched(Kernels.fixed_sums)
cap = dispatched(Kernels.cap)

linear = dispatched(Kernels.linear)
route = dispatched(Kernels.route)
add_gated = dispatched(Kernels.add_gated)

largest = dispatched(Kernels.largest)
only_allowed = dispatched(Kernels.only_allowed)
fixed_point_probabilities = dispatched(Kernels.fixed_point_probabilities)
draw = dispatched(Kernels.draw)

causal_conv = dispatched_states(StateKernels.causal_conv)
gated_delta_rule = dispatched_states(StateKernels.gated_delta_rule)
state_space = dispatched_states(StateKernels.state_space)
selective_scan = dispatched_states(StateKernels.selective_scan)
linear_recurrence = dispatched_states(StateKernels.linear_recurrence)
step_sizes = dispatched_states(StateKernels.step_sizes)
rates = dispatched_states(StateKernels.rates)
open_by = dispatched_states(StateKernels.open_by)
