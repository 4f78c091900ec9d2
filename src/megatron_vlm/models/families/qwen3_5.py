"""Qwen3.5, 3.6 and 3.8: gated delta nets and gated attention; Qwen3-VL's tower without deepstack."""

from megatron_vlm.models.family_parts import limits, llama, patch_towers
from megatron_vlm.models.layers.attention_sizes import RECURRENT, DeltaHeads
from megatron_vlm.models.layers.delta_net import sizes_of_head
from megatron_vlm.models.weights.rules import Cut, DeltaInputs, Rule, Whole

MROPE = patch_towers.MRope(sections=(11, 11, 10), interleaved=True, part_of_head=True)
KINDS = {"linear_attention": RECURRENT, "full_attention": None}


TEXT = {
    **dict.fromkeys(("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"), limits.SIZE),
    "linear_value_head_dim": limits.SIZE,
    "attn_output_gate": limits.only(True),
    "hidden_act": limits.only("silu"),  # the convolution has it, too
    "output_gate_type": limits.only("swish"),
    "linear_num_value_heads": limits.Limit(
        "a multiple of linear_num_key_heads",
        lambda values, text: values > 0 == values % text.linear_num_key_heads,
    ),
    "layer_types": limits.Limit(
        "linear_attention or full_attention for each layer",
        lambda kinds, text: len(kinds) == text.num_hidden_layers and set(kinds) <= KINDS.keys(),
    ),
    # `layer_types` follow from the interval; the others are for engines, and for prediction (`carried_keys`)
    **dict.fromkeys(("full_attention_interval", "mamba_ssm_dtype"), limits.UNUSED),
    **dict.fromkeys(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), limits.UNUSED),
}


class Qwen35(patch_towers.PatchFamily):
    model_type = "qwen3_5"
    box_format = "bbox_2d"
    text_limits = TEXT
    mrope = MROPE

    @property
    def architecture(self) -> dict:
        text = self.text
        return llama.architecture(text, self.tied) | {
            **llama.attention_bias(text),
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "layer_windows": tuple(KINDS[kind] for kind in text.layer_types),
            "delta_heads": DeltaHeads(
                text.linear_num_key_heads,
                text.linear_num_value_heads,
                text.linear_key_head_dim,
                text.linear_value_head_dim,
                text.linear_conv_kernel_dim,
            ),
        }

    @property
    def carried_keys(self) -> dict[str, str]:
        return {"mtp.**": "multi-token prediction, which is not trained"}

    def attention_rules(self) -> list[Rule]:
        """Rules for both kinds of layers."""
        heads = self.architecture["delta_heads"]
        key, _, values, *unused = sizes_of_head(heads)
        prefix, hf_prefix = "self_attention.", "linear_attn."
        inputs = [f"{hf_prefix}in_proj_{name}.weight" for name in ("qkv", "b", "a", "z")]
        return [
            *super().attention_rules(),
            self.layer_rule(
                f"{prefix}in_proj.weight", inputs, DeltaInputs(heads.keys, key, values, tuple(unused))
            ),
            self.layer_rule(
                f"{prefix}conv1d", [f"{hf_prefix}conv1d.weight"], DeltaInputs(heads.keys, key, values)
            ),
            self.layer_rule(f"{prefix}dt_bias", [f"{hf_prefix}dt_bias"], Cut(0)),
            self.layer_rule(f"{prefix}A_log", [f"{hf_prefix}A_log"], Cut(0)),
            self.layer_rule(f"{prefix}out_norm", [f"{hf_prefix}norm.weight"], Whole()),
            self.layer_rule(f"{prefix}out_proj.weight", [f"{hf_prefix}out_proj.weight"], Cut(1)),
        ]
