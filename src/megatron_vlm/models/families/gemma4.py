"""Gemma 4, dense or with experts: a tower in native resolution, two kinds of layers with heads of their own.

The small sizes (E2B, E4B) have inputs of each layer's own, and last layers that take keys and values of
earlier ones. Their audio tower is carried from import to export.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.description import Description
from megatron_vlm.models.families import gemma3
from megatron_vlm.models.family_parts import gemma4_layers, limits, llama, moe_rules, towers
from megatron_vlm.models.layers.attention_sizes import Heads
from megatron_vlm.models.layers.tower_attention import use_segments, uses_segments
from megatron_vlm.models.positions import IMAGE, VIDEO
from megatron_vlm.models.weights.rules import Cut, GroupedQKV, Rule, Vocabulary, Whole
from megatron_vlm.parallel.setup import on_device

FULL = "full_attention"


def _chosen(count: Any, text: Any) -> bool:
    return not text.enable_moe_block or (count is not None and 1 <= count <= (text.num_experts or 0))


def _has_width(size: Any, text: Any) -> bool:
    return not text.enable_moe_block or size > 0


def _stands_for_media(token: Any, text: Any) -> bool:
    """Transformers embeds it in the place of images, also where there are none."""
    return token is not None and 0 <= token < text.vocab_size


def _partial(factor: Any, rule_and_text: tuple[dict, Any]) -> bool:
    rule = rule_and_text[0]
    is_read = factor is not None and rule.get("rope_type") == "proportional"
    return rule.get("partial_rotary_factor", 1) == 1 or is_read or rule.get("rope_type") == "default"


def _keeps_own(shared: int, text: Any) -> bool:
    unshared = text.layer_types[: len(text.layer_types) - shared]
    return shared == 0 or (shared > 0 and set(unshared) == set(text.layer_types))


def _has_inputs(shared: int, text: Any) -> bool:
    return _keeps_own(shared, text) and not (shared and not text.hidden_size_per_layer_input)


def _dense(wide: bool, text: Any) -> bool:
    return not (wide and text.enable_moe_block and text.num_kv_shared_layers)


def _one_vocabulary(size: int, text: Any) -> bool:
    return not text.hidden_size_per_layer_input or size == text.vocab_size


OTHERS_KEEP = "0, or so many that each type of layer_types is among the others"
NOT_IMAGE = dict.fromkeys(("video_token_id", "audio_token_id"), limits.OTHER_TOKEN)
TEXT = gemma3.GemmaFamily.text_limits | {
    # what Transformers makes of other keys, and how it may be asked for them
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), limits.ANY),
    "allow_global_per_layer_attribute_access": limits.ANY,
    "serialize_explicit_per_layer_config": limits.ANY,
    "pad_token_id": limits.Limit("a token of the vocabulary", _stands_for_media),
    "use_bidirectional_attention": limits.only("vision", None),
    "final_logit_softcapping": limits.Limit("null or above 0", lambda cap, _: cap is None or cap > 0),
    "num_kv_shared_layers": limits.Limit(OTHERS_KEEP, _keeps_own),
}
EXPERTS_AND_EMBEDDINGS = {
    "num_experts": limits.ANY,
    "moe_intermediate_size": limits.Limit("above 0, or any without enable_moe_block", _has_width),
    "top_k_experts": limits.Limit("1 to num_experts", _chosen),
    "hidden_size_per_layer_input": limits.Limit("0 or above, or null", lambda size, _: (size or 0) >= 0),
    "vocab_size_per_layer_input": limits.Limit("vocab_size", _one_vocabulary),
    # Transformers 5.23 fails without these inputs
    "num_kv_shared_layers": limits.Limit(f"{OTHERS_KEEP}, with hidden_size_per_layer_input", _has_inputs),
    "use_double_wide_mlp": limits.Limit("false, or true without experts", _dense),
}


class Gemma4Vision(nn.Module):
    """The HF tower and projector; all images run as one sequence in which each image sees only itself.

    pixel_values (P, F), without padding, and image_grid_thw (N, 3), on the host -> features (M, D).
    """

    def __init__(self, hf_config: Any):
        super().__init__()
        # not in the dtype of config.json: `standardize` has buffers, which stay as they are
        self.vision_tower = use_segments(towers.hf_tower(hf_config.vision_config, dtype=torch.float32))
        self.embed_vision = Gemma4MultimodalEmbedder(hf_config.vision_config, hf_config.text_config)
        self.pooled = hf_config.vision_config.pooling_kernel_size

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        shapes_N = [(rows, columns) for _, rows, columns in image_grid_thw.tolist()]
        device = pixel_values.device
        positions = [positions_of(rows, columns) for rows, columns in shapes_N]
        positions_P2 = on_device(torch.cat(positions), device)
        padding_1P = torch.zeros(1, len(positions_P2), dtype=torch.bool, device=device)
        hidden_1PE = self.vision_tower.patch_embedder(pixel_values[None], positions_P2[None], padding_1P)
        hidden_PE = self._encoded(hidden_1PE, positions_P2[None], image_grid_thw.prod(-1))
        order_P = on_device(towers.merge_order(shapes_N, self.pooled), device)
        squares = hidden_PE.index_select(0, order_P).unflatten(0, (-1, self.pooled**2))
        pooled_ME = squares.float().mean(1).to(hidden_PE.dtype).float() * hidden_PE.shape[-1] ** 0.5
        if self.vision_tower.config.standardize:
            bias, scale = self.vision_tower.std_bias, self.vision_tower.std_scale
            pooled_ME = (pooled_ME - bias.float()) * scale.float()
        return self.embed_vision(pooled_ME.to(hidden_PE.dtype))

    def _encoded(self, hidden_1PE: Tensor, positions_1P2: Tensor, patches_N: Tensor) -> Tensor:
        """The output of the tower's layers, in which each image sees only itself."""
        encoder = self.vision_tower.encoder
        if uses_segments(self.vision_tower):
            bounds = pad(patches_N.cumsum(0), (1, 0))
            return encoder(hidden_1PE, None, positions_1P2, host_bounds=bounds).last_hidden_state[0]
        images = zip(*(x.split(patches_N.tolist(), dim=1) for x in (hidden_1PE, positions_1P2)), strict=True)
        return torch.cat([encoder(image, None, places).last_hidden_state[0] for image, places in images])


