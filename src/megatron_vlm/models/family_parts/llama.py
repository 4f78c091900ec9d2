"""Families with Llama's decoder layers share this: pre-norm, gated SiLU, grouped queries."""

from collections.abc import Mapping
from typing import Any

from transformers.activations import ACT2FN

from megatron_vlm.models.description import Description
from megatron_vlm.models.weights.rules import Cut, GatedMLP, GroupedQKV, Operation, Rule, Vocabulary, Whole

MODEL = "language_model."
LAYER = MODEL + "decoder.layers.*."
QK_NORMS = {f"self_attention.{x}_layernorm": f"self_attn.{x}_norm" for x in "qk"}
GATE_UP = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]


def head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def architecture(text: Any, tied: bool, activation: str = "hidden_act") -> dict:
    """Fields of LanguageModelConfig; `activation` is the key that names the activation function."""
    return {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        # a model without a dense layer has none
        "ffn_hidden_size": getattr(text, "intermediate_size", None) or text.moe_intermediate_size,
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


def outer_rules(vocab_size: int, tied: bool, hf_model: str, hf_head: str) -> list[Rule]:
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


class LlamaFamily(Description):
    """A family with Llama's decoder layers, whose keys begin with these prefixes."""

    # names in `vision`, of modules or weights -> their HF keys
    vision_keys: Mapping[str, str] = {}
    hf_model = "model.language_model."  # prefix of the text model's keys
    hf_head = "lm_head.weight"
    norm_before_mlp = "post_attention_layernorm"
    norms_after: Mapping[str, str] = {}  # norms of the outputs of sub-layers, ours -> theirs
    fused_mlp = False  # gate and up are one HF tensor

    @property
    def rules(self) -> list[Rule]:
        vision = [Rule(f"vision.{ours}", (hf_key,), Whole()) for ours, hf_key in self.vision_keys.items()]
        return [
            *vision,
            *outer_rules(self.text.vocab_size, self.tied, self.hf_model, self.hf_head),
            *self.attention_rules(),
            *self.feed_forward_rules(),
            *self.norm_rules(self.norms_after),
        ]

    def attention_rules(self) -> list[Rule]:
        """Rules for attention and the norm before it, in every layer."""
        architecture = self.architecture
        operation = GroupedQKV(
            architecture["num_attention_heads"],
            architecture["num_query_groups"],
            architecture["kv_channels"],
            gates=architecture.get("attention_output_gate", False),
        )
        prefix, hf_prefix = "self_attention.linear_", "self_attn."
        norms = {"input_layernorm": "input_layernorm"}
        if architecture.get("qk_layernorm"):
            norms |= QK_NORMS
        rules = [
            self.layer_rule(f"{prefix}qkv.weight", [f"{hf_prefix}{x}_proj.weight" for x in "qkv"], operation),
            self.layer_rule(f"{prefix}proj.weight", [f"{hf_prefix}o_proj.weight"], Cut(1)),
        ]
        if architecture.get("add_qkv_bias"):
            biases = [f"{hf_prefix}{x}_proj.bias" for x in "qkv"]
            rules.append(self.layer_rule(f"{prefix}qkv.bias", biases, operation))
        if architecture.get("add_proj_bias"):
            rules.append(self.layer_rule(f"{prefix}proj.bias", [f"{hf_prefix}o_proj.bias"], Whole()))
        return self.norm_rules(norms) + rules

    def feed_forward_rules(self) -> list[Rule]:
        """Rules for the dense feed-forward and the norm before it, in every layer that has one."""
        gate_up = ["mlp.gate_up_proj.weight"] if self.fused_mlp else GATE_UP
        return [
            *self.norm_rules({"pre_mlp_layernorm": self.norm_before_mlp}),
            self.layer_rule("mlp.linear_fc1.weight", gate_up, GatedMLP(self.fused_mlp)),
            self.layer_rule("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], Cut(1)),
        ]

    def norm_rules(self, norms: Mapping[str, str]) -> list[Rule]:
        """Rules for norms of every layer, ours -> theirs."""
        return [self.layer_rule(f"{o}.weight", [f"{t}.weight"], Whole()) for o, t in norms.items()]

    def layer_rule(self, ours: str, hf_names: list[str], operation: Operation, **fused: Any) -> Rule:
        """A rule for this weight of every layer; `fused` are `Rule.rows` and `Rule.row_shape`."""
        hf_keys = tuple(f"{self.hf_model}layers.*.{name}" for name in hf_names)
        return Rule(LAYER + ours, hf_keys, operation, **fused)


class SideBySide(LlamaFamily):
    """A family that keeps tower, projector and language model side by side."""

    # HF key prefixes in the wild -> the hub's
    renames = (
        (r"^vision_tower\.vision_model\.", "vision_tower."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
        (r"^lm_head\.", "language_model.lm_head."),
    )
    vision_keys = {
        "vision_tower.**": "vision_tower.**",
        "multi_modal_projector.**": "multi_modal_projector.**",
    }
    hf_model = "language_model.model."
    hf_head = "language_model.lm_head.weight"
