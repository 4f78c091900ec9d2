"""What several families have in common: the sizes, weights and key spellings of Llama's descendants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron_vlm.models.weights import GatedMLP, GroupedQKV, Rule, Shard, Whole

# our norm -> the HF layer's, in the usual layer with one norm before each half
PRE_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}

# HF key prefixes in the wild -> the hub's, for models that keep tower, projector and language model apart
LLAVA_RENAMES = (
    (r"^vision_tower\.vision_model\.", "vision_tower."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^lm_head\.", "language_model.lm_head."),
)
LLAVA_VISION_RULES = (
    Rule("vision.vision_tower.**", ("vision_tower.**",), Whole()),
    Rule("vision.multi_modal_projector.**", ("multi_modal_projector.**",), Whole()),
)


def decoder_architecture(hf_config: Any) -> dict:
    """Fields of LanguageModelConfig that every text config spells alike; SwiGLU unless overruled."""
    text = hf_config.text_config
    return {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ffn_hidden_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": head_dim(text),
        "activation_func": nn.functional.silu,
        "layernorm_epsilon": text.rms_norm_eps,
        "vocab_size": text.vocab_size,
        "tie_embeddings": hf_config.tie_word_embeddings,
    }


def head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def decoder_rules(
    hf_config: Any,
    norms: Mapping[str, str] = PRE_NORMS,
    hf_model: str = "language_model.model.",
    lm_head: str = "language_model.lm_head.weight",
) -> list[Rule]:
    """Rules for embedding, dense layers without biases, norms and output weights.

    `norms` maps our norms of a layer to HF's, `hf_model` and `lm_head` are the hub's spellings.
    """
    text, tied = hf_config.text_config, hf_config.tie_word_embeddings
    layer, hf_layer = "language_model.decoder.layers.*.", hf_model + "layers.*."
    embedding = hf_model + "embed_tokens.weight"
    qkv = GroupedQKV(text.num_attention_heads, text.num_key_value_heads, head_dim(text))
    linears = {
        "self_attention.linear_qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv),
        "self_attention.linear_proj": (("self_attn.o_proj",), Shard(1)),
        "mlp.linear_fc1": (("mlp.gate_proj", "mlp.up_proj"), GatedMLP()),
        "mlp.linear_fc2": (("mlp.down_proj",), Shard(1)),
    }
    return [
        Rule("language_model.embedding.word_embeddings.weight", (embedding,), Shard(0)),
        *[
            Rule(f"{layer}{ours}.weight", (f"{hf_layer}{theirs}.weight",), Whole())
            for ours, theirs in norms.items()
        ],
        *[
            Rule(f"{layer}{ours}.weight", tuple(f"{hf_layer}{name}.weight" for name in theirs), operation)
            for ours, (theirs, operation) in linears.items()
        ],
        Rule("language_model.decoder.final_layernorm.weight", (hf_model + "norm.weight",), Whole()),
        Rule(
            "language_model.output_layer.weight",
            (embedding if tied else lm_head,),
            Shard(0),
            export=not tied,
        ),
    ]
