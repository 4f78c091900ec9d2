"""A run's configuration: plain dataclasses, no torch. See `recipes/` for functions that return one and
`validate` for what can be wrong with it.

A setting has its dotted key, such as `train.steps`, as its name everywhere: overrides, YAML files and errors.
The rule that its value keeps by itself is a part of its type, which pydantic reads (`overrides.fit_to_type`).
Rules over several settings are in `validate`. The comment above a setting and beside it is its line in
docs/reference/settings.md (`tools/reference.py`).
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
    """The checkpoint, and how its model computes."""

    hf_path: PathName = MISSING  # Hugging Face checkpoint to start from: a folder, a hub name or s3://…
    load_weights: bool = True  # False: random weights, from config.json alone
    dtype: Literal["bf16", "fp32"] = "bf16"  # data type of parameters and activations; Adam's state is fp32
    freeze: Parts = field(default_factory=list)  # parts of the model that are not trained
    # "dense": the reference, with a mask over all pairs of tokens; "documents": plain PyTorch, one document
    # at a time; "flash", "cudnn", "flash4": kernels for CUDA in bf16, the last of the package flash-attn-4;
    # "auto": the fastest of them on this device
    attention: Literal["auto", "dense", "documents", "flash", "cudnn", "flash4"] = "auto"
    # parts that use slower code if the check before a run finds their CUDA kernel wrong; if another part's
    # kernel is wrong, the run ends
    fallbacks: list[Literal["attention", "towers", "fused", "delta_nets", "weight_gradients"]] = field(
        default_factory=list
    )
    # activations to compute again in the backward pass, to save memory: "selective" (outputs of norms and
    # gates) or "full" (layers, also the tower's)
    recompute: Literal["none", "selective", "full"] = "none"
    # with "full": recompute only the first layers of the language model in each (virtual) pipeline stage
    recompute_layers: FromZero | None = None  # None: all
    # weight of the experts' load-balancing loss; None: as in the checkpoint
    load_balancing: NotNegative | None = None


@dataclass
class AdapterConfig:
    """Low-rank adapters (LoRA), with names and meanings of peft's LoraConfig. Nothing else is then trained.

    Modules are named as in Transformers, such as `model.language_model.layers.0.self_attn.q_proj`.
    """

    r: FromZero = 0  # rank; 0: no adapters, the model itself is trained
    lora_alpha: Positive | None = None  # adapters are scaled by lora_alpha / r; None: 2 r
    use_rslora: bool = False  # scale adapters by lora_alpha / sqrt(r)
    use_dora: bool = False  # also train the norms of the adapted weights' rows (arXiv 2402.09353)
    lora_dropout: PartialShare = 0.0  # share of an adapter's inputs that is dropped in training
    # linears with adapters: a list of name endings, such as [q_proj, v_proj]; a regex for full names;
    # "all-linear" for tower, projector and language model; None: all linears of the language model
    target_modules: ModuleNames = None
    exclude_modules: ModuleNames = None  # linears to leave out of target_modules; a list or a regex
    # numbers of the layers with adapters; empty: all
    layers_to_transform: list[FromZero] = field(default_factory=list)
    # regexes of the name before a layer's number; empty: the first number in a module's name is the layer
    layers_pattern: list[Name] = field(default_factory=list)
    # parameters of routed experts with adapters, by name endings: [experts.gate_up_proj, experts.down_proj]
    target_parameters: list[Name] = field(default_factory=list)
    modules_to_save: list[Name] = field(default_factory=list)  # modules to train in full, by name endings
    rank_pattern: dict[str, FromOne] = field(default_factory=dict)  # rank by a regex of the name ending
    alpha_pattern: dict[str, Positive] = field(default_factory=dict)  # lora_alpha in the same way
    # folder of an adapter that peft wrote, to continue from; it sets all other adapter settings
    start: PathName | None = None

    @property
    def used(self) -> bool:
        return self.r > 0 or self.start is not None

    @property
    def alpha(self) -> float:
        """The numerator of the scale: `lora_alpha`, or 2 r."""
        return 2.0 * self.r if self.lora_alpha is None else self.lora_alpha


@dataclass
class ParallelConfig:
    """The layout. The processes that remain are data parallel."""

    tp: FromOne = 1  # tensor parallel size
    pp: FromOne = 1  # pipeline parallel size
    vpp: FromOne = 1  # virtual pipeline stages per rank (interleaved schedule)
    cp: FromOne = 1  # context parallel size
    ep: FromOne = 1  # expert parallel size, over the ranks of tensor and data parallelism
    sp: bool | None = None  # sequence parallelism; None: if tp > 1
    tp_comm_overlap: bool = False  # linears of sequence parallelism exchange rows while they multiply
    distributed_optimizer: bool = True  # divide Adam's state over the data parallel ranks
    vision_dp: bool | None = None  # spread images of a micro batch over the tp · cp ranks; None: if several

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
    """The training data, and how samples become rows."""

    # "hf": JSON(L) of conversations, datasets that `datasets` opens, or a meta file that names several
    dataset_type: Literal["energon", "hf"] = "energon"
    train_data_path: DataPaths = MISSING  # training data; samples of several paths are mixed
    # validation data; [charts=a.jsonl,…] gives valid_loss/charts; None: the validation split of
    # train_data_path, if it has one
    valid_data_path: DataPaths | None = None
    # questions and right answers for train.score_every, of dataset_type hf; None: the validation data
    score_path: PathName | None = None
    # share of the training samples that is held out for validation, by their keys; for dataset_type hf
    validation_share: PartialShare = 0.0
    # our name of a column: its name in the data, such as images: pictures
    columns: dict[str, Name] = field(default_factory=dict)
    # your function FILE.py:NAME: a record as it is stored → a record of ours
    parser: UsersName | None = None
    cooker: UsersName | None = None  # your function for Energon: the parts of a sample → a record of ours
    # your function for Energon: the parts of a sample → the fields of the dataset's sample type
    sample_loader: UsersName | None = None
    datasets: list[Name] = field(default_factory=list)  # names in a meta file to read; empty: all
    media_dir: PathName | None = None  # folder of relative media paths; None: the folder of the data
    streaming: bool = False  # read the training data as a stream, without writing it to disk
    seq_length: FromOne = 4096  # most tokens in a row, image tokens included
    train_replies: Literal["all", "last"] = "all"  # replies of a conversation to train
    # a Jinja file or its text, which is kept in the run folder; None: the checkpoint's template
    chat_template: Name | None = None
    # variables of the template, such as enable_thinking: false
    chat_template_kwargs: dict[str, TemplateValue] = field(default_factory=dict)
    # arguments of the image processor, as in Transformers, such as do_pan_and_scan: true
    image_processor_kwargs: dict[str, TemplateValue] = field(default_factory=dict)
    # thinking in replies: "keep" it as the template writes it, "mask" it (read, not trained), or "drop" it
    thinking: Literal["keep", "mask", "drop"] = "keep"
    # how boxes of a record's `objects` are written; None: as the model's family writes them
    box_format: BoxFormat | None = None
    over_length: Literal["drop", "truncate"] = "drop"  # a sample over seq_length: "drop" it, or "truncate" it
    min_pixels: FromOne | None = None  # smaller images are enlarged; None: no limit
    max_pixels: FromOne | None = None  # larger images are scaled down; None: no limit
    # how many random sizes an image has between min_pixels and max_pixels, one per epoch; 0: its own size
    resize_jitter: FromZero = 0
    video_fps: Positive = 2.0  # frames taken per second of video
    video_max_frames: FromOne = 128  # most frames of a video; of a longer one, frames further apart
    video_max_pixels: FromOne | None = None  # larger frames are scaled down before the processor gets them
    visual_share: Share = 0.5  # expected share of image tokens in a row; balances pipeline stages
    decode_seconds: Positive = 60.0  # a sample whose media take longer to decode is dropped
    # the run stops if a larger share of the samples is dropped, judged after 100 samples or, if an epoch has
    # fewer, over whole epochs; 0: at the first drop; 1: only if a whole epoch gives nothing to train on
    max_drop_share: Share = 0.05
    num_workers: FromZero = 2  # data worker processes per reading rank; 0: read in the training process
    # "none": one sample per row; "stream": rows of seq_length packed from a buffer; "global": packed from all
    # samples, whose lengths are measured first, with rows of equal cost in a step
    packing: Literal["none", "stream", "global"] = "none"
    packing_buffer_size: FromOne = 1000  # samples in the buffer of "stream", per worker
    max_patches: FromOne | None = None  # most image patches in a packed row; None: no limit
    group_by_length: bool = False  # without packing: samples of similar length share a step
    lengths_cache: PathName | None = None  # folder of measured lengths; None: one in the user's cache
    shuffle_buffer_size: FromZero = 1000  # samples in the shuffle buffer of a stream or of Energon
    max_samples_per_sequence: FromOne = 100  # Energon: samples read in sequence before a jump in the shard
    restart: bool = False  # a resumed run starts its data from the beginning, with samples it has seen


@dataclass
class OptimizerConfig:
    """AdamW and the learning rate."""

    lr: NotNegative = 1e-5  # peak learning rate
    min_lr: NotNegative = 0.0  # learning rate at the last step, except with "constant"
    # schedule after the warm-up; "wsd" is constant, then falls linearly
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay_ratio: PositiveShare = 0.1  # of "wsd": the share of the run in which it falls to min_lr
    warmup_steps: FromZero | None = 0  # steps of linear warm-up; None: a tenth of the run, at most 50
    warmup_ratio: PartialShare | None = None  # warm-up as a share of the run, in place of warmup_steps
    weight_decay: NotNegative = 0.0  # decoupled weight decay; biases and norms have none
    beta1: PartialShare = 0.9  # Adam's beta1
    beta2: PartialShare = 0.95  # Adam's beta2
    eps: Positive = 1e-8  # Adam's epsilon
    clip_grad: NotNegative = 1.0  # largest gradient norm; greater ones are scaled down; 0: no limit
    # accumulate and reduce gradients in fp32; False: in bf16, with half the memory and traffic
    reduce_in_fp32: bool = True
    # keep Adam's state in host memory and move it to the device in pieces for each update
    offload: bool = False
    # learning rates of parts ("tower", "projector", "language_model", "adapters"), or by a regex that is
    # searched in names of HF tensors and adapters; min_lr changes in proportion
    lr_by_part: dict[str, Positive] = field(default_factory=dict)
    weight_decay_by_part: dict[str, NotNegative] = field(default_factory=dict)  # weight decay in the same way

    @property
    def by_part(self) -> dict[str, dict[str, float]]:
        """The settings that differ by part, each by its name."""
        settings = {"lr_by_part": self.lr_by_part, "weight_decay_by_part": self.weight_decay_by_part}
        return {f"optimizer.{name}": values for name, values in settings.items()}


@dataclass
class TrainConfig:
    """Length, batches, checkpoints, validation and objective of a run."""

    steps: FromOne | None = 1000  # optimizer steps; None: as many as train.epochs make
    # passes over the training data, in place of train.steps
    epochs: Annotated[float, Gt(0), Le(1_000_000)] | None = None
    micro_batch_size: FromOne = 1  # rows per forward pass of a rank
    global_batch_size: FromOne = 32  # rows per optimizer step, over all ranks
    seed: FromZero = 1234  # seed of shuffling and of random weights
    # use only algorithms that give the same bits in every run; on a CPU all of them do
    deterministic: bool = False
    eval_every: Every = 0  # steps between validations, or "epoch": after each epoch; 0: none
    eval_steps: FromZero = 0  # validation steps; 0: the whole validation split
    save_every: Every = 0  # steps between checkpoints, or "epoch"; 0: only at the end
    async_save: bool = True  # write checkpoints while training continues; False: training waits
    keep_checkpoints: FromOne = 2  # how many of the newest checkpoints to keep
    # also keep the best checkpoint by train.best_by; each save then validates or scores first
    keep_best: bool = False
    # metric that decides what is best, such as valid_loss/charts, valid_reward or score/anls; other
    # metrics need a direction: max:valid_accuracy, min:NAME
    best_by: Name = "valid_loss"
    patience: FromZero = 0  # stop after so many validations or scores without a better one; 0: never
    score_every: Every = 0  # steps between scores of generated answers, or "epoch"; 0: none
    score_metric: Names = "exact_match"  # one or several metrics, as in `megatron-vlm evaluate`
    score_samples: FromOne = 100  # questions to answer, the same ones each time
    score_tokens: FromOne = 64  # most tokens of an answer
    export_every: Every = 0  # steps between Hugging Face exports in run_dir/exports, or "epoch"; 0: none
    # command to start for each export, with the folder as its last argument; numbers in a JSON object on the
    # last line that it prints are logged as on_export/NAME
    on_export: Name | None = None
    upload_to: PathName | None = None  # object store to copy checkpoints and exports to, s3://… or msc://…
    # end the job and write all stacks if no rank makes progress for so many seconds
    hang_seconds: Seconds = 480.0
    # time such as 3h50m after which the run saves and ends with exit code 75; the same command resumes it
    stop_after: Time | None = None
    # if loss or gradient norm jump: "warn", "skip" the step or "stop" the run; None: do not look
    on_spike: Literal["warn", "skip", "stop"] | None = None
    # your callbacks, FILE.py:CLASS
    callbacks: Name | list[Name] = field(default_factory=list)
    # "tokens"; "dpo" (preference pairs); "grpo" (rewards); or a loss of your own, FILE.py:NAME
    objective: str = "tokens"
    # reward functions, as TRL's `reward_funcs`
    rewards: UsersName | list[UsersName] = field(default_factory=list)
    dpo_beta: Positive = 0.1  # DPO's beta: with less, the model may differ more from its start

    @property
    def best_figure(self) -> tuple[str, bool | None]:
        """The name in `best_by`, and whether more of it is better; None: its kind says so."""
        way, colon, name = self.best_by.partition(":")
        if colon and way in ("min", "max"):
            return name, way == "max"
        return self.best_by, True if self.best_by == "valid_reward" else None

    @property
    def reward_names(self) -> list[str]:
        return [self.rewards] if isinstance(self.rewards, str) else self.rewards

    @property
    def best_is_score(self) -> bool:
        return self.best_figure[0].startswith("score/")


@dataclass
class GRPOConfig:
    """Settings of `train.objective=grpo`, with names and meanings of TRL's GRPOConfig.

    A step has `train.global_batch_size` prompts.
    """

    num_generations: Annotated[int, Ge(2), Le(MOST)] = 8  # sampled answers per prompt
    max_completion_length: FromOne = 512  # most tokens of an answer
    temperature: Positive = 1.0  # temperature of sampling
    top_p: PositiveShare = 1.0  # sample among the likeliest tokens that have this probability together
    beta: NotNegative = 0.0  # weight of the KL divergence from the starting weights; 0: none
    epsilon: Annotated[float, Gt(0), Lt(1)] = 0.2  # a token's ratio is clipped at 1 - epsilon
    epsilon_high: Positive | None = None  # and at 1 + epsilon_high; None: as epsilon (DAPO: 0.28)
    # largest ratio of a token with a negative advantage; None: no limit
    delta: Annotated[float, Gt(1)] | None = None
    # the loss is the mean over answers of their means ("grpo"), the mean over all tokens ("dapo"), or the sum
    # over a constant ("dr_grpo", which goes with scale_rewards=none)
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    # divide advantages by the standard deviation of a prompt's rewards, of all rewards of the step, or not
    scale_rewards: Literal["group", "batch", "none"] = "group"
    # weight of each function of train.rewards in the sum; None: 1 for each
    reward_weights: Annotated[list[Number], MinLen(1)] | None = None
    mask_truncated_completions: bool = False  # do not train answers cut at max_completion_length
    num_iterations: FromOne = 1  # how often the answers of a step are trained
    steps_per_generation: FromOne = 1  # optimizer steps per set of answers
    # your engine that samples answers, FILE.py:NAME; None: the model itself
    engine: UsersName | None = None


@dataclass
class LoggingConfig:
    """Metrics of a run, and where they go."""

    log_every: FromOne = 1  # steps between rows of training metrics
    tensorboard: bool = True  # also write TensorBoard events
    wandb_project: Name | None = None  # also log to this project of Weights & Biases
    # further trackers, also your own FILE.py:CLASS
    trackers: list[Literal["csv", "mlflow"] | UsersName] = field(default_factory=list)
    report: bool = True  # write run_dir/report.html, and update it during the run


@dataclass
class RunConfig:
    """Everything that determines a run. `run_dir` is its folder, from which it also resumes."""

    name: Name = "run"  # name of the run, in trackers and reports
    run_dir: PathName = MISSING  # folder of checkpoints, metrics and logs; a run resumes from it
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
