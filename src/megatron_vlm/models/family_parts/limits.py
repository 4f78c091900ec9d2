"""Which values of config.json are supported, and the refusal of every other one by name.

A description is computed once while it is recorded which keys are read. A field of Transformers' config class
that nobody reads must keep its default, unless a limit says that it may have other values. Keys that are not
fields are dropped, as Transformers ignores them. A few of them its modelling code does read: ASKED_FOR.
"""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.messages import join_lines, shorten
from megatron_vlm.models.description import Description
from megatron_vlm.supported import SUPPORTED

PARTS = ("", "text_config", "vision_config")  # of config.json; "" is its top level
ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Limit:
    """The supported values of a key: in words, and as a test of (value, the key's part of the config)."""

    words: str
    test: Callable[[Any, Any], bool]

    def holds(self, value: Any, part: Any) -> bool:
        """Whether the value is supported; none is that has no length, or divides nothing, where it must."""
        try:
            return self.test(value, part)
        except (TypeError, ArithmeticError, LookupError, AttributeError):
            return False


def checked(description: Description) -> Description:
    """Return the description without what Transformers ignores in config.json.

    Raises one ValueError that names every key whose value the family does not support.
    """
    problems = list(_other_types(description))
    if not problems:
        description = type(description)(_without_unknown_keys(description))
        problems = list(_outside_limits(description))
    if not problems:
        reads = keys_read(description)
        problems = list(_unread(description, reads))
    if problems:
        fact = f"config.json of this {description.model_type} checkpoint asks for what is not supported:"
        remedy = (
            "The trained model would not be Transformers'; docs/reference/configs.md lists what is supported."
        )
        raise ValueError(join_lines([fact, *(f"  {problem}" for problem in problems), remedy]))
    description.config_values = _values(description, reads)
    return description


def _values(description: Description, reads: set[str]) -> dict[str, Any]:
    """The values of all keys that are read, by dotted name. Models whose values are equal are equal.

    With them is the version of Transformers, whose defaults are among them.
    """
    hf_config = json.loads(description.hf_config.to_json_string(use_diff=False))
    values = {"transformers_version": hf_config["transformers_version"]}
    for name in PARTS:
        part = hf_config[name] if name else hf_config
        limits = limits_of(description, name)
        for key in sorted({*part, *limits} - {*PARTS}):
            path = dotted(name, key)
            is_read = key in limits or path in reads
            if is_read and limits.get(key) is not UNUSED:
                values[path] = part.get(key)
    return values


def part_of(config: Any, name: str) -> Any:
    """The part of a whole config that has this name."""
    return getattr(config, name) if name else config


def dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def limits_of(description: Description, name: str) -> dict[str, Limit]:
    """The limits of all families and of this one for the keys of a part."""
    return ASKED_FOR | COMMON[name] | description.limits[name]


def _without_unknown_keys(description: Description) -> Any:
    """Return a copy of the config without the keys that Transformers does not read, whatever their names.

    What stays are the attributes that the parts' classes have, and keys with limits of the family's own.
    """
    hf_config = deepcopy(description.hf_config)
    for name in PARTS:
        part = part_of(hf_config, name)
        kept_keys = vars(type(part)()).keys() | ASKED_FOR.keys() | description.limits[name].keys()
        for key in vars(part).keys() - kept_keys:
            if not key.startswith("_"):
                del vars(part)[key]
    return hf_config


# --- what is read ------------------------------------------------------------------------------------------


def keys_read(description: Description) -> set[str]:
    """The dotted names of the keys that are read while all is computed that a model and its data need.

    Raises ValueError that names the key read last, if its value makes that impossible.
    """
    reads: list[str] = []
    probed = type(description)(deepcopy(description.hf_config))
    for name in reversed(PARTS):
        _record(part_of(probed.hf_config, name), name, reads)
    try:
        _compute_all(probed)
    except ERRORS as error:
        name, _, key = reads[-1].rpartition(".")
        value = getattr(part_of(description.hf_config, name), key, None)
        raise ValueError(
            f"config.json of this {description.model_type} checkpoint: no model can be built of it "
            f"({type(error).__name__}: {shorten(str(error), 200)}); the last key that was read is "
            f"{reads[-1]}, {as_json(value)}."
        ) from error
    return set(reads)


def _record(part: Any, name: str, reads: list[str]) -> None:
    """Let the part of a config, and copies of it, add the names of keys to `reads` when they are read."""
    plain = type(part)
    names = {field.name for field in fields(plain)}

    def read(self: Any, key: str) -> Any:
        key_name = plain.attribute_map.get(key, key)
        is_key = key_name in names or not hasattr(plain, key_name)  # neither a method nor a constant
        if is_key and not key_name.startswith("_"):
            reads.append(dotted(name, key_name))
        return plain.__getattribute__(self, key)

    # Transformers finds models by the name of the config's class
    part.__class__ = type(plain.__name__, (plain,), {"__getattribute__": read})


