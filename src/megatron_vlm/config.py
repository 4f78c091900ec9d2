"""A run's configuration: plain dataclasses, no torch. See `recipes/` for functions that return one and
`validate` for what can be wrong with it.

A setting has its dotted key, such as `train.steps`, as its name everywhere: overrides, YAML files and errors.
The rule that its value keeps by itself is a part of its type, which pydantic reads (`overrides.fit_to_type`).
Rules over several settings are in `validate`.
"""

import os
import re
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from math import lcm
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, Field

EPOCH = "epoch"
PROFILE_WARM_UP = 3  # steps before those that `--profile` records: they allocate and choose kernels
MISSING = "???"  # a setting without a default
MOST = 2**63 - 1


def as_path(text: str) -> str:
    """The path without quotes that a shell left, with the home folder in place of `~`: a shell expands only
    words that begin with it."""
    quoted = len(text) > 2 and text[0] == text[-1] and text[0] in "\"'"
    path = os.path.expanduser(text[1:-1] if quoted else text)
    if path.startswith("~"):
        raise ValueError(f"{path}: there is no such user; write the path out.")
    return path


def seconds_in(time: str) -> float:
    """The seconds of a time such as 3h50m, 1d12h, 90s or 90. Raises ValueError for anything else."""
    parts = re.fullmatch(
        r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", str(time)
    )
    if not parts or not any(parts.groups()):
        raise ValueError(f"{time} is no time; write it as 3h50m, 90s or a number of seconds.")
    units = (86_400, 3600, 60, 1)
    return sum(float(count or 0) * unit for count, unit in zip(parts.groups(), units, strict=True))


def as_time(text: str) -> str:
    """The text, if it is a time of a second or more."""
    if seconds_in(text) < 1:
        raise ValueError(f"{text} is less than a second.")
    return text


