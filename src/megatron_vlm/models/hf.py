"""The only way to Hugging Face checkpoints: config, processor, model. Code in a checkpoint is never run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateSyntaxError
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoProcessor, ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_vlm.config import ConfigError, DataConfig
from megatron_vlm.data.encode.chat_template import set_chat_template
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.data.image_processors.base import set_image_options
from megatron_vlm.inputs import attribute_errors_to, unparsable_files, unreadable_files
from megatron_vlm.messages import join_lines
from megatron_vlm.models.families import describe
from megatron_vlm.models.weights.files import are_tied
from megatron_vlm.overrides import read_template
from megatron_vlm.supported import CONFIG_FILE, missing_weights, read_config, resolve

if TYPE_CHECKING:
    from torch import dtype
    from transformers import PreTrainedConfig, PreTrainedModel

    from megatron_vlm.batch import DataNeeds
    from megatron_vlm.models.description import Description
    from megatron_vlm.models.weights.rules import WeightMap

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be trained, and what its config.json and its weights say about the model."""

    folder: Path
    description: Description
    data: DataConfig = field(default_factory=DataConfig)  # its chat template, if that is not the checkpoint's

    @cached_property
    def processor(self) -> ProcessorMixin:
        """The checkpoint's processor. Raises FileNotFoundError if there is none."""
        return load_processor(self.folder, self.data)

    @property
    def own_template(self) -> str | None:
        """The run's chat template, with its values; None if it is the checkpoint's."""
        is_own = self.data.chat_template or self.data.chat_template_kwargs
        return self.processor.chat_template if is_own else None

    @cached_property
    def needs(self) -> DataNeeds:
        """The model's needs of its data, for the outputs of this checkpoint's processor."""
        return replace(self.description.data_needs, of_processor=get_image_spec(self.processor).unpad)

    @property
    def weight_map(self) -> WeightMap:
        return self.description.weight_map


@attribute_errors_to("path")
def open_source(path: str | Path, tied: bool | None = None, data: DataConfig | None = None) -> Source:
    """The checkpoint of a folder or hub name. If it cannot be trained, config.json is enough to refuse it.

    Its output layer is the embedding if `weights.files` says so, or `tied` if a run has settled it. Its
    processor has the chat template of `data`. Raises ConfigError, ValueError or FileNotFoundError. A
    collective if processes have joined.
    """
    description = describe(load_config(path))
    folder = resolve(path)
    if tied is None:
        tied = are_tied(description.weight_map, folder)
    description.hf_config.tie_word_embeddings = tied
    return Source(folder, description, data or DataConfig())


def load_config(path: str | Path) -> PreTrainedConfig:
    """Transformers' config from what `supported.read_config` lets pass; no other file is read."""
    return as_hf_config(read_config(path), path)


def as_hf_config(config: dict[str, Any], path: str | Path) -> PreTrainedConfig:
    """Transformers' config from what the config.json at `path` holds. Raises ConfigError if it refuses it."""
    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(config)
    except (StrictDataclassError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"checkpoint {path}: Transformers refuses its {CONFIG_FILE} ({type(error).__name__}: "
            f"{reason}); correct it or download it again."
        ) from error


@attribute_errors_to("path")
def look_at(path: str | Path) -> tuple[Description, str | None]:
    """(description, what was assumed about the weights), without fetching any weights; for `plan`."""
    description = describe(load_config(path))
    hf_config = description.hf_config
    if Path(path).is_dir() and not missing_weights(Path(path)):
        hf_config.tie_word_embeddings = are_tied(description.weight_map, Path(path))
    elif hf_config.tie_word_embeddings:
        return description, (
            "Assumed, as the weights were not read: the output layer is the embedding, which config.json "
            "does not deny. If they hold another one, the model has "
            f"{hf_config.text_config.vocab_size * hf_config.text_config.hidden_size:,} parameters more."
        )
    return description, None


@attribute_errors_to("folder")
def load_processor(folder: str | Path, data: DataConfig | None = None) -> ProcessorMixin:
    """The checkpoint's processor, with its chat template or the one that `data` sets. Raises
    FileNotFoundError if there is none, and ConfigError that names a damaged file or the line of a template
    that is none."""
    problems = list(unreadable_files(Path(folder)))
    # without these files, Transformers would make an empty tokenizer
    if not any((Path(folder) / name).is_file() for name in TOKENIZERS):
        names = " or ".join(TOKENIZERS)
        problems.append(f"checkpoint {folder} has no tokenizer ({names}); copy the original one.")
    if problems:
        raise ConfigError(join_lines(problems))
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        for problem in unparsable_files(Path(folder)):
            raise ConfigError(problem) from error
        raise FileNotFoundError(
            f"checkpoint {folder}: no processor that Transformers knows ({_first_line(error)}); "
            "put the files of its processor and tokenizer there."
        ) from error
    except ImportError as error:  # it names the package
        raise ConfigError(f"checkpoint {folder}: {_first_line(error)}") from error
    except Exception as error:
        for problem in unparsable_files(Path(folder)):
            raise ConfigError(problem) from error
        frames = [frame.filename for frame in extract_tb(error.__traceback__)]
        files = "*tokenizer*.json" if "tokenization" in str(frames) else "*processor_config.json"
        error.reading = sorted(Path(folder).glob(files))
        raise
    if not isinstance(processor, ProcessorMixin):
        raise FileNotFoundError(
            f"checkpoint {folder}: it has a {type(processor).__name__} and no processor; put its "
            "processor_config.json or preprocessor_config.json there."
        )
    get_image_spec(processor)  # reads its settings
    data = data or DataConfig()
    own_template = read_template(data.chat_template) if data.chat_template else None
    templates = own_template or processor.chat_template or processor.tokenizer.chat_template or {}
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            render_jinja_template([], chat_template=template)
        except TemplateSyntaxError as error:
            place = f"checkpoint {folder}: line {error.lineno} of its chat template"
            remedy = "correct chat_template.jinja there, or download it again"
            if own_template:
                place = f"data.chat_template: line {error.lineno}"
                remedy = "correct it"
            raise ConfigError(f"{place} is not Jinja ({_first_line(error)}); {remedy}.") from error
    if data.image_processor_kwargs:
        set_image_options(processor, data.image_processor_kwargs)
    if own_template or data.chat_template_kwargs:
        set_chat_template(processor, own_template, data.chat_template_kwargs)
    return processor


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@attribute_errors_to("folder")
def load_model(folder: Path, dtype: dtype | str = "auto") -> PreTrainedModel:
    """Transformers' own model with the checkpoint's weights, in eval mode; "auto": in the config's dtype.

    Raises ConfigError for a weight that is missing or has another shape: Transformers would draw it.
    """
    model, loading_info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True
    )
    problems = [f"{name} is missing" for name in loading_info["missing_keys"]]
    for name, stored, expected in loading_info["mismatched_keys"]:
        problems.append(f"{name} is {tuple(stored)}, and config.json asks for {tuple(expected)}")
    if problems:
        raise ConfigError(f"checkpoint {folder}: {min(problems)}; download it again.")
    return model.eval()
