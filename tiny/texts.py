"""Tiny configs of the text models that several families hold, each with what only it has."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,  # unlike mscale, so that the factor on cos and sin is not 1
    "llama_4_scaling_beta": 0.1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_DEEPSEEK = {  # latent attention, and experts after the first layer
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
# positions above 64 are beyond those that Ministral 3's rule was "trained" on, so queries are scaled there
OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3, "head_dim": 16, "tie_word_embeddings": False},
    "mistral": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        "head_dim": 32,
        "sliding_window": 24,
        "tie_word_embeddings": False,
    },
    "ministral3": {"rope_parameters": _YARN, "head_dim": 32, "tie_word_embeddings": True},
    "mistral4": {
        "rope_parameters": _YARN | {"partial_rotary_factor": 8 / 24},
        **_DEEPSEEK,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "rope_parameters": {key: value for key, value in _YARN.items() if key != "llama_4_scaling_beta"},
        **_DEEPSEEK,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
}


def text_config(tokenizer: PreTrainedTokenizerFast, model_type: str, changes: dict) -> dict:
    """The `text_config` of a tiny checkpoint; `changes` override it, `model_type` among them."""
    model_type = changes.get("model_type", model_type)
    return {
        "model_type": model_type,
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **OWN[model_type],
        **changes,
    }


def whole(tokenizer: PreTrainedTokenizerFast, model_type: str, changes: dict) -> dict[str, Any]:
    """The `text_config`, and what the config of a model that holds it repeats of it."""
    text = text_config(tokenizer, model_type, changes)
    repeated = ("tie_word_embeddings", "eos_token_id", "pad_token_id")
    return {"text_config": text} | {key: text[key] for key in repeated}