def positions_of(rows: int, columns: int) -> Tensor:
    """(rows * columns, 2): the column and the row of each patch, on the host."""
    with torch.device("cpu"):
        numbers = torch.arange(rows * columns)
        return torch.stack((numbers % columns, numbers // columns), dim=-1)


class Gemma4(gemma3.GemmaFamily, towers.GridFamily):
    model_type = "gemma4"
    top_limits = NOT_IMAGE | {"audio_config": limits.ANY}
    text_limits = TEXT | EXPERTS_AND_EMBEDDINGS
    vision_limits = {
        "num_key_value_heads": limits.GROUPS,
        "hidden_activation": limits.NAMED,
        "output_proj_dims": limits.NUMBER,
        "layer_types": limits.ABSENT,
        **dict.fromkeys(("attention_bias", "max_position_embeddings"), limits.UNUSED),
    }
    rope_limits = {
        "rope_type": limits.only("default", "proportional", "linear", "llama3", "yarn"),
        "partial_rotary_factor": limits.Limit(
            '1, or any where rope_type is "proportional", or "default", which ignores it', _partial
        ),
    }
    by_layer = ("head_dim", "num_key_value_heads")
    groups = Description.groups | {"projector": ("vision.embed_vision.",)}
    vision_keys = {"vision_tower.**": "model.vision_tower.**", "embed_vision.**": "model.embed_vision.**"}
    has_experts = True
    blocks = "windows"  # `bidirectional_images`, if config.json asks for them
    peft_experts = ("router.proj",)

    @property
    def architecture(self) -> dict:
        text = self.text
        return super().architecture | {
            "softmax_scale": 1.0,
            "wide_norms": True,
            "logit_softcap": text.final_logit_softcapping,
            "layer_heads": self.layer_heads,
            "layer_ffn": tuple(
                text.intermediate_size * (2 if text.use_double_wide_mlp and heads.source is not None else 1)
                for heads in self.layer_heads
            ),
            "layer_inputs": self.layer_inputs,
            "placeholders": self.placeholders,
            "own_layer_spec": gemma4_layers.layer_spec,
            **(_experts(text) if self.routes else {}),
        }

    @property
    def bidirectional_images(self) -> bool | str:
        return self.text.use_bidirectional_attention == "vision" and self.blocks

    @property
    def routes(self) -> bool:
        """Whether its layers have experts."""
        return self.has_experts and self.text.enable_moe_block

    def text_of(self, kind: str) -> Any:
        return self.text.per_layer_config[kind]

    @property
    def layer_heads(self) -> tuple[Heads, ...]:
        """The heads of each layer. Those that share take keys and values of the last layer of their kind
        that does not."""
        heads = {}
        for kind in self.layer_kinds:
            text = self.text_of(kind)
            values = not (self.text.attention_k_eq_v and kind == FULL)
            heads[kind] = Heads(text.head_dim, text.num_key_value_heads, values)
        kinds = self.text.layer_types
        unshared = kinds[: len(kinds) - self.text.num_kv_shared_layers]
        last = {kind: number for number, kind in enumerate(unshared)}
        shared = [heads[kind]._replace(source=last[kind]) for kind in kinds[len(unshared) :]]
        return *(heads[kind] for kind in unshared), *shared

    @property
    def layer_inputs(self) -> int:
        """Channels of each layer's own input; 0: they have none."""
        return self.text.hidden_size_per_layer_input or 0

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The tokens that stand for media."""
        config = self.hf_config
        return config.image_token_id, config.video_token_id, config.audio_token_id

    @property
    def carried_keys(self) -> dict[str, str]:
        audio = "audio, which is not trained"
        carried = {"model.audio_tower.**": audio, "model.embed_audio.**": audio}
        for layer, heads in enumerate(self.layer_heads):
            if heads.source is not None:
                attention = f"{self.hf_model}layers.{layer}.self_attn."
                carried |= dict.fromkeys(
                    (f"{attention}k_**", f"{attention}v_**"), "keys and values of no use"
                )
        return carried

    def vision_modules(self) -> nn.Module:
        return Gemma4Vision(self.hf_config)

    @property
    def merge_size(self) -> int:
        return self.vision.pooling_kernel_size

    @property
    def positions_of_patches(self) -> int:
        """The most patches side by side that the tower has positions for."""
        return self.vision.position_embedding_size

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        places = self.positions_of_patches
        if (longest_side := int(visual.image_grid_thw.max())) > places:
            raise ValueError(f"{longest_side} patches side by side, and the tower has {places} positions")
        return super().visual_tokens(visual)

    def visual_kinds(self, input_ids: Any) -> Any:
        """Placeholders of videos and audio, which have no features, count as a video's: a batch with one is
        refused, while Transformers embeds padding."""
        config = self.hf_config
        is_other_medium = (input_ids == config.video_token_id) | (input_ids == config.audio_token_id)
        return (input_ids == config.image_token_id) * IMAGE + is_other_medium * VIDEO

    @property
    def rules(self) -> list[Rule]:
        if not self.layer_inputs:
            return [*super().rules, self.layer_rule("mlp_bda.layer_scalar", ["layer_scalar"], Whole())]
        of_all = f"{llama.MODEL}layer_inputs."
        hf_prefix = f"{self.hf_model}per_layer_"
        table = Vocabulary(self.text.vocab_size)
        return [
            *super().rules,
            Rule(f"{of_all}embedding.weight", (f"{self.hf_model}embed_tokens_per_layer.weight",), table),
            Rule(f"{of_all}projection.weight", (f"{hf_prefix}model_projection.weight",), Whole()),
            Rule(f"{of_all}norm.weight", (f"{hf_prefix}projection_norm.weight",), Whole()),
            self.layer_rule("own_input.gate.weight", ["per_layer_input_gate.weight"], Whole()),
            self.layer_rule("own_input.projection.weight", ["per_layer_projection.weight"], Whole()),
            self.layer_rule("own_input.norm.weight", ["post_per_layer_input_norm.weight"], Whole()),
            self.layer_rule("own_input.layer_scalar", ["layer_scalar"], Whole()),
        ]

    def attention_rules(self) -> list[Rule]:
        """Rules layer by layer, as each may have other heads."""
        text = self.text
        rules = self.norm_rules({"input_layernorm": "input_layernorm"} | llama.QK_NORMS)
        kinds = {"weight": Cut(1), "bias": Whole()} if text.attention_bias else {"weight": Cut(1)}
        for kind, cut in kinds.items():
            proj = f"self_attention.linear_proj.{kind}"
            rules.append(self.layer_rule(proj, [f"self_attn.o_proj.{kind}"], cut))
            for layer, heads in enumerate(self.layer_heads):
                ours = llama.LAYER.replace("*", str(layer)) + f"self_attention.linear_qkv.{kind}"
                hf_prefix = f"{self.hf_model}layers.{layer}.self_attn."
                hf_keys = tuple(f"{hf_prefix}{x}_proj.{kind}" for x in "qkv"[: 2 + heads.values])
                operation = GroupedQKV(text.num_attention_heads, heads.groups, heads.channels, heads.values)
                if heads.source is not None:
                    hf_keys = hf_keys[:1]
                    operation = Cut(0)
                rules.append(Rule(ours, hf_keys, operation))
        return rules

    def feed_forward_rules(self) -> list[Rule]:
        """Rules for the dense feed-forward, and for any experts with their router and their norms."""
        if not self.routes:
            return super().feed_forward_rules()
        router = {"weight": "proj.weight", "scale": "scale", "per_expert_scale": "per_expert_scale"}
        norms = {
            "mlp.norm_of_dense": "pre_feedforward_layernorm",
            "mlp.norm_after_dense": "post_feedforward_layernorm_1",
            "mlp.norm_of_experts": "pre_feedforward_layernorm_2",
            "mlp.norm_after_experts": "post_feedforward_layernorm_2",
        }
        return [
            *self.norm_rules(norms),
            *moe_rules.shared_rules(self, "mlp."),
            *[self.layer_rule(f"mlp.router.{o}", [f"router.{hf}"], Whole()) for o, hf in router.items()],
            *moe_rules.fused_rules(self, self.text.num_experts, "experts."),
        ]


def _experts(text: Any) -> dict:
    return {
        "num_moe_experts": text.num_experts,
        "moe_layer_freq": [1] * text.num_hidden_layers,
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": text.intermediate_size,
        "moe_router_topk": text.top_k_experts,
    }
