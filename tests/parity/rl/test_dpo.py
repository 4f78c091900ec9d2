"""DPO as the objective of a run: loss and gradients are those of Transformers, and a resumed run goes on."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import saved_cases
import torch
from PIL import Image
from safetensors.torch import load_file
from samples import sample_of
from sources import image_bytes

from megatron_vlm.batch import IGNORE_INDEX, fully_masked
from megatron_vlm.config import AdapterConfig, DataConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.image_processors import get_image_spec
from tiny.distributed import run_distributed

# ---- what runs in the ranks


BETA, SEQ_LENGTH = 0.3, 2048
PROMPTS = ("t", "it", "ititit", "it")  # a letter for each part: i image, t a few words


def layouts_of(family: str) -> list[str]:
    dense = ["1 process", "TP2+SP", "PP2·VPP2", "PP2", "CP2", "DP2 dist. optimizer", "CP2·DP2"]
    return {"gemma3": dense, "qwen3_vl_moe": ["TP2+SP", "EP2"]}.get(family, ["TP2+SP"])


def records() -> list[tuple[dict, list[Image.Image]]]:
    """Preference records, in the three ways of writing them, and their images."""
    numbers, found = np.random.default_rng(7), []
    for n, parts in enumerate(PROMPTS):
        user, chosen = parity.conversation(numbers, parts)
        rejected = parity.conversation(numbers, "t")[1]
        images = [part["image"] for part in user["content"] if part["type"] == "image"]
        prompt = [{"role": "user", "content": [{"type": p["type"]} | _text(p) for p in user["content"]]}]
        found.append(
            [
                {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]},
                {"messages": [*prompt, chosen], "rejected_response": rejected["content"][0]["text"]},
                {"messages": [*prompt, chosen], "rejected_messages": [*prompt, rejected]},
            ][n % 3]
            | {"images": images}
        )
    return [({k: v for k, v in record.items() if k != "images"}, record["images"]) for record in found]


def _text(part: dict) -> dict:
    return {"text": part["text"]} if "text" in part else {}


def cases_of(family: str, path: Path | str) -> dict[str, Any]:
    """Batches of pairs as the data path makes them, and the loss and gradients that Transformers gives them
    for a model that has left its starting weights. Those are at `path`, and the others beside it."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    from megatron_vlm.models.families import describe
    from megatron_vlm.weight_files import hub_name
    from tiny.checkpoints import build_tiny_checkpoint

    moved = build_tiny_checkpoint(family, Path(path).with_name("moved"), seed=5)
    config, processor = AutoConfig.from_pretrained(path), AutoProcessor.from_pretrained(path)
    description = describe(config)
    single, packed = _batches(processor, description)
    models = [
        AutoModelForImageTextToText.from_pretrained(each, dtype=torch.float32) for each in (path, moved)
    ]
    for start, buffer in zip(models[0].buffers(), models[1].buffers(), strict=True):
        buffer.copy_(start)  # a router's bias, which no training changes
    models[1].save_pretrained(moved)
    total, margins = 0.0, []
    for (record, images), batch in zip(records(), single, strict=True):
        scores = []
        for half, number in (("chosen", 1), ("rejected", 2)):
            messages = _conversation(record, images, half)
            inputs = parity.encode_row(processor, messages)
            mine = batch["attention_mask"][0] == number
            ids = _ended(inputs, batch["input_ids"][0][mine])
            ready = get_image_spec(processor).unpad(inputs)
            seen = {key: value for key, value in ready.items() if key in description.visual_keys}
            visual = parity.GenericVisualInputs(**seen) if seen else None
            inputs["position_ids"] = description.position_ids(ids, visual).unsqueeze(-2)
            labels = batch["labels"][0][mine]
            scores.append([_score(model, inputs, labels) for model in models])
        (chosen_start, chosen), (rejected_start, rejected) = scores
        margin = BETA * ((chosen - chosen_start.detach()) - (rejected - rejected_start.detach()))
        total = total - torch.nn.functional.logsigmoid(margin)
        margins.append(margin.item())
    loss = total / len(single)
    loss.backward()
    grads = {hub_name(name, description.renames): param.grad for name, param in models[1].named_parameters()}
    found = {"moved": str(moved), "single": single, "packed": packed, "loss": loss.item()}
    return found | {"margins": margins, "grads": grads}


def _conversation(record: dict, images: list, half: str) -> list[dict]:
    """By hand, what the record's chosen or rejected conversation is."""
    prompt = record.get("prompt") or record["messages"][:-1]
    given = iter(images)
    content = [p | {"image": next(given)} if p["type"] == "image" else p for p in prompt[0]["content"]]
    if half == "chosen":
        answer = record["chosen"][0] if "chosen" in record else record["messages"][-1]
    elif "rejected" in record:
        answer = record["rejected"][0]
    elif "rejected_messages" in record:
        answer = record["rejected_messages"][-1]
    else:
        text = {"type": "text", "text": record["rejected_response"]}
        answer = {"role": "assistant", "content": [text]}
    return [{"role": "user", "content": content}, answer]