FromZero = Annotated[int, Ge(0), Le(MOST)]
FromOne = Annotated[int, Ge(1), Le(MOST)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
PartialShare = Annotated[float, Ge(0), Lt(1)]
Seconds = Annotated[float, Ge(1), Le(86_400)]
Time = Annotated[str, AfterValidator(as_time)]
Name = Annotated[str, MinLen(1)]
UsersName = Annotated[str, Field(pattern=r"^.+:\w+$")]  # FILE.py:NAME or package.module:NAME
PathName = Annotated[Name, AfterValidator(as_path)]
# a path or a list of paths, see `data.on_disk.paths`
DataPaths = PathName | Annotated[list[PathName], MinLen(1)]
Every = FromZero | Literal["epoch"]  # a number of steps, or epoch
Names = Name | Annotated[list[Name], MinLen(1)]
ModuleNames = Name | list[Name] | None  # a regex or a list of names
BoxFormat = Literal[  # the names of `extras.grounding.convention`
    *("bbox_2d_pixels", "bbox_2d", "box_2d", "box_tokens", "ref_box", "begin_of_box"),
    *("pixels", "thousandths", "shares"),
]
TemplateValue = Annotated[int | float | bool | str, Field(union_mode="left_to_right")]
Parts = list[Literal["tower", "projector", "language_model"]]


class ConfigError(ValueError):
    """The configuration cannot be used as written; the message says where and what to change."""


@dataclass
class ModelConfig:
    hf_path: PathName = MISSING  # folder or hub name of the Hugging Face checkpoint to start from
    load_weights: bool = True  # False: random weights from the config alone
    dtype: Literal["bf16", "fp32"] = "bf16"  # parameters and activations; Adam is fp32
    freeze: Parts = field(default_factory=list)
    # "dense": the reference, with a mask over all pairs of tokens; "documents": plain PyTorch, one document
    # at a time; "flash", "cudnn": kernels for CUDA in bf16; "auto": the fastest here, by measurement on CUDA
    attention: Literal["auto", "dense", "documents", "flash", "cudnn"] = "auto"
    # what may go on without its kernel for CUDA, slower, where a check before the run finds that one wrong;
    # for anything else the run ends then
    fallbacks: list[Literal["attention", "towers", "fused", "delta_nets", "weight_gradients"]] = field(
        default_factory=list
    )
    # activation recomputation: "selective" (outputs of norms and gates) or "full" (layers, also the tower's)
    recompute: Literal["none", "selective", "full"] = "none"
    # with "full", how many of the language model's layers in each (virtual) pipeline stage, the first ones
    recompute_layers: FromZero | None = None  # None: all
    load_balancing: NotNegative | None = None  # weight of the load-balancing loss; None: as in the checkpoint


@dataclass
class AdapterConfig:
    """Low-rank adapters, the only parameters that are then trained: names and meanings of peft's LoraConfig.

    Modules are named as in Transformers, such as `model.language_model.layers.0.self_attn.q_proj`.
    """

    r: FromZero = 0  # rank; 0: no adapters, the model itself is trained
    lora_alpha: Positive = 8.0  # adapters are scaled by lora_alpha / r
    use_rslora: bool = False  # scaled by lora_alpha / sqrt(r)
    use_dora: bool = False  # trains the norms of the adapted weights' rows, too (arXiv 2402.09353)
    lora_dropout: PartialShare = 0.0  # share of an adapter's inputs that is left out in training
    # which linears have adapters: a list of ends of names, such as [q_proj, v_proj]; a regex for whole names;
    # "all-linear" for tower, projector and language model; None: all of the language model
    target_modules: ModuleNames = None
    exclude_modules: ModuleNames = None  # those of them that have none; a list or a regex
    layers_to_transform: list[FromZero] = field(default_factory=list)  # numbers of layers; empty: all
    # names before a layer's number, as regexes; empty: the first number in a module's name is its layer's
    layers_pattern: list[Name] = field(default_factory=list)
    # parameters of routed experts with adapters: ends of names, [experts.gate_up_proj, experts.down_proj]
    target_parameters: list[Name] = field(default_factory=list)
    modules_to_save: list[Name] = field(default_factory=list)  # ends of names; these are trained whole
    rank_pattern: dict[str, FromOne] = field(default_factory=dict)  # regex of the end of a name: its own r
    alpha_pattern: dict[str, Positive] = field(default_factory=dict)  # and its own lora_alpha
    # folder of an adapter that peft wrote, to train on; it settles all the others
    start: PathName | None = None

    @property
    def used(self) -> bool:
        return self.r > 0 or self.start is not None


@dataclass
class ParallelConfig:
    tp: FromOne = 1  # tensor
    pp: FromOne = 1  # pipeline
    vpp: FromOne = 1  # virtual pipeline stages per rank (interleaved schedule)
    cp: FromOne = 1  # context
    ep: FromOne = 1  # expert; over the ranks of tensor and data parallelism
    sp: bool | None = None  # sequence parallel; None: on exactly when tp > 1
    tp_comm_overlap: bool = False  # linears of sequence parallelism exchange rows while they multiply
    distributed_optimizer: bool = True
    vision_dp: bool | None = None  # images of a micro batch spread over tp · cp ranks; None: if several

    @property
    def sequence_parallel(self) -> bool:
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def images_spread(self) -> bool:
        return self.tp * self.cp > 1 if self.vision_dp is None else self.vision_dp

    @property
    def model_size(self) -> int:
        """The number of processes that hold one copy of the model."""
        return self.tp * self.pp * self.cp


@dataclass
class DataConfig:
    # "hf": what `datasets` opens, JSON(L) of conversations, or a meta file that names several
    dataset_type: Literal["energon", "hf"] = "energon"
    train_data_path: DataPaths = MISSING  # samples of several paths are mixed
    # None: the validation split of train_data_path, if it has one; [charts=a.jsonl,…] gives valid_loss/charts
    valid_data_path: DataPaths | None = None
    # conversations that `train.score_every` asks, of dataset_type hf; None: the validation data
    score_path: PathName | None = None
    # share of the training rows that are held out for validation, chosen by their keys; for dataset_type hf
    validation_share: PartialShare = 0.0
    columns: dict[str, Name] = field(default_factory=dict)  # our name: the source's, such as images: pictures
    # FILE.py:NAME of your own, see docs/how-to/extend.md: a record as it is stored → a record
    parser: UsersName | None = None
    cooker: UsersName | None = None  # of energon: the parts of a sample → a record
    sample_loader: UsersName | None = None  # of energon: the parts → the fields of the dataset's sample type
    datasets: list[Name] = field(default_factory=list)  # names to read from a meta file; empty: all
    media_dir: PathName | None = None  # folder of all media paths; None: the source's own folder
    streaming: bool = False  # read training rows as a stream from a hub or a store; none is written to disk
    seq_length: FromOne = 4096  # most tokens in a row
    train_replies: Literal["all", "last"] = "all"  # "last": that of each conversation alone
    # a Jinja file, or the text itself, which a run keeps; None: the checkpoint's own template
    chat_template: Name | None = None
    # values by the names that the template reads, such as enable_thinking: false
    chat_template_kwargs: dict[str, TemplateValue] = field(default_factory=dict)
    # of each call of the image processor, as Transformers takes them, such as do_pan_and_scan: true
    image_processor_kwargs: dict[str, TemplateValue] = field(default_factory=dict)
    # in replies: "keep" it as the template writes it, "mask" it (read, not trained), or "drop" it
    thinking: Literal["keep", "mask", "drop"] = "keep"
    # how boxes of a record's `objects` are written; None: as the model's family does (docs/how-to/boxes.md)
    box_format: BoxFormat | None = None
    over_length: Literal["drop", "truncate"] = "drop"  # "drop" the sample, or "truncate" it to whole images
    min_pixels: FromOne | None = None
    max_pixels: FromOne | None = None
    # sizes that an image has, another each epoch, drawn between min_pixels and max_pixels; 0: its own
    resize_jitter: FromZero = 0
    video_fps: Positive = 2.0  # frames taken per second of video
    video_max_frames: FromOne = 128  # most frames of a video; in a longer one they are further apart
    video_max_pixels: FromOne | None = None  # larger frames are scaled before the processor sees them
    visual_share: Share = 0.5  # assumed share of image tokens in a row: balances the pipeline's first stage
    decode_seconds: Positive = 60.0  # a sample with media that take longer to decode is dropped
    # The run stops if a larger share of the samples is dropped, judged after 100 samples or, if an epoch has
    # fewer rows, over whole epochs. 0: at the first drop; 1: when a whole epoch gives nothing to train on.
    max_drop_share: Share = 0.05
    num_workers: FromZero = 2
    # "none": one sample per row; "stream": rows of seq_length packed from a buffer; "global": packed from all
    # samples after measuring their lengths (`tools/precompute_tokens.py`), with rows of equal cost in a step
    packing: Literal["none", "stream", "global"] = "none"
    packing_buffer_size: FromOne = 1000  # samples that "stream" packs at a time; a worker holds their images
    max_patches: FromOne | None = None  # most raw patches of images in a packed row; None: no limit
    group_by_length: bool = False  # without packing: samples of similar length share a step
    lengths_cache: PathName | None = None  # folder of measured lengths; None: one in the user's cache
    shuffle_buffer_size: FromZero = 1000
    max_samples_per_sequence: FromOne = 100
    restart: bool = False  # a resumed run begins its data again, with samples that it has seen


@dataclass
class OptimizerConfig:
    lr: NotNegative = 1e-5
    min_lr: NotNegative = 0.0
    # how the learning rate goes on after its warm-up; "wsd" is constant before it falls, in a line
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay_ratio: PositiveShare = 0.1  # of "wsd": the last share of the run, in which it falls to min_lr
    warmup_steps: FromZero | None = 0  # None: a tenth of the run, at most 50
    warmup_ratio: PartialShare | None = None  # in place of warmup_steps: a share of the run
    weight_decay: NotNegative = 0.0
    beta1: PartialShare = 0.9
    beta2: PartialShare = 0.95
    eps: Positive = 1e-8
    clip_grad: NotNegative = 1.0
    # False: gradients of a model in bf16 are added up and reduced in bf16, in half the memory and traffic
    reduce_in_fp32: bool = True
    # what Adam keeps lies in host memory, and comes to the device piece by piece when it is updated
    offload: bool = False
    # in place of `lr` and `weight_decay` for a part ("tower", "projector", "language_model", "adapters"), or
    # for what a pattern finds in the names of HF tensors and adapters; `min_lr` is then less in proportion
    lr_by_part: dict[str, Positive] = field(default_factory=dict)
    weight_decay_by_part: dict[str, NotNegative] = field(default_factory=dict)

    @property
    def by_part(self) -> dict[str, dict[str, float]]:
        """The settings that differ by part, each by its name."""
        settings = {"lr_by_part": self.lr_by_part, "weight_decay_by_part": self.weight_decay_by_part}
        return {f"optimizer.{name}": values for name, values in settings.items()}


@dataclass
class TrainConfig:
    steps: FromOne | None = 1000  # None: as many as `epochs` make
    # in place of `steps`: how often the training data is passed over
    epochs: Annotated[float, Gt(0), Le(1_000_000)] | None = None
    micro_batch_size: FromOne = 1
    global_batch_size: FromOne = 32
    seed: FromZero = 1234
    # only algorithms that give the same bits in every run; on a CPU all do
    deterministic: bool = False
    eval_every: Every = 0  # steps between validations, or "epoch": after each epoch; 0: none
    eval_steps: FromZero = 0  # validation steps; 0: the whole validation split
    save_every: Every = 0  # steps between checkpoints, or "epoch"; 0: only at the end
    async_save: bool = True  # a checkpoint is written while training goes on; False: training waits for it
    keep_checkpoints: FromOne = 2
    # keep the best one, too, by `best_by`; each save then validates or scores first
    keep_best: bool = False
    # a figure of validations or scores, such as valid_loss/charts or score/anls; of any other kind, with what
    # is better: max:valid_accuracy, min:NAME
    best_by: Name = "valid_loss"
    patience: FromZero = 0  # the run ends after so many validations or scores without a better one; 0: never
    score_every: Every = 0  # steps between scores of answers, or "epoch"; 0: none
    score_metric: Names = "exact_match"
    score_samples: FromOne = 100  # questions; the same ones each time
    score_tokens: FromOne = 64  # of the longest answer
    export_every: Every = 0  # steps between Hugging Face folders in run_dir/exports, or "epoch"; 0: none
    # a command that is started for each of these folders, with the folder as its last word; numbers in a JSON
    # object on the last line that it prints are figures of the run, on_export/NAME
    on_export: Name | None = None
    upload_to: PathName | None = None  # s3:// or msc://: checkpoints and exports are copied there, too
    # if no rank makes progress for this time, the job ends and writes all stacks
    hang_seconds: Seconds = 480.0
    # when the command has run for so long, it saves and ends with exit code 75; the same command goes on
    stop_after: Time | None = None
    # what to do when loss or gradient norm jump (see `Spikes`): say it, leave out the step, or end the run
    on_spike: Literal["warn", "skip", "stop"] | None = None
    # FILE.py:CLASS of your own, see docs/how-to/extend.md
    callbacks: Name | list[Name] = field(default_factory=list)
    # "tokens"; "dpo" (preference pairs), "grpo" (rewards): docs/how-to/preferences.md; FILE.py:NAME: own loss
    objective: str = "tokens"
    rewards: UsersName | list[UsersName] = field(default_factory=list)  # of grpo: TRL's `reward_funcs`
    dpo_beta: Positive = 0.1  # how much a model may leave the starting weights; less leaves them further

    @property
    def best_figure(self) -> tuple[str, bool | None]:
        """The name in `best_by`, and whether more of it is better; None: its kind says so."""
        way, colon, name = self.best_by.partition(":")
        return (name, way == "max") if colon and way in ("min", "max") else (self.best_by, None)

    @property
    def reward_names(self) -> list[str]:
        return [self.rewards] if isinstance(self.rewards, str) else self.rewards

    @property
    def best_is_score(self) -> bool:
        return self.best_figure[0].startswith("score/")


@dataclass
class GRPOConfig:
    """The settings of `train.objective=grpo`, with names and meanings of TRL's GRPOConfig. A step has
    `train.global_batch_size` prompts."""

    num_generations: Annotated[int, Ge(2), Le(MOST)] = 8  # answers to each prompt
    max_completion_length: FromOne = 512  # tokens of the longest answer
    temperature: Positive = 1.0
    top_p: PositiveShare = 1.0
    beta: NotNegative = 0.0  # weight of the divergence from the starting weights; 0: without it
    epsilon: Annotated[float, Gt(0), Lt(1)] = 0.2  # how far a token's ratio may leave 1 before it is clipped
    epsilon_high: Positive | None = None  # the same above 1; None: as epsilon (DAPO: 0.28)
    delta: Annotated[float, Gt(1)] | None = (
        None  # the largest ratio that counts where an advantage is below 0
    )
    # the mean over answers of each one's mean ("grpo"), over all tokens ("dapo"), or a constant in its place
    # ("dr_grpo", which goes with scale_rewards=none)
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    # advantages are divided by the deviation of a prompt's rewards, of all rewards of the step, or not
    scale_rewards: Literal["group", "batch", "none"] = "group"
    # of each of train.rewards in their sum; None: 1
    reward_weights: Annotated[list[Number], MinLen(1)] | None = None
    mask_truncated_completions: bool = False  # answers that reached max_completion_length train nothing
    num_iterations: FromOne = 1  # how often a step trains its answers
    steps_per_generation: FromOne = 1  # optimizer steps into which the answers of a step are divided
    # FILE.py:NAME of an engine in place of the model itself (docs/how-to/preferences.md)
    engine: UsersName | None = None


@dataclass
class LoggingConfig:
    log_every: FromOne = 1
    tensorboard: bool = True
    wandb_project: Name | None = None
    # further ones, FILE.py:CLASS of your own among them
    trackers: list[Literal["csv", "mlflow"] | UsersName] = field(default_factory=list)
    report: bool = True  # write run_dir/report.html, again and again while the run goes on


@dataclass
class RunConfig:
    """Everything that determines a run. `run_dir` is its folder, from which it also resumes."""

    name: Name = "run"
    run_dir: PathName = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def frozen(self) -> list[str]:
        """The parts of the model whose own weights are not trained."""
        return ["tower", "projector", "language_model"] if self.adapter.used else self.model.freeze


@cache
def setting_types(cls: type = RunConfig, prefix: str = "") -> dict[str, Any]:
    """The type of every setting, with its rules, by its dotted key and in the order of the dataclasses."""
    types = {}
    for name, kind in get_type_hints(cls, include_extras=True).items():
        types |= setting_types(kind, f"{prefix}{name}.") if is_dataclass(kind) else {f"{prefix}{name}": kind}
    return types


def all_settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of every setting by its dotted key, in the order of the dataclasses."""
    settings = {}
    for f in fields(config):
        value = getattr(config, f.name)
        settings |= (
            all_settings(value, f"{prefix}{f.name}.") if is_dataclass(value) else {prefix + f.name: value}
        )
    return settings


def missing_settings(config: RunConfig) -> list[str]:
    """The settings that have no default and were not given."""
    return [key for key, value in all_settings(config).items() if value == MISSING]


def derived(config: RunConfig, world_size: int | None = None) -> dict[str, int | bool]:
    """Numbers that follow from a valid configuration; `world_size` None: for the fewest processes."""
    parallel = config.parallel
    train = config.train
    world_size = world_size or fewest_processes(parallel)
    data_parallel = world_size // parallel.model_size
    return {
        "processes": world_size,
        "data_parallel": data_parallel,
        "sequence_parallel": parallel.sequence_parallel,
        "micro_batches_per_step": train.global_batch_size // (train.micro_batch_size * data_parallel),
        "most_tokens_per_micro_batch": train.micro_batch_size * config.data.seq_length,
        "most_tokens_per_step": train.global_batch_size * config.data.seq_length,
    } | ({} if train.steps is None else {"rows_over_all_steps": train.global_batch_size * train.steps})


def fewest_processes(parallel: ParallelConfig) -> int:
    """The smallest number of processes for the layout."""
    return lcm(parallel.model_size, parallel.pp * parallel.ep)
