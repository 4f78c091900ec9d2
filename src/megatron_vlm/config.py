"""A run's configuration: plain dataclasses, no torch. See `recipes/` for functions that return one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ModelConfig:
    hf_path: str = "???"  # folder or hub name of the Hugging Face checkpoint to start from
    load_weights: bool = True  # False: random weights from the config alone
    dtype: str = "bf16"  # "bf16" or "fp32": parameters and activations; gradients and Adam are fp32
    freeze: list[str] = field(default_factory=list)  # of "tower", "projector", "language_model"
    attention: str = "sdpa"  # core attention backend
    recompute: str = "none"  # "none", "selective" or "full": activation recomputation


@dataclass
class ParallelConfig:
    tp: int = 1  # tensor
    pp: int = 1  # pipeline
    vpp: int = 1  # virtual pipeline stages per rank (interleaved schedule)
    cp: int = 1  # context
    ep: int = 1  # expert
    sp: bool | None = None  # sequence parallel; None: on exactly when tp > 1
    distributed_optimizer: bool = True


@dataclass
class DataConfig:
    dataset_type: str = "energon"  # "energon" or "hf"
    train_data_path: str = "???"
    valid_data_path: str | None = None  # None: the validation split of train_data_path, if it has one
    seq_length: int = 4096  # most tokens in a row
    over_length: str = "drop"  # "drop" the sample, or "truncate" it to whole images
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_drop_share: float = 0.05  # the run stops when more of the samples than this are dropped
    num_workers: int = 2
    shuffle_buffer_size: int = 1000
    max_samples_per_sequence: int = 100


@dataclass
class OptimizerConfig:
    lr: float = 1e-5
    min_lr: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass
class TrainConfig:
    steps: int = 1000
    micro_batch_size: int = 1
    global_batch_size: int = 32
    seed: int = 1234
    eval_every: int = 0  # steps between validations; 0: none
    eval_steps: int = 0  # validation steps; 0: the whole validation split
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 2


@dataclass
class LoggingConfig:
    log_every: int = 1
    tensorboard: bool = True
    wandb_project: str | None = None


@dataclass
class RunConfig:
    """Everything that determines a run. `run_dir` is where it lives and from where it resumes."""

    name: str = "run"
    run_dir: str = "???"
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