def _compute_all(description: Description) -> list[Any]:
    """Return what a model is built of and what data workers need, without memory for weights."""
    with torch.device("meta"):
        vision = description.vision_modules()
        image = GenericVisualInputs(**description.blank_image(0))
    text = torch.full((1,), -1)  # no placeholder
    return [
        *(vision, description.architecture, description.weight_map, description.rotary()),
        *(description.visual_kinds(text), description.position_ids(text, None)),
        *(description.visual_tokens(image), description.tower_units(image), description.tower_pairs(image)),
        *(description.bidirectional_images, description.uses_part),
    ]


# --- what is refused ---------------------------------------------------------------------------------------


@cache
def model_types(family: type[Description]) -> dict[str, tuple[str, ...]]:
    """The model types of text models and of towers that a checkpoint of the family may have."""
    empty = {"model_type": family.model_type, "text_config": {}, "vision_config": {}}
    default = CONFIG_MAPPING[family.model_type].from_dict(empty)
    tower = default.vision_config.model_type
    return {
        "text_config": SUPPORTED[family.model_type].text_types or (default.text_config.model_type,),
        # published towers of Qwen and GLM have the name of the whole model
        "vision_config": family.tower_types or (tower, tower.removesuffix("_vision")),
    }


def _other_types(description: Description) -> Iterator[str]:
    for name, types in model_types(type(description)).items():
        model_type = part_of(description.hf_config, name).model_type
        if model_type not in types:
            yield _problem(f"{name}.model_type", model_type, only(*types).words)


def _outside_limits(description: Description) -> Iterator[str]:
    for name in PARTS:
        part = part_of(description.hf_config, name)
        limits = limits_of(description, name)
        alike = [part]
        if getattr(part, "is_heterogeneous", False):  # reading such a config's keys raises
            if not _differs_by_type(part, description.by_layer):
                by_type = f"null, or {' and '.join(description.by_layer)} of each of layer_types"
                yield _problem(
                    f"{name}.per_layer_config", "given", by_type if description.by_layer else "null"
                )
                continue
            alike = [part.per_layer_config[kind] for kind in sorted(set(part.layer_types))]
        problems = [_broken(limits, name, alike_part) for alike_part in alike]
        yield from dict.fromkeys(problem for alike_part in problems for problem in alike_part)
        yield from _rope_problems(description, name, alike[0])


def _broken(limits: dict[str, Limit], name: str, part: Any) -> Iterator[str]:
    for key, limit in limits.items():
        if hasattr(part, key) and not limit.holds(getattr(part, key), part):
            yield _problem(dotted(name, key), getattr(part, key), limit.words)


def _unread(description: Description, reads: set[str]) -> Iterator[str]:
    for name in PARTS:
        part = part_of(description.hf_config, name)
        default = type(part)()
        limited = limits_of(description, name).keys() | PARTS
        for key in [field.name for field in fields(part)]:
            is_used = key in limited or dotted(name, key) in reads
            if not is_used and getattr(part, key) != getattr(default, key):
                yield _problem(dotted(name, key), getattr(part, key), as_json(getattr(default, key)))


def _differs_by_type(text: Any, by_layer: tuple[str, ...]) -> bool:
    """Whether all layers of one type are alike, and types differ in the keys `by_layer` alone."""
    layers = [vars(layer) for layer in text.per_layer_config]
    if not (by_layer and layers):
        return False
    first = dict(zip(reversed(text.layer_types), reversed(layers), strict=True))
    differing = {key for layer in layers for key in layer if layer[key] != layers[0].get(key)}
    alike = all(layer == first[kind] for kind, layer in zip(text.layer_types, layers, strict=True))
    return alike and differing <= set(by_layer) and not layers[0]["skip"]


def _rope_problems(description: Description, name: str, part: Any) -> Iterator[str]:
    limits = ROPE | description.rope_limits if name == "text_config" else not_null("rope_theta")
    rules = {"": getattr(part, "rope_parameters", None)}
    if name == "text_config" and description.rope_by_layer:
        rules = part.rope_parameters
        if without := [kind for kind in sorted(set(part.layer_types)) if not rules.get(kind)]:
            key = f"{name}.rope_parameters.{without[0]}"
            yield _problem(key, None, "a rule for each of layer_types")
    for kind, rule in rules.items():
        prefix = dotted(name, "rope_parameters.") + (f"{kind}." if kind else "")
        for key, limit in limits.items() if isinstance(rule, dict) else ():
            if not limit.holds(rule.get(key), (rule, part)):
                yield _problem(prefix + key, rule.get(key), limit.words)