def _ended(inputs: dict, ids: torch.Tensor) -> torch.Tensor:
    """The `ids` of ours, after a check that they are those of the processor, whose inputs become as long:
    GLM's reply ends with the token that begins the next turn, which its template writes there alone."""
    theirs = inputs["input_ids"][0]
    more = len(ids) - len(theirs)
    assert more in (0, 1) and ids[: len(theirs)].tolist() == theirs.tolist()
    ends = {"input_ids": int(ids[-1]), "attention_mask": 1}
    for key in parity.TEXT_KEYS:
        if key in inputs:
            inputs[key] = torch.nn.functional.pad(inputs[key], (0, more), value=ends.get(key, 0))
    return ids


def _score(model: torch.nn.Module, inputs: dict, labels: torch.Tensor) -> torch.Tensor:
    log_p = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
    trained = labels != IGNORE_INDEX
    assert 10 < int(trained.sum()) < len(labels) - 20
    return log_p[trained].gather(1, labels[trained, None]).double().sum()


def _batches(processor: Any, description: Any) -> tuple[list[dict], list[dict]]:
    """A row for each pair, and one row of all pairs."""
    from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
    from megatron_vlm.objectives import objective_of

    needs = description.data_needs
    run = RunConfig(data=DataConfig(seq_length=SEQ_LENGTH))
    run.train.objective = "dpo"
    samples = [
        sample_of(parse_record(record).stored(), [_png(image) for image in images], key=str(n))
        for n, (record, images) in enumerate(records())
    ]
    one = HFEncoderVLMTaskEncoder(processor, run.data, needs)
    pack = PackingVLMTaskEncoder(processor, replace(run.data, packing="stream"), needs)
    for encoder in (one, pack):
        encoder.documents = objective_of(run).sample_encoder(encoder.documents, run)
    single = [one.encode_batch(one.batch([one.encode_document(sample)])) for sample in samples]
    row = pack.join([pack.encode_document(sample) for sample in samples])
    return single, [pack.encode_batch(pack.batch([row]))]


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def measure(names: list[str], path: str, held: str) -> list[dict]:
    """The worst differences to Transformers over all ranks, by layout and by how pairs are packed."""
    from megatron_vlm.parallel import setup

    case, rows = saved_cases.read(held), []
    for name in names:
        layout = parity.LAYOUTS[name][1]
        if not torch.distributed.is_initialized():
            setup.init_distributed(layout, seed=1)
        setup.reset_layout(layout, seed=1)
        rows += [
            {"layout": name, "rows": kind} | _measure(layout, path, case, kind)
            for kind in ("single", "packed")
        ]
    return rows


def _measure(layout: ParallelConfig, path: str, case: dict, kind: str) -> dict:
    from megatron.core import parallel_state

    from megatron_vlm.models.hf import open_source
    from megatron_vlm.models.weights.importing import import_hf
    from megatron_vlm.objectives import OBJECTIVES
    from megatron_vlm.training.figures import BySource
    from megatron_vlm.training.loop import starting_model
    from megatron_vlm.training.step import mean_loss

    run = RunConfig(run_dir="none", parallel=layout, model=ModelConfig(hf_path=path, dtype="fp32"))
    source = open_source(path)
    ddp = starting_model(run, source)
    run.train.dpo_beta = BETA
    step_loss = OBJECTIVES["dpo"].step_loss(run, ddp)
    chunks = [chunk.module for chunk in ddp]
    import_hf(chunks, Path(case["moved"]), source.weight_map)

    ranks, rank = (parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank())
    batches = case[kind]
    least = layout.pp if layout.vpp > 1 else 1
    while len(batches) % (ranks * least):
        batches = [*batches, fully_masked(batches[-1])]
    mine = [parity.on_device(batch) for batch in batches[rank::ranks]]
    for chunk in ddp:
        chunk.zero_grad_buffer()
    reports, logged = parity.backward(ddp, mine, step_loss), BySource((), tuple(OBJECTIVES["dpo"].figures))
    logged.count(mine, reports)
    loss, _ = mean_loss(reports)
    sums = logged.sums()
    torch.distributed.all_reduce(sums)
    if layout.distributed_optimizer:
        parity.gather_sharded_grads(ddp)
    worst, missing = parity.compare_gradients(ddp, source.weight_map.rules, case["grads"])
    with torch.no_grad():
        valid, _ = mean_loss(step_loss(ddp, mine, forward_only=True)[0])
    return {
        "loss": abs(loss - case["loss"]),
        "valid": abs(valid - case["loss"]),
        "gradient": worst,
        "without a gradient": missing,
        "figures": logged.figures(sums.cpu().numpy()),
        "expected": {"margin": case["margins"]},
    }


