"""What parity means, and how it is measured: HF logits, loss and gradients against ours in every layout.

Runs inside the processes that `test_parity.py` starts; one launch goes through many layouts and inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from megatron_vlm.batch import IGNORE_INDEX, GenericVisualInputs
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig

# Worst cases measured over all families, layouts and inputs are in reports/parity.json.
MAX_ABS_LOGITS, MAX_ABS_LOSS, MAX_REL_GRAD = 1e-4, 1e-5, 1e-4

LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {  # name -> (processes, layout)
    "1 process": (1, ParallelConfig()),
    "TP2": (2, ParallelConfig(tp=2, sp=False)),
    "TP2+SP": (2, ParallelConfig(tp=2)),
    "PP2": (2, ParallelConfig(pp=2)),
    "PP2·VPP2": (2, ParallelConfig(pp=2, vpp=2)),
    "DP2": (2, ParallelConfig(distributed_optimizer=False)),
    "DP2 dist. optimizer": (2, ParallelConfig()),
    "TP2·PP2": (4, ParallelConfig(tp=2, pp=2)),
}

INPUTS: dict[str, list[int]] = {  # name -> images in each row
    "text": [0],
    "one image": [1],
    "three images": [3],
    "0, 1 and 3 images": [0, 1, 3],
}


def conversation(rng: np.random.Generator, images: int) -> list[dict]:
    def image() -> dict:
        width, height = rng.integers(40, 200, 2)
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        return {"type": "image", "image": Image.fromarray(pixels)}

    words = ["the", "cat", "shows", "a", "table", "and", "two", "people", "near", "the", "sofa"]
    text = lambda n: " ".join(rng.choice(words, n))  # noqa: E731
    user = [part for _ in range(images) for part in (image(), {"type": "text", "text": text(3)})]
    return [
        {"role": "user", "content": [*user, {"type": "text", "text": text(30)}]},
        {"role": "assistant", "content": [{"type": "text", "text": text(25)}]},
    ]


def encode(processor: Any, visual_keys: tuple[str, ...], images_per_row: list[int]) -> tuple[dict, dict]:
    """(the HF model's arguments, our batch) of the same conversations, right padded."""
    rng = np.random.default_rng(sum(images_per_row) + 10 * len(images_per_row))
    conversations = [conversation(rng, images) for images in images_per_row]
    hf = dict(
        processor.apply_chat_template(
            conversations,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "right"},
        )
    )
    real_BS = hf["attention_mask"].bool()
    share_B1 = np.resize([0.9, 0.1, 0.5], (len(conversations), 1))  # rows train very different numbers
    trained_BS = real_BS & torch.from_numpy(rng.random(real_BS.shape) < share_B1)
    trained_BS[:, 0] = False
    hf["labels"] = torch.where(trained_BS, hf["input_ids"], IGNORE_INDEX)
    next_BS = torch.nn.functional.pad(hf["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()
    visual = {key: hf[key] for key in visual_keys if key in hf}
    ours = {
        "input_ids": hf["input_ids"],
        "labels": next_BS,
        "loss_mask": (next_BS != IGNORE_INDEX).float(),
        "position_ids": torch.arange(real_BS.shape[1]).expand(real_BS.shape).contiguous(),
        "attention_mask": real_BS.int(),
        "visual_inputs": GenericVisualInputs.from_mapping(visual) if visual else None,
    }
    return hf, ours


def reference(path: str, images_per_row: list[int]) -> dict[str, Any]:
    """HF's logits, loss and gradients in fp32, and the batch they belong to; gradients by hub key."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    from megatron_vlm.models.families import family_for
    from megatron_vlm.models.weights import hub_name

    family = family_for(AutoConfig.from_pretrained(path))
    hf, batch = encode(AutoProcessor.from_pretrained(path), family.visual_keys, images_per_row)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    output = model(**hf, use_cache=False)
    output.loss.backward()
    grads = {hub_name(name, family.renames): param.grad for name, param in model.named_parameters()}
    return {"batch": batch, "logits": output.logits.detach(), "loss": output.loss.item(), "grads": grads}


def split_rows(batch: dict, images_per_row: list[int], visual_rows: dict) -> list[dict]:
    """The batch as micro batches of one row; `visual_rows(row)` gives the row's own visual inputs."""
    tensors = [key for key in batch if key != "visual_inputs"]
    return [
        {key: batch[key][row : row + 1] for key in tensors} | {"visual_inputs": visual_rows[row]}
        for row in range(len(images_per_row))
    ]


def measure(names: list[str], path: str, references: str) -> list[dict]:
    """Every named layout on every input: rows for reports/parity.json, complete on rank 0."""
    from megatron_vlm.parallel import setup

    setup.init_distributed(LAYOUTS[names[0]][1], seed=1)
    cases = torch.load(references, weights_only=False)
    rows = []
    for name in names:
        setup.reset_layout(LAYOUTS[name][1], seed=1)
        for input_name, case in cases.items():
            rows.append({"layout": name, "input": input_name} | compare(LAYOUTS[name][1], path, case))
    return rows


def compare(layout: ParallelConfig, path: str, case: dict, per_token_loss: bool = True, **model: Any) -> dict:
    """The worst differences over all ranks, the same on every rank; `model` sets fields of ModelConfig."""
    from megatron.core import parallel_state
    from transformers import AutoConfig

    from megatron_vlm.models.families import family_for
    from megatron_vlm.models.vlm import build_model
    from megatron_vlm.models.weights import hf_tensors, import_hf
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import step
    from megatron_vlm.training.generate import logits_step

    run = RunConfig(parallel=layout)
    run.model = ModelConfig(dtype="fp32", **model)
    hf_config = AutoConfig.from_pretrained(path)
    family = family_for(hf_config)
    chunks = build_model(run, family, hf_config, setup.device())
    import_hf(chunks, path, family, hf_config)
    chunks[0].config.calculate_per_token_loss = per_token_loss
    ddp = step.data_parallel(chunks, run)
    mine = my_micro_batches(case, layout)

    for chunk in ddp:
        chunk.zero_grad_buffer()
    loss, _ = step.mean_loss(step.forward_backward(ddp, [batch for batch, _ in mine]))
    if layout.distributed_optimizer:
        gather_sharded_grads(ddp)
    worst = (0.0, "")
    for key, grad in hf_tensors(
        chunks, family.weights(hf_config), value=lambda weight: getattr(weight, "main_grad", None)
    ):
        expected = case["grads"].get(key)
        expected = torch.zeros_like(grad) if expected is None else expected
        scale = gradient_scale(case["grads"], key)
        worst = max(worst, ((grad - expected).abs().max().item() / scale, key))

    with torch.no_grad():
        reports = step.forward_backward(ddp, [batch for batch, _ in mine], logits_step, forward_only=True)
    logits_error = 0.0
    for report, (batch, rows) in zip(reports, mine, strict=True) if reports else ():
        real_BS = batch["attention_mask"].bool()
        expected = case["logits"][rows][:, : real_BS.shape[1]]
        difference = (report["logits"][:, : real_BS.shape[1]] - expected)[real_BS]
        logits_error = max([logits_error, *difference.abs().flatten(1).amax(1).tolist()])

    worst_of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(worst_of_all, (logits_error, *worst))
    rel_grad, parameter = max((row[1], row[2]) for row in worst_of_all)
    result = {
        "max_abs_logits": max(row[0] for row in worst_of_all),
        "abs_loss": abs(loss - case["loss"]),
        "max_rel_grad": rel_grad,
        "worst_parameter": parameter,
    }
    result["passed"] = (
        result["max_abs_logits"] <= MAX_ABS_LOGITS
        and result["abs_loss"] <= MAX_ABS_LOSS
        and result["max_rel_grad"] <= MAX_REL_GRAD
    )
    assert parallel_state.get_data_parallel_world_size() * layout.tp * layout.pp == dist.get_world_size()
    return result


def gradient_scale(grads: dict[str, torch.Tensor | None], key: str) -> float:
    """What an error in the gradient of `key` is measured against: its largest entry.

    A bias is measured against its layer's weight as well: a key projection's bias has a gradient of exactly
    zero in theory (softmax does not see a shift), and of rounding noise in practice.
    """
    layer = {key, key.removesuffix("bias") + "weight"} if key.endswith("bias") else {key}
    return max((grads[k].abs().max().item() for k in layer if grads.get(k) is not None), default=0.0) or 1.0


def my_micro_batches(case: dict, layout: ParallelConfig) -> list[tuple[dict, list[int]]]:
    """(micro batch, its rows): the whole batch at once in one process, else one row each, dealt out over DP.

    Where a data-parallel rank or the interleaved schedule has too few rows, one is added whose tokens are all
    untrained, without an image.
    """
    from megatron.core import parallel_state

    if dist.get_world_size() == 1:
        return [(case["batch"], list(range(len(case["rows"]))))]
    dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    rows = [(batch, [row]) for row, batch in enumerate(case["rows"])]
    multiple = dp * (layout.pp if layout.vpp > 1 else 1)
    while len(rows) % multiple:
        blank = {key: torch.zeros_like(value) for key, value in rows[0][0].items() if torch.is_tensor(value)}
        rows.append((blank | {"labels": blank["labels"] + IGNORE_INDEX, "visual_inputs": None}, [0]))
    return rows[rank::dp]


def gather_sharded_grads(ddp: list) -> None:
    """Make every rank's gradient buffer whole: with the distributed optimizer each holds its own part."""
    for chunk in ddp:
        for buffer in chunk.buffers:
            group, rank = buffer.data_parallel_group, buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                part = bucket.grad_data.view(group.size(), -1)[rank].clone()
                dist.all_gather_into_tensor(bucket.grad_data, part, group=group)


def case_for(path: Path, images_per_row: list[int]) -> dict:
    """A reference and its rows one by one, as `measure` wants it."""
    case = reference(str(path), images_per_row)
    pixels = case["batch"]["visual_inputs"]
    starts = np.cumsum([0, *images_per_row])
    visual = {
        row: pixels.map(lambda t, a=starts[row], b=starts[row + 1]: t[a:b]) if images else None
        for row, images in enumerate(images_per_row)
    }
    return case | {"rows": split_rows(case["batch"], images_per_row, visual)}
