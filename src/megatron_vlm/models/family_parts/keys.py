"""Which keys of config.json a family knows, section by section, and the refusal of every other value.

A field of Transformers' config class is read, has no effect on what is trained, or must keep its default.
Transformers ignores keys that are not fields, and so do we. A few of them its modelling code does read: these
are declared here like fields.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from transformers.activations import ACT2FN

from megatron_vlm.messages import join_lines, shorten

NAMES = ("", "text_config", "vision_config")  # of the sections of config.json; "" is its top level


@dataclass(frozen=True)
class Values:
    """The supported values of a key: in words, and as a test of (value, the key's section of the config)."""

    words: str
    test: Callable[[Any, Any], bool]

    def holds(self, value: Any, section: Any) -> bool:
        """Whether the value is supported; none is that has no length, or divides nothing, where it must."""
        try:
            return self.test(value, section)
        except (TypeError, ArithmeticError, LookupError, AttributeError):
            return False


@dataclass(frozen=True)
class Section:
    """One section of config.json: which keys a family reads, and which have no effect.

    `reads` and `no_effect` may name keys that only some versions of Transformers have. `rope` are the keys of
    `rope_parameters`; their tests get (value or None, (the rule, the section)).
    """

    model_types: tuple[str, ...]
    reads: dict[str, Values]
    no_effect: tuple[str, ...] = ()
    rope: dict[str, Values] = field(default_factory=dict)
    rope_by_layer: bool = False  # `rope_parameters` has a rule for each type of layer
    by_layer: tuple[str, ...] = ()  # keys of which each type of layer may have its own value

    def known_keys(self) -> set[str]:
        """The keys that may differ from the default."""
        return {*self.reads, *self.no_effect, *NO_EFFECT, *ASKED_FOR, *NAMES}

    def fixed(self, config: Any) -> dict[str, Any]:
        """The fields of the config's class that must keep their default, with that default."""
        default = type(config)()
        names = [each.name for each in fields(config)]
        return {name: getattr(default, name) for name in names if name not in self.known_keys()}


Sections = tuple[tuple[Section, ...], ...]  # for each of NAMES those that a checkpoint may have there


def sections(*choices: Section | Sequence[Section]) -> Sections:
    """For each of NAMES the only section that a checkpoint of the family has there, or those it may have."""
    return tuple((each,) if isinstance(each, Section) else tuple(each) for each in choices)


def section_for(choices: Sequence[Section], model_type: str) -> Section | None:
    """The one for this `model_type`; None if the family has none."""
    return next((each for each in choices if model_type in each.model_types), None)


def check(model_type: str, sections: Sections, hf_config: Any) -> None:
    """Raises one ValueError that names every key whose value the family does not support."""
    lines = []
    for name, choices in zip(NAMES, sections, strict=True):
        config, prefix = (getattr(hf_config, name), f"{name}.") if name else (hf_config, "")
        section = section_for(choices, config.model_type)
        problems = _problems(section, config) if section else [_unknown(choices, config)]
        lines += [f"  {prefix}{problem}" for problem in problems]
    if lines:
        fact = f"config.json of this {model_type} checkpoint asks for what is not supported:"
        remedy = "The trained model would not be Transformers'; docs/configs.md lists what is supported."
        raise ValueError(join_lines([fact, *lines, remedy]))


def drop_unknown_keys(sections: Sections, whole: Any) -> Any:
    """Return a copy of the config without the keys that Transformers does not read, whatever their names.

    What stays are the attributes that the sections' classes have, and the keys that the family declares.
    """
    whole = deepcopy(whole)
    for name, choices in zip(NAMES, sections, strict=True):
        config = getattr(whole, name) if name else whole
        declared = section_for(choices, config.model_type).known_keys()
        for key in vars(config).keys() - vars(type(config)()).keys() - declared:
            if not key.startswith("_"):
                del vars(config)[key]
    return whole


def values_read(sections: Sections, whole: dict[str, Any]) -> dict[str, Any]:
    """The values of all keys that a family reads, by dotted name, of a whole config as JSON data.

    With them is the version of Transformers, whose defaults are among them. Models for which `check` passes
    differ in these values alone.
    """
    found = {"transformers_version": whole["transformers_version"]}
    for name, choices in zip(NAMES, sections, strict=True):
        values, prefix = (whole[name], f"{name}.") if name else (whole, "")
        reads = ASKED_FOR | section_for(choices, values["model_type"]).reads
        found |= {f"{prefix}{key}": values[key] for key in reads if key in values}
    return found


def _unknown(choices: Sequence[Section], config: Any) -> str:
    known = [name for each in choices for name in each.model_types]
    return _problem("model_type", config.model_type, only(*known).words)


def _problems(section: Section, config: Any) -> Iterator[str]:
    if getattr(config, "is_heterogeneous", False):  # reading such a config's keys raises
        if not _differs_by_type(section, config):
            by_type = f"null, or {' and '.join(section.by_layer)} of each of layer_types"
            yield _problem("per_layer_config", "given", by_type if section.by_layer else "null")
            return
        found = [_problems(section, config.per_layer_config[kind]) for kind in set(config.layer_types)]
        yield from dict.fromkeys(problem for each in found for problem in each)
        return
    for key, values in (ASKED_FOR | section.reads).items():
        if hasattr(config, key) and not values.holds(getattr(config, key), config):
            yield _problem(key, getattr(config, key), values.words)
    for key, default in section.fixed(config).items():
        if getattr(config, key) != default:
            yield _problem(key, getattr(config, key), as_json(default))
    yield from _rope_problems(section, config)


def _differs_by_type(section: Section, config: Any) -> bool:
    """Whether all layers of one type are alike, and types differ in keys of `Section.by_layer` alone."""
    layers = [vars(layer) for layer in config.per_layer_config]
    if not (section.by_layer and layers):
        return False
    first = dict(zip(reversed(config.layer_types), reversed(layers), strict=True))
    own = {key for layer in layers for key in layer if layer[key] != layers[0].get(key)}
    alike = all(layer == first[kind] for kind, layer in zip(config.layer_types, layers, strict=True))
    return alike and own <= set(section.by_layer) and not layers[0]["skip"]


def _rope_problems(section: Section, config: Any) -> Iterator[str]:
    rules = getattr(config, "rope_parameters", None)
    if not section.rope_by_layer:
        rules = {"": rules}
    elif without := [kind for kind in sorted(set(config.layer_types)) if not rules.get(kind)]:
        yield _problem(f"rope_parameters.{without[0]}", None, "a rule for each of layer_types")
    for kind, rule in rules.items():
        prefix = "rope_parameters." + (f"{kind}." if kind else "")
        if not isinstance(rule, dict):
            continue
        for key, values in (section.rope or not_null("rope_theta")).items():
            if not values.holds(rule.get(key), (rule, config)):
                yield _problem(prefix + key, rule.get(key), values.words)


def _problem(key: str, value: Any, supported: str) -> str:
    return f"{key} is {as_json(value)}; supported: {supported}"


def as_json(value: Any) -> str:
    """The value as in config.json, shortened if it is long."""
    return shorten(json.dumps(value, default=str, ensure_ascii=False))


# --- values ------------------------------------------------------------------------------------------------

ANY = Values("any", lambda value, section: True)
ABSENT = Values("no value, not even null", lambda value, section: False)
NUMBER = Values("a number", lambda value, section: isinstance(value, int | float))
SIZE = Values("above 0, and less than 2^31", lambda size, section: 0 < size < 2**31)
SIZE_OR_NULL = Values("above 0, or null", lambda size, section: size is None or 0 < size < 2**31)


def sizes(*keys: str) -> dict[str, Values]:
    return dict.fromkeys(keys, SIZE)


def only(*values: Any) -> Values:
    return Values(" or ".join(map(as_json, values)), lambda value, section: value in values)


def any_of(*keys: str) -> dict[str, Values]:
    return dict.fromkeys(keys, ANY)


ACTIVATION = Values(
    "the names of Transformers' activations that have no weights",
    lambda name, section: name in ACT2FN and not [*ACT2FN[name].parameters()],
)
# of models whose rotary embedding reads `head_dim` in Transformers, and whose attention does not
WHOLE_HEADS = Values(
    "hidden_size / num_attention_heads",
    lambda width, text: width in (None, text.hidden_size // text.num_attention_heads),
)
NAMED = Values("the names of Transformers' activations", lambda name, section: name in ACT2FN)
TOKEN = Values(  # of the whole model's section
    "a token of the vocabulary",
    lambda token, whole: isinstance(token, int) and 0 <= token < whole.text_config.vocab_size,
)
OTHER_TOKEN = Values(  # of videos or audio
    "a number that is not image_token_id",
    lambda token, whole: isinstance(token, int) and 0 <= token != whole.image_token_id,
)
VIDEO_TOKEN = Values(
    "a token of the vocabulary that is not image_token_id",
    lambda token, whole: TOKEN.holds(token, whole) and OTHER_TOKEN.holds(token, whole),
)
COLOURS = only(3)  # of pixels
HEADS_OF_TOWER = Values(
    "above 0, and a divisor of the tower's width where head_dim is not set",
    lambda heads, vision: (
        heads > 0 and (getattr(vision, "head_dim", None) or _width_of_tower(vision) % heads == 0)
    ),
)
EVEN = Values("even and above 0, or null", lambda width, text: width is None or width > 0 == width % 2)
GROUPS = Values(
    "a divisor of num_attention_heads, or null",
    lambda groups, text: groups is None or groups > 0 == text.num_attention_heads % groups,
)
FULL_ATTENTION = Values(
    'null, or "full_attention" in every layer', lambda kinds, _: set(kinds or ()) <= {"full_attention"}
)
LAYER_TYPES = Values(
    '"full_attention", and "sliding_attention" where sliding_window is set',
    lambda kinds, text: (
        set(kinds) <= {"full_attention"} | ({"sliding_attention"} if text.sliding_window else set())
    ),
)


def _width_of_tower(vision: Any) -> int:
    """The width that a tower's heads share; in Qwen2-VL, hidden_size belongs to the language model."""
    return getattr(vision, "embed_dim", None) or vision.hidden_size


# --- what sections have in common --------------------------------------------------------------------------

# `dtype` is the run's own setting, model.dtype
NO_EFFECT = (
    *("architectures", "auto_map", "dtype", "transformers_version", "name_or_path"),
    *("id2label", "label2id", "num_labels", "problem_type", "bos_token_id", "eos_token_id"),
    *("output_hidden_states", "use_cache", "gradient_checkpointing"),
    *("initializer_range", "initializer_factor", "init_std"),
    *("vision_aspect_ratio", "vision_feature_select_strategy"),
)
# Most classes do not have these fields, but Transformers' modelling code reads them
ASKED_FOR = {
    **{"is_causal": only(True), "output_attentions": only(False), "is_heterogeneous": only(False)},
    **dict.fromkeys(("decoder", "generator", "text_encoder", "fusion_config"), only(None)),
    **dict.fromkeys(("transformers_weights", "distributed_config"), only(None)),
    **dict.fromkeys(("mlp_layer_types", "mtp_layer_types"), only(None)),
    **any_of(
        "per_layer_config", "quantization_config"
    ),  # see `_problems`; what is refused before, by weights
    **any_of("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),  # in rope_parameters
    **any_of("num_heads", "vision_feature_layer"),  # compared, or looked for and not used
}
IMAGE_TOKEN = dict.fromkeys(("image_token_index", "image_token_id"), TOKEN)  # two names of one key
TOP = any_of("tie_word_embeddings", "head_dim", "layer_types", "rope_parameters")


def text(activation: str = "hidden_act") -> dict[str, Values]:
    """The keys that every language model reads; `activation` is the key of the activation function."""
    return {
        **sizes("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads"),
        **{"num_key_value_heads": GROUPS, "head_dim": EVEN},
        **any_of("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_parameters"),
        "pad_token_id": Values(
            "null, or a token of the vocabulary",
            lambda token, text: token is None or -text.vocab_size <= token < text.vocab_size,
        ),
        activation: ACTIVATION,
        "layer_types": FULL_ATTENTION,
        "text_config": only(None),
    }


# The towers are Transformers' own modules, which read their keys themselves
VISION = {
    **sizes("hidden_size", "intermediate_size"),
    "num_attention_heads": HEADS_OF_TOWER,
    "head_dim": SIZE_OR_NULL,
    **any_of("rope_parameters", "tie_word_embeddings", "vocab_size", "output_router_logits"),
    "hidden_act": NAMED,
    **dict.fromkeys(("text_config", "layer_types"), only(None)),
    **dict.fromkeys(("image_size", "patch_size"), NUMBER),
}


def not_null(key: str, *rope_types: str) -> dict[str, Values]:
    """Return the key of `rope_parameters`, which may be left out, but is not null in rules of these types."""

    def holds(value: Any, rule_and_text: Any) -> bool:
        rule = rule_and_text[0]
        is_needed = key in rule and (not rope_types or rule.get("rope_type") in rope_types)
        return not is_needed or (isinstance(value, int | float) and value > 0)

    where = f" where rope_type is {' or '.join(rope_types)}" if rope_types else ""
    return {key: Values(f"a number above 0{where}", holds)}


# The rules' other keys, such as `beta_fast`, go to Transformers' own functions, which we call
ROPE = {
    "rope_type": only("default", "linear", "llama3", "yarn"),
    "partial_rotary_factor": Values(
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
