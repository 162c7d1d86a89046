"""Encoders of media of which transformers' modules have no method: it is within their forward there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def qwen2_audio(wrapper: Any, input_features: Tensor, feature_attention_mask: Tensor) -> Any:
    """As `Qwen2AudioModel.forward`: the encoder sees the columns that belong to the sound.

    input_features: [1, bins, columns]. feature_attention_mask: [1, columns], 1 for a column of the sound.
    """
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    tower = wrapper.audio_tower
    seen, num_rows = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    num_places = (input_features.shape[-1] - 2) // 2 + 1
    places = torch.arange(num_places, device=input_features.device)
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros(1, num_places, 1),
        attention_mask=(places < seen[:, None]).long(),
    )
    states = tower(input_features, attention_mask=mask).last_hidden_state
    rows = wrapper.multi_modal_projector(states)[:, : int(num_rows)]
    return BaseModelOutputWithPooling(pooler_output=rows)


ENCODERS: Mapping[tuple[str, str], Callable[..., Any]] = {("Qwen2AudioModel", "audio"): qwen2_audio}
"""By the module's class, and the kind of media. The first argument is the module."""
