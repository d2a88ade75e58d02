"""Every architecture of transformers as a model of some thousand parameters, for tests."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("USE_HUB_KERNELS", "0")

from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

WIDTH, HEADS, HEAD_DIM, VOCABULARY, LONGEST = 32, 4, 8, 128, 256
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embed_dim",
            "embedding_size",
            "d_embed",
            "attention_hidden_size",
            "word_embed_proj_dim",
            "emb_dim",
            "lru_width",
            "kv_channels_",
            "input_embedding_size",
            "output_embedding_size",
            "projection_dim",
            "hidden_sizes",
            "embed_dims",
            "conv_dim",
        ),
        WIDTH,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "num_layers",
            "n_layer",
            "n_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
            "num_encoder_layers",
            "depth",
            "depths",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "attention_heads",
            "decoder_attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
            "swa_num_attention_heads",
            "linear_num_heads",
            "linear_num_value_heads",
            "index_n_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "swa_num_key_value_heads"),
        2,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "d_kv",
            "attention_head_dim",
            "v_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "dim_head",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_head_dim",
            "swa_head_dim",
            "kv_channels",
            "d_head",
            "attention_head_size",
            "index_head_dim",
        ),
        HEAD_DIM,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "d_ff",
            "n_inner",
            "ffn_hidden_size",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "ffn_embed_dim",
            "dff",
            "dim_ff",
            "expert_ffn_hidden_size",
            "feed_forward_size",
            "intermediate_size_mlp",
            "shared_experts_intermediate_size",
            "dense_intermediate_size",
        ),
        48,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        24,
    ),
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
            "zero_expert_num",
        ),
        4,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k", "num_experts_per_token"), 2
    ),
    **dict.fromkeys(
        (
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
            "n_group",
            "topk_group",
            "num_expert_group",
            "num_nextn_predict_layers",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_target_positions",
            "max_source_positions",
            "max_seq_len",
            "context_length",
            "max_sequence_length",
            "model_max_length",
        ),
        LONGEST,
    ),
    **dict.fromkeys(
        (
            "sliding_window",
            "window_size",
            "attention_window_size",
            "local_attention",
            "keep_window_size",
            "sliding_window_size",
            "attention_chunk_size",
        ),
        24,
    ),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "o_lora_rank", "gated_norm_rank", "laurel_rank"), 16
    ),
    "vocab_size": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "entity_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "qk_head_dim": 2 * HEAD_DIM,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "rotary_dim": 4,
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "num_mel_bins": 16,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "index_topk": 8,
    "first_k_dense_replace": 1,
    "o_groups": 2,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 1,
}
# What a model needs beyond these.
EVEN_IF_NONE = (
    "pad_token_id",
    "head_dim",
    "bos_token_id",
    "eos_token_id",
    "num_key_value_heads",
    "num_experts_per_tok",
    "q_lora_rank_",
)
# Four stages, each of which halves the image.
_WINDOWS = {
    "image_size": 64,
    "patch_size": 2,
    "depths": [2, 2, 1, 1],
    "num_heads": [2, 4, 4, 4],
    "window_size": 4,
}
BESIDE: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "bit": {"num_groups": 4},
    "blt": {
        "encoder_hash_byte_group_vocab": 100,
        "encoder_hash_byte_group_size": [3, 4],
        "num_hidden_layers": 2,
    },
    "cohere_compass_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 1e4}
            for k in ("sliding_attention", "full_attention")
        },
    },
    "donut-swin": _WINDOWS,
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "efficientnet": {
        "width_coefficient": 0.25,
        "depth_coefficient": 0.1,
        "expand_ratios": [1, 2, 2, 2, 2, 2, 2],
        "hidden_dim": 320,
        "initializer_range": 0.2,
    },
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    "hgnet_v2": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 16, 16],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 16, 16, 32],
        "stage_numb_of_layers": [2, 2, 2, 2],
        "initializer_range": 0.2,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "lw_detr_vit": {
        "num_windows": 4,
        "num_windows_side": 2,
        "image_size": 64,
        "pretrain_image_size": 64,
    },
    "mobilevit": {
        "initializer_range": 0.2,
        "patch_size": 2,
        "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
    },
    "mobilevitv2": {
        "base_attn_unit_dims": [16, 16, 16],
        "width_multiplier": 0.25,
        "patch_size": 2,
        "initializer_range": 0.2,
    },
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 1,
        "num_cross_attention_heads": 1,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2], "num_key_value_attention_heads": 2},
    "seamless_m4t": {
        "speech_encoder_layers": 2,
        "speech_encoder_attention_heads": 4,
        "speech_encoder_intermediate_size": 48,
        "t2u_encoder_layers": 1,
        "t2u_decoder_layers": 1,
        "t2u_encoder_ffn_dim": 48,
        "t2u_decoder_ffn_dim": 48,
        "t2u_encoder_attention_heads": 4,
        "t2u_decoder_attention_heads": 4,
        "t2u_vocab_size": 128,
        "upsample_initial_channel": 32,
        "unit_hifi_gan_vocab_size": 128,
        "vocoder_num_langs": 2,
        "vocoder_num_spkrs": 2,
    },
    "seamless_m4t_v2": {
        "speech_encoder_layers": 2,
        "speech_encoder_attention_heads": 4,
        "speech_encoder_intermediate_size": 48,
        "t2u_encoder_layers": 1,
        "t2u_decoder_layers": 1,
        "t2u_encoder_ffn_dim": 48,
        "t2u_decoder_ffn_dim": 48,
        "t2u_encoder_attention_heads": 4,
        "t2u_decoder_attention_heads": 4,
        "t2u_vocab_size": 128,
        "upsample_initial_channel": 32,
        "unit_hifi_gan_vocab_size": 128,
        "vocoder_num_langs": 2,
        "vocoder_num_spkrs": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
    },
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 16],
        "attention_head_size": 8,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 20,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "xlstm": {"chunk_size": 16, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "mamba_expand": 2,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1, 3],
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 2,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def layers_shown(config: PreTrainedConfig) -> dict[str, Any]:
    """A layer of each kind that the whole model has: its lists with entries for layers, cut."""
    whole = config.to_dict()
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count > 2:
            break
    else:
        return {}
    lists = {k: v for k, v in whole.items() if isinstance(v, list) and len(v) == count}
    if not lists:
        return {}
    kinds = list(zip(*[[str(x) for x in v] for v in lists.values()], strict=True))
    shown = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:6]
    if len(shown) < 2:
        shown = [shown[0], shown[0] + 1 if count > 1 else 0]
    return {name: len(shown), **{k: [v[i] for i in shown] for k, v in lists.items()}}


def tiny_config(
    kind: str | type[PreTrainedConfig], decoder: bool = False, **beside: Any
) -> PreTrainedConfig:
    cls = CONFIG_MAPPING[kind] if isinstance(kind, str) else kind
    try:
        whole = cls()
    except Exception:
        whole = None
    known = SIZES if whole is None else whole.to_dict()
    names = {*known, *getattr(cls, "attribute_map", {})}
    chosen: dict[str, Any] = {}
    mapped = getattr(cls, "attribute_map", {})
    for name, value in SIZES.items():
        if name not in names or name in mapped:
            continue
        if whole is not None:
            now = whole.to_dict().get(name)
            if now is None and name not in EVEN_IF_NONE:
                continue
            if isinstance(now, list):
                value = [value] * len(now) if name not in ("eos_token_id",) else value
        chosen[name] = value
    for name, to in mapped.items():
        if name in SIZES and to not in chosen:
            chosen[to] = SIZES[name]
    if whole is not None:
        chosen |= layers_shown(whole)
    for name, sub in getattr(cls, "sub_configs", {}).items():
        if isinstance(sub, type) and sub.__name__ != "AutoConfig":
            part = tiny_config(sub)
        else:
            now = getattr(whole, name, None) if whole is not None else None
            part = tiny_config(type(now)) if now is not None else None
        if part is not None:
            chosen[name] = part
    if "kv_lora_rank" in chosen and "num_key_value_heads" in chosen:
        chosen["num_key_value_heads"] = HEADS
    if decoder and whole is not None and "is_decoder" in whole.__dict__:
        chosen |= {"is_decoder": True}
    chosen |= BESIDE.get(cls.model_type, {}) | beside
    return cls(**chosen)


def tiny_model(
    cls: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0
) -> PreTrainedModel:
    torch.manual_seed(seed)
    return cls(config).eval()
