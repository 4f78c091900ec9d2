"""Families with Llama's decoder layers share this: pre-norm, gated SiLU, grouped queries."""

from __future__ import annotations

from typing import Any

from transformers.activations import ACT2FN

from megatron_vlm.models.weights.rules import Cut, GatedMLP, GroupedQKV, Operation, Rule, Vocabulary, Whole

MODEL = "language_model."
LAYER = MODEL + "decoder.layers.*."


def head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def architecture(text: Any, tied: bool, activation: str = "hidden_act") -> dict:
    """Fields of LanguageModelConfig; `activation` is the key that names the activation function."""
    return {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ffn_hidden_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": head_dim(text),
        "activation_func": ACT2FN[getattr(text, activation)],
        "layernorm_epsilon": text.rms_norm_eps,
        "vocab_size": text.vocab_size,
        "pad_token": None if text.pad_token_id is None else text.pad_token_id % text.vocab_size,  # may be -1
        "tie_embeddings": tied,
    }


def layer_windows(text: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer, None for a layer that sees everything before it."""
    return tuple(text.sliding_window if kind == "sliding_attention" else None for kind in text.layer_types)


def attention_bias(text: Any) -> dict:
    """Biases of all four attention projections, if the config has them."""
    return {"add_qkv_bias": text.attention_bias, "add_proj_bias": text.attention_bias}


def outer_rules(vocab_size: int, tied: bool, hf_model: str, hf_head: str = "lm_head.weight") -> list[Rule]:
    """Rules for embedding, last norm and output layer; `hf_model` is the prefix of the text model's keys.

    Tied weights are stored as the embedding, as both, or as the output layer alone.
    """
    embedding, output = MODEL + "embedding.word_embeddings.weight", MODEL + "output_layer.weight"
    hf_embedding, words = hf_model + "embed_tokens.weight", Vocabulary(vocab_size)
    rules = [
        Rule(MODEL + "decoder.final_layernorm.weight", (hf_model + "norm.weight",), Whole()),
        Rule(embedding, (hf_embedding,), words),
    ]
    if not tied:
        return [*rules, Rule(output, (hf_head,), words)]
    return [
        *rules,
        Rule(embedding, (hf_embedding, hf_head), Vocabulary(words.entries, keys=2)),
        Rule(embedding, (hf_head,), words),
        Rule(output, (hf_embedding,), words, export=False),  # a copy, on the last stage if there are several
        Rule(output, (hf_head,), words, export=False),
    ]


def attention_rules(architecture: dict, hf_layer: str) -> list[Rule]:
    """Rules for attention and the norm before it, in every layer; `hf_layer` ends in `layers.*.`"""
    qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
    sizes = (architecture[key] for key in ("num_attention_heads", "num_query_groups", "kv_channels"))
    operation = GroupedQKV(*sizes)
    rules = [
        *norm_rules(hf_layer, {"input_layernorm": "input_layernorm"}),
        layer_rule(
            hf_layer, "self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in qkv), operation
        ),
        layer_rule(hf_layer, "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Cut(1)),
    ]
    if architecture.get("add_qkv_bias"):
        biases = tuple(f"{name}.bias" for name in qkv)
        rules.append(layer_rule(hf_layer, "self_attention.linear_qkv.bias", biases, operation))
    if architecture.get("add_proj_bias"):
        proj = ("self_attn.o_proj.bias",)
        rules.append(layer_rule(hf_layer, "self_attention.linear_proj.bias", proj, Whole()))
    if architecture.get("qk_layernorm"):
        rules += norm_rules(hf_layer, {f"self_attention.{x}_layernorm": f"self_attn.{x}_norm" for x in "qk"})
    return rules


def mlp_rules(hf_layer: str, norm: str = "post_attention_layernorm", fused: bool = False) -> list[Rule]:
    """Rules for the dense feed-forward and the norm before it, in every layer that has one; `fused`: gate and
    up are one HF tensor."""
    gate_up = ("mlp.gate_up_proj.weight",) if fused else ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    return [
        *norm_rules(hf_layer, {"pre_mlp_layernorm": norm}),
        layer_rule(hf_layer, "mlp.linear_fc1.weight", gate_up, GatedMLP(fused)),
        layer_rule(hf_layer, "mlp.linear_fc2.weight", ("mlp.down_proj.weight",), Cut(1)),
    ]


def norm_rules(hf_layer: str, norms: dict[str, str]) -> list[Rule]:
    """Rules for norms of every layer, ours -> theirs."""
    return [layer_rule(hf_layer, f"{o}.weight", (f"{t}.weight",), Whole()) for o, t in norms.items()]


def layer_rule(hf_layer: str, ours: str, theirs: tuple[str, ...], operation: Operation) -> Rule:
    return Rule(LAYER + ours, tuple(hf_layer + name for name in theirs), operation)