def train_run(path: str, rows: str, folder: str, adapter: bool) -> None:
    """The run of the folder to its end, on from where it is."""
    from megatron_vlm.overrides import apply_overrides
    from megatron_vlm.training.loop import train

    run = {"run_dir": folder, "model.hf_path": path, "model.dtype": "fp32", "parallel.tp": 2}
    run |= {"data.dataset_type": "hf", "data.train_data_path": rows, "data.seq_length": 256}
    run |= {"data.packing": "global", "data.lengths_cache": f"{rows}.lengths", "data.num_workers": 1}
    run |= {"data.validation_share": 0.2, "data.max_drop_share": 1.0, "optimizer.lr": 1e-3}
    run |= {"train.objective": "dpo", "train.steps": 4, "train.global_batch_size": 2}
    run |= {
        "train.save_every": 2,
        "train.eval_every": 2,
        "train.export_every": 4,
        "logging.tensorboard": False,
    }
    config = apply_overrides(RunConfig(), run)
    if adapter:
        config.adapter = AdapterConfig(r=4, lora_alpha=8, target_modules="all-linear")
    train(config)


# ---- the tests


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    layouts = parity.LAYOUTS
    return parity.measured(request, tmp_path_factory, layouts, cases_of, measure)


@pytest.mark.parametrize(("family", "layout"), parity.cells(layouts_of, ()))
def test_loss_and_gradients_are_those_of_transformers(rows_of, family, layout):
    rows = rows_of(parity.LAYOUTS[layout][0])
    found = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert [row["rows"] for row in found] == ["single", "packed"]
    for row in found:
        assert row["loss"] <= 1e-5 and row["valid"] <= 1e-5 and row["gradient"][0] <= 1e-4, row
        assert not row["without a gradient"]
        margins, figures = row["expected"]["margin"], row["figures"]
        assert min(map(abs, margins)) > 1e-3  # the model has left its start
        assert figures["margin"] == pytest.approx(sum(margins) / 4, abs=1e-5)
        assert figures["accuracy"] == sum(margin > 0 for margin in margins) / 4
        rewards = figures["reward_chosen"] - figures["reward_rejected"]
        assert rewards == pytest.approx(figures["margin"], abs=1e-5)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """20 pairs with an image each, two broken ones, and one whose rejected answer is too long for a row."""
    folder = tmp_path_factory.mktemp("pairs")
    question, found = "<image>What is in the image?", []
    for n in range(20):
        (folder / f"{n}.jpg").write_bytes(image_bytes(n))
        pair = {"chosen": f"a street sign {n}", "rejected": f"the sofa and {n} apples"}
        found.append({"images": [f"{n}.jpg"], "prompt": question} | pair)
    found += [found[0] | {"rejected": found[0]["chosen"]}, {"prompt": "What?", "chosen": "a table"}]
    found.append(found[1] | {"rejected": "a very long one " * 100})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    return folder / "rows.jsonl"


def metrics(folder: Path) -> list[dict]:
    """Without times, and drops: a resumed loader counts again those that it encodes again."""
    timed = ("second", "tflops", "memory", "dropped")
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not any(word in k for word in timed)} for row in found]


@pytest.mark.long
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, tiny_gemma3, rows, adapter):
    """It is made to go on from the checkpoint before its last: with the first weights as its reference."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_distributed(2, train_run, str(tiny_gemma3), str(rows), str(whole), adapter)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "exports")
    (resumed / "checkpoints/latest").write_text("step_00000002")
    run_distributed(2, train_run, str(tiny_gemma3), str(rows), str(resumed), adapter)

    steps = [row for row in metrics(whole) if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-7) and steps[0]["margin"] == 0
    assert steps[3]["margin"] > 0.01 and steps[3]["loss"] < steps[0]["loss"]
    assert [row["step"] for row in metrics(whole) if row.get("valid_accuracy") is not None] == [2, 4]
    assert metrics(resumed) == metrics(whole)
    written = [folder / "exports/step_00000004" for folder in (whole, resumed)]
    (name,) = (path.name for path in written[0].glob("*.safetensors"))
    one, other = (load_file(folder / name) for folder in written)
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)
    dropped = [json.loads(line) for line in (whole / "drops/rank0.jsonl").read_text().splitlines()]
    reasons = {drop["key"]: drop["reason"] for drop in dropped}
    broken = {"000000020": "bad_preference", "000000021": "bad_preference", "000000022": "over_length"}
    assert reasons.items() <= broken.items()
