"""From a checkpoint to this rank's model: built, filled with the checkpoint's weights, with its adapters."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_vlm.adapter_settings import with_peft_settings
from megatron_vlm.config import RunConfig
from megatron_vlm.job import watchdog
from megatron_vlm.models.adapters.files import load_adapters
from megatron_vlm.models.adapters.model import add_adapters
from megatron_vlm.models.adapters.targets import find_targets, find_whole
from megatron_vlm.models.costs import image_cost, stage_costs
from megatron_vlm.models.description import Description
from megatron_vlm.models.hf import Source
from megatron_vlm.models.language_model import language_model_config
from megatron_vlm.models.layers import kernel_checks
from megatron_vlm.models.layers.kernel_checks import check_delta_nets
from megatron_vlm.models.vlm import VLMModel
from megatron_vlm.models.weights.importing import import_hf
from megatron_vlm.parallel import setup


def open_model(
    config: RunConfig,
    source: Source,
    resumes: bool = False,
    raw_pixels: bool = True,
    run_dir: str | None = None,
) -> list[VLMModel]:
    """This rank's model chunks with the weights of `source`, and with adapters if the configuration says so.

    `resumes`: a checkpoint of a run will fill what that run trains. So weights are imported only if adapters
    leave some as they are, and adapters do not begin with `config.adapter.start`. A run that does begin with
    it keeps a copy in `run_dir`. Without `raw_pixels` the checkpoint needs no processor.
    """
    with watchdog.stage("building the model"):
        processor = source.processor if raw_pixels else None
        chunks = build_model(config, source.description, setup.device(), processor)
    if config.model.load_weights and (config.adapter.used or not resumes):
        with watchdog.stage("loading weights"):
            import_hf(chunks, source.folder, source.description.weight_map)
    if config.adapter.used:
        start = None if resumes else config.adapter.start
        load_adapters(chunks, source.folder, source.description.renames, start, run_dir)
    return chunks


def build_model(
    config: RunConfig, description: Description, device: torch.device, processor: Any | None = None
) -> list[VLMModel]:
    """This rank's model chunks (several with virtual pipeline stages), frozen or with adapters as said.

    Raw pixels of the data path need the checkpoint's `processor`, see `models.vlm`.
    """
    architecture = description.architecture
    # stages hold different numbers of layers, so that tower and output layer count as work
    costs = architecture["num_layers"], 0.0, 0.0
    if config.parallel.pp > 1:
        costs = stage_costs(config, architecture, image_cost(config, description))
    megatron_config = language_model_config(config, architecture, costs)
    backends = kernel_checks.attention_backends(megatron_config, config.model, device)
    megatron_config.attention_backends = backends
    # kernels must agree with plain PyTorch on this device before they are used
    if device.type == "cuda":
        problem = kernel_checks.fused_disagreement(megatron_config, device)
        kernel_checks.check("fused", problem, config.model)
        dtype, width = megatron_config.params_dtype, megatron_config.hidden_size
        problem = kernel_checks.weight_gradient_disagreement(device, dtype)
        kernel_checks.check("weight_gradients", problem, config.model)
        kernel_checks.check_overlap(config.parallel, width, device, dtype)
        check_delta_nets(megatron_config, device, config.model)
    vpp = config.parallel.vpp
    chunks = []
    for stage in range(vpp):
        vp_stage = stage if vpp > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunks.append(VLMModel(megatron_config, description, first, last, vp_stage, processor))
    if config.adapter.used:
        adapter = with_peft_settings(config.adapter)
        targets, saved = find_targets(adapter, description), find_whole(adapter, description)
    for chunk in chunks:
        freeze(chunk, description.groups, config.model.freeze)
        chunk.to(device)
        if config.adapter.used:
            add_adapters(chunk, targets, saved, dropout=adapter.lora_dropout, seed=config.train.seed)
        if device.type == "cuda" and chunk.pre_process:
            kernel_checks.check_towers(chunk.vision, device, dtype, config.model)
            problem = kernel_checks.tower_disagreement(chunk.vision, device, dtype)
            kernel_checks.check("fused", problem, config.model)
    return chunks


def freeze(model: VLMModel, groups: Mapping[str, tuple[str, ...]], frozen: list[str]) -> None:
    """Turns off the gradients of all parameters in the groups of these names."""
    prefixes = tuple(prefix for name in frozen for prefix in groups[name])
    for name, param in model.named_parameters():
        param.requires_grad_(param.requires_grad and not name.startswith(prefixes))
