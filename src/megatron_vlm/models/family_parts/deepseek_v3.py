"""DeepSeek-V3's text model: latent attention, and experts that are chosen by sigmoids with a bias."""

from typing import Any

from megatron_vlm.models.family_parts import keys, latent, moe_rules

SECTION = keys.Section(
    ("deepseek_v3",),
    latent.TEXT
    | moe_rules.DEEPSEEK
    | moe_rules.SIGMOID
    | {
        "head_dim": keys.Values("qk_rope_head_dim", lambda width, text: width == text.qk_rope_head_dim),
        # without it, Transformers takes queries of the text for some of the tower when it reads a Kimi
        "q_lora_rank": keys.Values("above 0", lambda rank, text: bool(rank) and rank > 0),
        "qk_head_dim": latent.SCORES,
    },
    no_effect=("pretraining_tp", "num_mtp_layers", "num_nextn_predict_layers"),
    rope=keys.ROPE,
)


def architecture(text: Any) -> dict:
    return latent.architecture(text) | moe_rules.sigmoid(text)
