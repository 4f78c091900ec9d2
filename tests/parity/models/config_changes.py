"""Changes of a tiny checkpoint's config.json that `test_configs.py` tries, family by family."""

from __future__ import annotations

from typing import Any

from odd_configs import REMOVED, Cell
from pairs import covering
from parity import takes_videos

from megatron_vlm.models.families import describe, load
from megatron_vlm.models.family_parts.limits import (
    ANY,
    ASKED_FOR,
    PARTS,
    UNUSED,
    dotted,
    keys_read,
    limits_of,
    part_of,
)
from megatron_vlm.models.hf import as_hf_config

T, V = "text_config.", "vision_config."
ROPE = T + "rope_parameters."


def others(value: Any) -> list[Any]:
    """Other values of the kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1]
    if isinstance(value, float):
        return [2 * value or 0.5]
    if isinstance(value, str):
        return ["relu"]
    return [[7]] if value is None else [list(value)[:-1]]


# key -> changes of it with what must go with it
PARTNERS: dict[str, list[dict[str, Any]]] = {
    T + "hidden_size": [{T + "hidden_size": 96, V + "out_hidden_size": 96}],
    T + "rms_norm_eps": [{T + "rms_norm_eps": 0.1}],
    T + "num_attention_heads": [{T + "num_attention_heads": 8}],
    T + "num_key_value_heads": [{T + "num_key_value_heads": n} for n in (1, 4, 3)],
    T + "head_dim": [{T + "head_dim": 64}, {T + "head_dim": 16}],
    T + "num_hidden_layers": [{T + "num_hidden_layers": n, T + "layer_types": REMOVED} for n in (0, 1, 3, 6)],
    T + "hidden_act": [{T + "hidden_act": name} for name in ("relu", "gelu", "prelu", "nothing")],
    T + "hidden_activation": [
        {T + "hidden_activation": name} for name in ("relu", "silu", "prelu", "nothing")
    ],
    T + "sliding_window": [{T + "sliding_window": 5}, {T + "sliding_window": None}],
    T + "pad_token_id": [{T + "pad_token_id": token} for token in (5, -1, None, 100000)],
    T + "layer_types": [{T + "layer_types": [f"{kind}_attention"] * 4} for kind in ("full", "sliding")],
    T + "text_config": [{T + "text_config": {"hidden_size": 7}}],
    T + "num_experts_per_tok": [{T + "num_experts_per_tok": n} for n in (1, 2, 5, 9)],
    T + "num_experts": [{T + "num_experts": n, T + "num_local_experts": REMOVED} for n in (0, 4)],
    T + "mlp_only_layers": [{T + "mlp_only_layers": [0, 2]}],
    T + "n_group": [{T + "n_group": n} for n in (1, 4, 8)],
    T + "topk_group": [{T + "topk_group": 2}],
    T + "n_shared_experts": [{T + "n_shared_experts": n} for n in (0, 2)],
    T + "first_k_dense_replace": [{T + "first_k_dense_replace": n} for n in (0, 4)],
    T + "num_local_experts": [{T + "num_local_experts": 4}],
    T + "output_router_logits": [{T + "output_router_logits": True, T + "router_aux_loss_coef": 0.0}],
    T + "rope_parameters": [],
    V + "hidden_size": [{V + "hidden_size": 96}],
    V + "num_heads": [{V + "num_heads": 2}],
    V + "num_attention_heads": [{V + "num_attention_heads": 1}],
    V + "depth": [{V + "depth": n} for n in (2, 3)],
    V + "num_hidden_layers": [{V + "num_hidden_layers": n} for n in (1, 3)],
    V + "head_dim": [{V + "head_dim": 12}, {V + "head_dim": 24}],
    V + "num_position_embeddings": [{V + "num_position_embeddings": 100}],
    V + "rope_parameters": [{V + "rope_parameters": {"rope_theta": 50.0}}],
    V + "deepstack_visual_indexes": [
        {V + "deepstack_visual_indexes": indexes}
        for indexes in ([], [1], [3, 0], [2, 2, 0], [0, 1, 9], [-1, 1])
    ],
    V + "num_patches": [{V + "num_patches": 100}],
    V + "window_size": [{V + "window_size": 28}],
    V + "layer_norm_eps": [{V + "layer_norm_eps": 0.1}],
    V + "rms_norm_eps": [{V + "rms_norm_eps": 0.1}],
    "vision_feature_layer": [{"vision_feature_layer": layer} for layer in ([-1], -2, [0], 0, 7, [-2, -1])],
    "mm_tokens_per_image": [{"mm_tokens_per_image": n} for n in (15, 64)],
    **{key: [{key: 500}] for key in ("image_token_id", "image_token_index", "video_token_id")},
    **{key: [{key: 501}] for key in ("video_start_token_id", "video_end_token_id")},
}
QWEN2_5 = {  # heads are as wide as hidden_size says, and M-RoPE's sections with them
    T + "hidden_size": [
        {T + "hidden_size": 96, V + "out_hidden_size": 96, ROPE + "mrope_section": [4, 4, 4]}
    ],
    T + "num_attention_heads": [{T + "num_attention_heads": 8, ROPE + "mrope_section": [1, 1, 2]}],
    T + "head_dim": [{T + "head_dim": 32}],
}
WIDER = {T + "hidden_size": 96, V + "hidden_size": 96, ROPE + "mrope_section": [4, 4, 4]}
QWEN2 = QWEN2_5 | {  # its tower's own width is embed_dim, and hidden_size that of the language model
    **{key: [WIDER] for key in (T + "hidden_size", V + "hidden_size")},
    V + "embed_dim": [{V + "embed_dim": 96}],
    V + "mlp_ratio": [{V + "mlp_ratio": 3}],
    V + "depth": [{V + "depth": n} for n in (1, 2)],
}
GLM_DENSE = {  # heads are as wide as hidden_size says, and half of each head is rotated
    T + "hidden_size": [
        {T + "hidden_size": 96, V + "out_hidden_size": 96, ROPE + "mrope_section": [2, 2, 2]}
    ],
    T + "num_attention_heads": [{T + "num_attention_heads": 2, ROPE + "mrope_section": [2, 3, 3]}],
    T + "head_dim": [{T + "head_dim": 32}, {T + "head_dim": 8}],
    V + "depth": [{V + "depth": n} for n in (1, 3)],
}
LLAVA = {
    T + "num_attention_heads": [{T + "num_attention_heads": 8}],
    "vision_feature_layer": [
        {"vision_feature_layer": layers} for layers in (-1, 0, 3, -4, -5, 4, [-2], [1, -1, 1], [])
    ],
    "vision_feature_select_strategy": [{"vision_feature_select_strategy": "full"}],
}
ONEVISION = LLAVA | {
    "vision_feature_select_strategy": [{"vision_feature_select_strategy": "default"}],
    "vision_aspect_ratio": [
        {"vision_aspect_ratio": ratio} for ratio in ("pad", "anyres_max_", "anyres_max_0", "anyres_max_7")
    ],
    "video_token_id": [{"video_token_id": 500, "video_token_index": 500}],
    "image_grid_pinpoints": [{"image_grid_pinpoints": each} for each in ([], [[44, 50]], [[0, 44]], [[88]])],
}
INTERNVL = {
    "vision_feature_layer": [{"vision_feature_layer": layers} for layers in (-2, 0, 2, 3, -4, [-1])],
    "vision_feature_select_strategy": [{"vision_feature_select_strategy": "full"}],
    "downsample_ratio": [{"downsample_ratio": ratio} for ratio in (0.25, 1.0, 0.3, 2.0, 0.0)],
    V + "norm_type": [{V + "norm_type": "rms_norm"}],
}
MISTRAL3 = {  # its tiny config says how wide the tower's heads are
    V + "hidden_size": [{V + "hidden_size": 96, V + "head_dim": 48}],
    V + "num_attention_heads": [{V + "num_attention_heads": 1, V + "head_dim": 48}],
}
GLM = {
    T + "routed_scaling_factor": [{T + "routed_scaling_factor": factor} for factor in (3.0, 0.0)],
    T + "head_dim": [{T + "head_dim": 64, ROPE + "mrope_section": [4, 6, 6]}, {T + "head_dim": 16}],
    T + "num_experts_per_tok": [
        *({T + "num_experts_per_tok": n} for n in (1, 3, 9)),
        {T + "num_experts_per_tok": 3, T + "topk_group": 2},
    ],
}
OWN_INPUTS = {T + "hidden_size_per_layer_input": 16}
SHARED_AND_WIDE = {T + "num_kv_shared_layers": 1, T + "use_double_wide_mlp": True}
GEMMA4 = {
    "audio_config": [{"audio_config": {"model_type": "gemma4_audio"}}],
    **{key: [{key: 639}] for key in ("video_token_id", "audio_token_id")},  # no text has this token
    T + "use_bidirectional_attention": [{T + "use_bidirectional_attention": name} for name in (None, "all")],
    T + "hidden_size_per_layer_input": [OWN_INPUTS],
    T + "vocab_size_per_layer_input": [OWN_INPUTS | {T + "vocab_size_per_layer_input": 128}],
    T + "num_kv_shared_layers": [
        *(OWN_INPUTS | {T + "num_kv_shared_layers": n} for n in (1, 2, 3)),
        {T + "num_kv_shared_layers": 1},
    ],
    T + "use_double_wide_mlp": [
        OWN_INPUTS | SHARED_AND_WIDE | {T + "enable_moe_block": False},
        OWN_INPUTS | SHARED_AND_WIDE,
    ],
    T + "top_k_experts": [{T + "top_k_experts": n} for n in (1, 3, 9)],
    T + "num_global_key_value_heads": [{T + "num_global_key_value_heads": n} for n in (1, 4, None)],
    T + "global_head_dim": [{T + "global_head_dim": n} for n in (16, 64)],
    T + "num_attention_heads": [{T + "num_attention_heads": 8}],
    V + "num_attention_heads": [{V + "num_attention_heads": 2, V + "num_key_value_heads": 2}],
    V + "num_key_value_heads": [{V + "num_key_value_heads": 2}],
}
EMBEDDED = V + "mm_embed_dim"
GEMMA4_UNIFIED = {key: GEMMA4[key] for key in GEMMA4 if key.startswith(T) or key.endswith("_token_id")} | {
    EMBEDDED: [{EMBEDDED: 96, V + "output_proj_dims": 96}, {EMBEDDED: 96}],
    V + "output_proj_dims": [{V + "output_proj_dims": 96}],
    V + "mm_posemb_size": [{V + "mm_posemb_size": 320}],
    "audio_config": [{"audio_config": None}],
}
LAYERS = (
    "linear linear linear linear",
    "full full full full",
    "full linear linear full",
    "linear linear conv full",
)
QWEN3_5 = {
    T + "layer_types": [
        {T + "layer_types": [f"{kind}_attention" for kind in each.split()]} for each in LAYERS
    ],
    T + "linear_num_key_heads": [{T + "linear_num_key_heads": n} for n in (1, 2, 8, 3)],
    T + "linear_num_value_heads": [{T + "linear_num_value_heads": n} for n in (4, 12, 6)],
    T + "linear_conv_kernel_dim": [{T + "linear_conv_kernel_dim": n} for n in (2, 3, 1)],
    T + "head_dim": [{T + "head_dim": 64, ROPE + "mrope_section": [3, 3, 2]}, {T + "head_dim": 16}],
}
OWN_PARTNERS = {
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4_UNIFIED,
    "qwen2_vl": QWEN2,
    "qwen2_5_vl": QWEN2_5,
    "mistral3": MISTRAL3,
    "glm4v_moe": GLM,
}
MINICPM = {
    "insert_layer_id": [{"insert_layer_id": layer} for layer in (0, 2, 3)],
    V + "num_hidden_layers": [{V + "num_hidden_layers": n} for n in (1, 2)],  # there are 3
    **{key: [{key: [1, 4]}] for key in ("merge_kernel_size", V + "window_kernel_size")},
    "merger_times": [{"merger_times": 2}],
    **{key: [{key: 500}] for key in ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id")},
    "newline_id": [{"newline_id": 501}],
}
OWN_PARTNERS |= dict.fromkeys(("qwen3_5", "qwen3_5_moe"), QWEN3_5)
OWN_PARTNERS |= dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), QWEN3_5 | MINICPM)
OWN_PARTNERS |= dict.fromkeys(("glm4v", "glm46v", "glmga"), GLM_DENSE)
OWN_PARTNERS |= dict.fromkeys(("internvl", "qianfan_ocr"), INTERNVL)
SMOLVLM = {
    T + "num_attention_heads": [{T + "num_attention_heads": 8}],
    "scale_factor": [{"scale_factor": factor} for factor in (1, 3, 0)],
}
TOWER_SIDE = V + "pos_emb_height"
KIMI = {
    T + "num_experts_per_tok": [
        *({T + "num_experts_per_tok": n} for n in (1, 5, 9)),
        {T + "num_experts_per_tok": 4, T + "topk_group": 2, T + "n_group": 2},
    ],
    T + "n_group": [{T + "n_group": 2, T + "num_experts_per_tok": 2}, *({T + "n_group": n} for n in (1, 4))],
    T + "num_key_value_heads": [{T + "num_key_value_heads": n} for n in (1, 2)],
    T + "head_dim": [{T + "head_dim": 16}],  # that of the turned channels is 8
    T + "q_lora_rank": [{T + "q_lora_rank": rank} for rank in (12, None)],
    V + "hidden_size": [{V + "hidden_size": 96, "projection_hidden_size": 96}],
    V + "num_attention_heads": [{V + "num_attention_heads": 2}],
    "projection_layer_norm_eps": [{"projection_layer_norm_eps": 0.1}],
    "projection_hidden_size": [{"projection_hidden_size": 96}],
    TOWER_SIDE: [{TOWER_SIDE: 8, V + "pos_emb_width": 8}, {TOWER_SIDE: 8}],
    V + "pos_emb_width": [{V + "pos_emb_width": 8}],
    V + "merge_kernel_size": [{V + "merge_kernel_size": [1, 4]}],
}
OWN_PARTNERS |= {"kimi_k25": KIMI}
OWN_PARTNERS |= {"llava": LLAVA, "llava_onevision": ONEVISION, "smolvlm": SMOLVLM}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
RULES = [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    *(
        YARN,
        YARN | {"attention_factor": 1.5, "truncate": False},
        LLAMA3,
        LLAMA3 | {"partial_rotary_factor": 0.5},
    ),
    {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
]


def rope_changes(family: str, config: dict) -> list[dict[str, Any]]:
    rule = config["text_config"]["rope_parameters"]
    if "full_attention" in rule:
        return [{ROPE + "full_attention": rule} for rule in RULES] + [{ROPE + "sliding_attention": YARN}]
    own = {
        key: rule[key]
        for key in ("mrope_section", "llama_4_scaling_beta", "partial_rotary_factor")
        if key in rule
    }
    own |= {"original_max_position_embeddings": 64} if family == "mistral3" else {}
    whole = [{T + "rope_parameters": own | rule, T + "max_position_embeddings": 4096} for rule in RULES]
    missing = [{ROPE + key: REMOVED} for key in own if key in rule]
    mrope = [[3, 3, 2], [1, 1, 1], [24, 20, 20], [1, 1, 2, 2, 1, 1], [3, 3], [-1, 5, 4]]
    sections = [{ROPE + "mrope_section": each} for each in mrope] if "mrope_section" in rule else []
    return whole + missing + sections + [{ROPE + "mrope_interleaved": value} for value in (True, False)]


# Older spellings, other names, and keys that change another one
SPELLINGS: dict[str, list[dict[str, Any]]] = {
    "gemma3": [
        {T + "sliding_window_pattern": 2, T + "layer_types": REMOVED},
        {T + "hidden_act": "relu"},
        {T + "rope_parameters": REMOVED, T + "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {T + "rope_parameters": REMOVED, T + "rope_theta": 100.0, T + "rope_local_base_freq": 50.0},
    ],
    "gemma4": [
        {T + "per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 64}}},
        {T + "per_layer_config": {"1": {"head_dim": 64}}},  # layers of a type differ
        {T + "per_layer_config": {"0": {"num_key_value_heads": 2}, "2": {"num_key_value_heads": 2}}},
        {T + "hidden_size_per_layer_input": None},
        {T + "top_k_experts": 1, T + "moe_intermediate_size": 42},  # torch's products take multiples of 8
        {T + "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    ],
    "gemma4_unified": [
        {T + "per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 64}}},
        {T + "per_layer_config": {"1": {"head_dim": 64}}},  # layers of a type differ
        # as published: keys of Gemma 4 that its class does not have
        {T + "enable_moe_block": True, T + "num_experts": 4, T + "hidden_size_per_layer_input": 16},
        {V + "model_patch_size": 8, V + "num_soft_tokens": 280},
        {V + "model_patch_size": 12},
    ],
    "mistral3": [{T + "layer_types": ["full_attention"] * 4}, {T + "model_type": REMOVED}],
    "lighton_ocr": [
        {T + "layer_types": ["full_attention"] * 4},
        {T + "model_type": REMOVED},
        {"vision_feature_layer": -2},  # no field of this family's, and not read
    ],
    "lfm2_vl": [
        {"tie_embedding": True, "tie_word_embeddings": REMOVED},
        {T + "rope_parameters": REMOVED, T + "rope_theta": 100.0},
        {V + "vision_use_head": REMOVED},
    ],
    **dict.fromkeys(
        ("glm4v", "glm46v", "glmga"),
        [
            {T + "head_dim": 16},  # what it is anyway
            {ROPE + "partial_rotary_factor": REMOVED, T + "partial_rotary_factor": 0.5},
            {T + "attention_bias": False},  # no field: attention has biases in any case
            {T + "num_key_value_heads": None},
        ],
    ),
    "llava": [
        {T + "rope_parameters": REMOVED, T + "rope_scaling": {"type": "linear", "factor": 4.0}},
        {T + "attention_bias": True, "tie_word_embeddings": True},
        {T + "mlp_bias": True},
        {T + "model_type": REMOVED},
    ],
    "llava_onevision": [
        {"image_token_index": REMOVED, "image_token_id": 500},
        {"vision_aspect_ratio": REMOVED},
        {T + "model_type": REMOVED},
        {V + "vision_use_head": True},
        {T + "attention_bias": True, T + "use_sliding_window": False},
        *({T + "head_dim": width} for width in (None, 16, 15)),  # no field of Qwen2's, and read
    ],
    **dict.fromkeys(
        ("internvl", "qianfan_ocr"),
        [
            {V + "use_mean_pooling": False, V + "norm_type": "rms_norm"},
            {V + "image_size": 56, V + "patch_size": 14},
            {V + "image_size": [56, 28]},
            {T + "model_type": REMOVED},
            {T + "attention_bias": True, T + "use_sliding_window": True, T + "sliding_window": 5}
            | {T + "layer_types": REMOVED, T + "max_window_layers": 2},
        ],
    ),
    "smolvlm": [
        {T + "rope_parameters": REMOVED, T + "rope_scaling": {"type": "linear", "factor": 4.0}},
        {T + "attention_bias": True, "tie_word_embeddings": True},
        {T + "mlp_bias": True},
        {T + "model_type": REMOVED},
        {"pad_token_id": 7},
    ],
    "glm4v_moe": [
        {ROPE + "partial_rotary_factor": REMOVED, T + "partial_rotary_factor": 0.5},
        {
            T + "num_experts_per_tok": 1,
            T + "n_group": 1,
            T + "topk_group": 1,
            T + "routed_scaling_factor": 3.0,
        },
    ],
    "kimi_k25": [
        {T + "model_type": "kimi_k2"},  # as published
        {T + "model_type": REMOVED},
        {T + "rope_parameters": REMOVED, T + "rope_theta": 100.0}
        | {T + "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {T + "num_experts_per_tok": 1, T + "routed_scaling_factor": 3.0, T + "first_k_dense_replace": 0},
        {T + "attention_bias": True},
    ],
    "qwen2_vl": [
        {T + "rope_parameters": REMOVED, T + "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {T + "use_sliding_window": True, T + "sliding_window": 5, T + "layer_types": REMOVED}
        | {T + "max_window_layers": 2},
        {V + "in_chans": 1},  # of older checkpoints, which no version reads
    ],
    "qwen2_5_vl": [
        {T + "head_dim": 16},  # what it is anyway
        {T + "rope_parameters": REMOVED, T + "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {T + "use_sliding_window": True, T + "sliding_window": 5, T + "layer_types": REMOVED}
        | {T + "max_window_layers": 2},
        {T + "use_sliding_window": True, T + "sliding_window": 5}
        | {T + "layer_types": ["sliding_attention", "full_attention"] * 2},
        {T + "layer_types": ["sliding_attention"] * 4},
    ],
    "qwen3_vl": [
        {T + "rope_parameters": REMOVED},
        {T + "num_hidden_layers": 2, V + "deepstack_visual_indexes": [0, 1, 2, 3]},
        {V + "depth": REMOVED, V + "num_hidden_layers": 3},
    ],
    "qwen3_vl_moe": [
        {T + "num_experts": REMOVED, T + "num_local_experts": 4},
        {T + "num_experts_per_tok": 1, T + "moe_intermediate_size": 42},
        {T + "sliding_window": 5},
        {T + "mlp_only_layers": [0, 1, 2, 3]},
    ],
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "minicpmv4_6", "minicpmv4_7"),
        [
            {T + "layer_types": REMOVED, T + "full_attention_interval": 2},
            {T + "linear_num_key_heads": 2, T + "linear_num_value_heads": 6, T + "linear_conv_kernel_dim": 2},
            {T + "attn_output_gate": False},
            {T + "attention_bias": True, "tie_word_embeddings": True},
            {ROPE + "partial_rotary_factor": REMOVED, T + "partial_rotary_factor": 0.25},
            {V + "model_type": REMOVED},
        ],
    ),
}
ELSEWHERE = [  # no fields, but Transformers asks for them
    *({T + "is_causal": False}, {T + "per_layer_config": {"0": {"intermediate_size": 64}}}),
    *({"transformers_weights": "other.safetensors"}, {T + "decoder": {"hidden_size": 3}}),
    *({T + "mlp_layer_types": ["dense"] * 4}, {"output_attentions": True}, {V + "layer_types": ["conv"]}),
    *({T + "model_type": "llama"}, {T + "of_no_class": 3, "of_no_class": "x", V + "of_no_class": None}),
]


NOTHING = {  # key -> another value, of keys without effect; token ids are 9
    **{"architectures": ["Other"], "auto_map": {"AutoModel": "other.Model"}, "dtype": "bfloat16"},
    **{"transformers_version": "4.0.0", "id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 3},
    **{"label2id": {"a": 0, "b": 1, "c": 2}, "problem_type": "multi_label_classification"},
    **{"output_hidden_states": True, "use_cache": False, "gradient_checkpointing": True},
    **{"initializer_range": 0.5, "initializer_factor": 3.0, "init_std": 0.5, "name_or_path": "other"},
    **{"vision_aspect_ratio": "pad", "vision_feature_select_strategy": "full"},
    **{"layer_scale_init_value": 0.5, "drop_path_rate": 0.5, "use_double_wide_mlp": True},
    **{"attention_bias": True, "drop_vision_last_layer": True},
}


# Neither model runs when these change alone: others, or the tiny checkpoint's processor, must go with them
NOT_ALONE = {
    *("vision_config.patch_size", "vision_config.temporal_patch_size", "vision_config.spatial_merge_size"),
    *("vision_config.in_channels", "vision_config.num_channels", "vision_config.out_hidden_size"),
    *("vision_config.image_size", "spatial_merge_size", "mm_tokens_per_image", "vision_config.head_dim"),
    *("vision_config.pooling_kernel_size", "downsample_factor", "image_token_id"),
    *("vision_feature_select_strategy", "downsample_ratio", "scale_factor", "downsample_mode"),
    V + "pos_emb_time",  # the longest clip
    *("vision_aspect_ratio", "image_grid_pinpoints"),  # images then have other numbers of features
}
# Read, but no change here moves logits: it says the same, works on gradients only, or needs longer inputs
WITHOUT_A_TRACE = {
    *("image_token_index", "video_token_id", "audio_token_id", "image_start_id"),
    *("video_start_token_id", "video_end_token_id", "tie_word_embeddings"),
    *(T + "max_position_embeddings", T + "pad_token_id", T + "tie_word_embeddings", T + "layer_types"),
    *(T + "router_aux_loss_coef", T + "output_router_logits", T + "use_sliding_window"),
    *(T + "max_window_layers", T + "sliding_window", V + "rope_parameters"),
    *(V + "tokens_per_second", V + "tie_last_hidden_states", V + "vision_use_head"),
}


def keys_by_part(family: str, config: dict) -> dict[str, list[str]]:
    """Part of config.json -> the keys that the family reads or has limits for, but those without effect."""
    description = describe(as_hf_config(config, family))
    reads = keys_read(description)
    found = {}
    for name in PARTS:
        limits = limits_of(description, name)
        read = {path.rpartition(".")[2] for path in reads if dotted(name, path.rpartition(".")[2]) == path}
        part = part_of(description.hf_config, name)
        there = {*vars(part), *part.attribute_map}
        keys = (read | limits.keys() - ASKED_FOR.keys()) & there | description.limits[name].keys()
        unused = {key for key, limit in limits.items() if limit is UNUSED}
        found[name] = sorted(keys - unused - {*PARTS, "model_type"})
    return found


def without_effect(family: str, config: dict) -> dict[str, Any]:
    """All keys of all parts that have no effect, changed."""
    description = describe(as_hf_config(config, family))
    return {
        dotted(name, key): NOTHING.get(key, 9)
        for name in PARTS
        for key, limit in limits_of(description, name).items()
        if limit is UNUSED
    }


def rows_of(family: str, change: dict[str, Any]) -> tuple[str, ...]:
    takes_video = takes_videos(load(family))
    if load(family).images_or_videos and any(key.startswith("video_") for key in change):
        return ("vt",)
    return ("it", "vt") if takes_video and not load(family).images_or_videos else ("it", "t")


def changes_of(family: str, config: dict) -> dict[str, list[dict[str, Any]]]:
    """Key -> its changes."""
    partners = PARTNERS | OWN_PARTNERS.get(family, {})
    found = {}
    for name, keys in keys_by_part(family, config).items():
        values = config[name] if name else config
        for key in keys:
            path = dotted(name, key)
            generic = [{path: value} for value in others(values.get(key))]
            if path in partners or key in values:
                found[path] = partners.get(path, generic)
    found[T + "rope_parameters"] = rope_changes(family, config)
    return {path: [_possible(change, config) for change in changes] for path, changes in found.items()}


def few_changes(configs: dict[str, dict]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Family -> key -> few of its changes: every family that has words of its own for a key's values, one of
    those that share the words, and every kind of change of a key in some family.
    """
    found: dict[str, dict[str, list]] = {family: {} for family in configs}
    words = {family: _declared(family, config) for family, config in configs.items()}
    cells = [
        (family, path, _kind(family, path, number, change), change)
        for family, config in configs.items()
        for path, changes in changes_of(family, config).items()
        for number, change in enumerate(changes)
    ]

    def shows(cell: tuple) -> set:
        family, path, kind, _ = cell
        return {(path, words[family].get(path, family)), (path, kind)}

    for family, path, _, change in covering(cells, shows):
        found[family].setdefault(path, []).append(change)
    return found


def _declared(family: str, config: dict[str, Any]) -> dict[str, str]:
    """Key -> the words that say which values it may have, where that is more than any."""
    description = describe(as_hf_config(config, family))
    found = {
        dotted(name, key): limit.words
        for name in PARTS
        for key, limit in limits_of(description, name).items()
        if limit not in (ANY, UNUSED)
    }
    rules = sorted((key, limit.words) for key, limit in description.rope_limits.items())
    return found | {T + "rope_parameters": str(rules)}


def _kind(family: str, path: str, number: int, change: dict[str, Any]) -> tuple:
    """Families share changes that are named, and the ways in which the others are made."""
    named = path in PARTNERS | OWN_PARTNERS.get(family, {}) and path != T + "rope_parameters"
    return (Cell(change).name,) if named else (number, *change)


def _possible(change: dict[str, Any], config: dict) -> dict[str, Any]:
    """Without removals and partners of what the config does not have."""
    return {
        path: value
        for path, value in change.items()
        if not (value == REMOVED or path == V + "out_hidden_size") or _has(config, path)
    }


def _has(config: dict, path: str) -> bool:
    *sections, key = path.split(".")
    for section in sections:
        config = config.get(section, {})
    return key in config
