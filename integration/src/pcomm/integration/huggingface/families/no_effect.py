"""Fields that the configurations of all families share, and that no table uses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["NO_EFFECT", "NO_EFFECT_PREFIXES", "ONE_VALUE"]

NO_EFFECT = frozenset(
    (
        "_attn_implementation",
        "_from_model_config",
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "experts_implementation",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "max_position_embeddings",
        "max_window_layers",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
        "vocab_size",
    )
)
"""Fields that change no number of a language model: names, settings of training and of writing."""

NO_EFFECT_PREFIXES = ("unsloth_",)
"""First letters of more of them."""

ONE_VALUE: Mapping[str, Any] = MappingProxyType(
    {
        "add_cross_attention": False,
        "cross_attention_hidden_size": None,
        "is_encoder_decoder": False,
        "pruned_heads": {},
        "quantization_config": None,
        "tie_encoder_decoder": False,
    }
)
"""Fields of which one value is supported, beside null."""