def _problem(key: str, value: Any, supported: str) -> str:
    return f"{key} is {as_json(value)}; supported: {supported}"


def as_json(value: Any) -> str:
    """The value as in config.json, shortened if it is long."""
    return shorten(json.dumps(value, default=str, ensure_ascii=False))


# --- values ------------------------------------------------------------------------------------------------


def only(*values: Any) -> Limit:
    return Limit(" or ".join(map(as_json, values)), lambda value, part: value in values)


ANY = Limit("any", lambda value, part: True)  # of a key that not every checkpoint's computation reads
UNUSED = Limit("any, without effect on what is trained", lambda value, part: True)
ABSENT = Limit("no value, not even null", lambda value, part: False)
NUMBER = Limit("a number", lambda value, part: isinstance(value, int | float))
SIZE = Limit("above 0, and less than 2^31", lambda size, part: 0 < size < 2**31)
SIZE_OR_NULL = Limit("above 0, or null", lambda size, part: size is None or 0 < size < 2**31)
ACTIVATION = Limit(
    "the names of Transformers' activations that have no weights",
    lambda name, part: name in ACT2FN and not [*ACT2FN[name].parameters()],
)
# of models whose rotary embedding reads `head_dim` in Transformers, and whose attention does not
WHOLE_HEADS = Limit(
    "hidden_size / num_attention_heads",
    lambda width, text: width in (None, text.hidden_size // text.num_attention_heads),
)
NAMED = Limit("the names of Transformers' activations", lambda name, part: name in ACT2FN)
TOKEN = Limit(  # of the top level
    "a token of the vocabulary",
    lambda token, top: isinstance(token, int) and 0 <= token < top.text_config.vocab_size,
)
OTHER_TOKEN = Limit(  # of videos or audio
    "a number that is not image_token_id",
    lambda token, top: isinstance(token, int) and 0 <= token != top.image_token_id,
)
VIDEO_TOKEN = Limit(
    "a token of the vocabulary that is not image_token_id",
    lambda token, top: TOKEN.holds(token, top) and OTHER_TOKEN.holds(token, top),
)
PADDING = Limit(
    "null, or a token of the vocabulary",
    lambda token, text: token is None or -text.vocab_size <= token < text.vocab_size,
)
COLOURS = only(3)  # of pixels
NO_DROPOUT = only(0.0)  # random numbers would differ from Transformers' under every layout
HEADS_OF_TOWER = Limit(
    "above 0, and a divisor of the tower's width where head_dim is not set",
    lambda heads, vision: (
        heads > 0 and (getattr(vision, "head_dim", None) or _width_of_tower(vision) % heads == 0)
    ),
)
EVEN = Limit("even and above 0, or null", lambda width, text: width is None or width > 0 == width % 2)
GROUPS = Limit(
    "a divisor of num_attention_heads, or null",
    lambda groups, text: groups is None or groups > 0 == text.num_attention_heads % groups,
)
FULL_ATTENTION = Limit(
    'null, or "full_attention" in every layer', lambda kinds, _: set(kinds or ()) <= {"full_attention"}
)
LAYER_TYPES = Limit(
    '"full_attention", and "sliding_attention" where sliding_window is set',
    lambda kinds, text: (
        set(kinds) <= {"full_attention"} | ({"sliding_attention"} if text.sliding_window else set())
    ),
)
WINDOWS = {  # of text models whose layers may have a window; Transformers' config class reads the others
    "layer_types": LAYER_TYPES,
    "sliding_window": SIZE_OR_NULL,
    **dict.fromkeys(("use_sliding_window", "max_window_layers"), ANY),
}


def _width_of_tower(vision: Any) -> int:
    """The width that a tower's heads share; in Qwen2-VL, hidden_size belongs to the language model."""
    return getattr(vision, "embed_dim", None) or vision.hidden_size


def not_null(key: str, *rope_types: str) -> dict[str, Limit]:
    """Return the key of `rope_parameters`, which may be left out, but is not null in rules of these types."""

    def holds(value: Any, rule_and_text: Any) -> bool:
        rule = rule_and_text[0]
        is_needed = key in rule and (not rope_types or rule.get("rope_type") in rope_types)
        return not is_needed or (isinstance(value, int | float) and value > 0)

    where = f" where rope_type is {' or '.join(rope_types)}" if rope_types else ""
    return {key: Limit(f"a number above 0{where}", holds)}


# --- limits of all families --------------------------------------------------------------------------------

# of all parts; most classes do not have all of these fields, but Transformers' modelling code reads them
ASKED_FOR = {
    **{"is_causal": only(True), "output_attentions": only(False), "is_heterogeneous": only(False)},
    **{"return_dict": only(True), "chunk_size_feed_forward": only(0), "is_encoder_decoder": only(False)},
    **dict.fromkeys(("decoder", "generator", "text_encoder", "fusion_config"), only(None)),
    **dict.fromkeys(("transformers_weights", "distributed_config"), only(None)),
    **dict.fromkeys(("mlp_layer_types", "mtp_layer_types"), only(None)),
    # see `_outside_limits`; what is refused before, by weights; in rope_parameters
    **dict.fromkeys(("per_layer_config", "quantization_config"), ANY),
    **{"rope_theta": ANY, "partial_rotary_factor": ANY, "original_max_position_embeddings": NUMBER},
    # of other parts, compared, or looked for and not used
    **dict.fromkeys(("num_heads", "vision_feature_layer", "head_dim", "layer_types", "rope_parameters"), ANY),
    **dict.fromkeys(("tie_word_embeddings", "tie_last_hidden_states", "vocab_size"), ANY),
    "output_router_logits": ANY,
    # no field of SigLIP's config in Transformers 5.17, whose tower asks for it
    "vision_use_head": ANY,
    # `dtype` is the run's own setting, model.dtype
    **dict.fromkeys(("architectures", "auto_map", "dtype", "transformers_version", "name_or_path"), UNUSED),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "problem_type"), UNUSED),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), UNUSED),
    **dict.fromkeys(("output_hidden_states", "use_cache", "gradient_checkpointing"), UNUSED),
    **dict.fromkeys(("initializer_range", "initializer_factor", "init_std"), UNUSED),
    **dict.fromkeys(("vision_aspect_ratio", "vision_feature_select_strategy"), UNUSED),
}
COMMON: dict[str, dict[str, Limit]] = {
    "": {
        **dict.fromkeys(("image_token_index", "image_token_id"), TOKEN),  # two names of one key
        "projector_hidden_act": NAMED,
        # only the processor needs them
        **dict.fromkeys(("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"), UNUSED),
        **dict.fromkeys(("boa_token_id", "eoa_token_index", "image_seq_length"), UNUSED),
        **dict.fromkeys(("image_start_token_id", "image_end_token_id"), UNUSED),
        **dict.fromkeys(("vision_start_token_id", "vision_end_token_id"), UNUSED),
    },
    "text_config": {
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"), SIZE),
        **{"num_attention_heads": SIZE, "num_key_value_heads": GROUPS, "head_dim": EVEN},
        **{"pad_token_id": PADDING, "hidden_act": ACTIVATION, "layer_types": FULL_ATTENTION},
        **{"text_config": only(None), "attention_dropout": NO_DROPOUT},
        **{"max_position_embeddings": ANY, "pretraining_tp": UNUSED},
    },
    # The towers are Transformers' own modules, which read their keys themselves
    "vision_config": {
        **dict.fromkeys(("hidden_size", "intermediate_size", "depth", "out_hidden_size"), SIZE),
        **dict.fromkeys(("num_attention_heads", "num_heads"), HEADS_OF_TOWER),
        **{"head_dim": SIZE_OR_NULL, "hidden_act": NAMED, "spatial_merge_size": SIZE},
        **dict.fromkeys(("text_config", "layer_types"), only(None)),
        **dict.fromkeys(("image_size", "patch_size", "temporal_patch_size"), NUMBER),
        **dict.fromkeys(("num_channels", "in_channels"), COLOURS),
        **dict.fromkeys(("attention_dropout", "hidden_dropout_prob", "projection_dropout"), NO_DROPOUT),
    },
}
# The rules' other keys, such as `beta_fast`, go to Transformers' own functions, which we call
ROPE = {
    "rope_type": only("default", "linear", "llama3", "yarn"),
    "partial_rotary_factor": Limit(
        '1, or any where rope_type is "default", which ignores it',
        lambda factor, rule_and_text: (
            rule_and_text[0].get("partial_rotary_factor", 1) == 1
            or rule_and_text[0].get("rope_type") == "default"
        ),
    ),
    **not_null("rope_theta"),
    **not_null("factor", "linear", "llama3", "proportional"),
    **not_null("original_max_position_embeddings", "llama3", "yarn"),
    **not_null("low_freq_factor", "llama3"),
    **not_null("high_freq_factor", "llama3"),
}
