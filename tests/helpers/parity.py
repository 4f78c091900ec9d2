"""What parity means, and how it is measured: HF logits, loss and gradients against ours in every layout.

Runs inside the processes that `test_parity.py` starts; one launch goes through many layouts and inputs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import saved_cases
import torch
import torch.distributed as dist
from pairs import covering, pairs_of
from PIL import Image
from places import ROOT
from transformers.modeling_outputs import BaseModelOutputWithPooling

from megatron_vlm.batch import IGNORE_INDEX, GenericVisualInputs, cat_padded
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.data.image_processors import get_image_spec
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

REPORT = ROOT / "reports" / "parity.json"

# Worst cases measured over all families, layouts and inputs are in reports/parity.json.
MAX_ABS_LOGITS, MAX_ABS_LOSS, MAX_REL_GRAD = 1e-4, 1e-5, 1e-4
ROUNDING = 1e-3  # times MAX_REL_GRAD: what fp32 tells apart, beside the largest number of a sum

LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {  # name -> (processes, layout)
    "1 process": (1, ParallelConfig()),
    "TP2": (2, ParallelConfig(tp=2, sp=False)),
    "TP2+SP": (2, ParallelConfig(tp=2)),
    "TP2+SP, images on each rank": (2, ParallelConfig(tp=2, vision_dp=False)),
    "PP2": (2, ParallelConfig(pp=2)),
    "PP2·VPP2": (2, ParallelConfig(pp=2, vpp=2)),
    "DP2": (2, ParallelConfig(distributed_optimizer=False)),
    "DP2 dist. optimizer": (2, ParallelConfig()),
    "CP2": (2, ParallelConfig(cp=2)),
    "CP2, images on each rank": (2, ParallelConfig(cp=2, vision_dp=False)),
    "CP4": (4, ParallelConfig(cp=4)),
    "CP2·TP2+SP": (4, ParallelConfig(cp=2, tp=2)),
    "CP2·PP2": (4, ParallelConfig(cp=2, pp=2)),
    "CP2·DP2": (4, ParallelConfig(cp=2)),
    "CP2·EP2": (2, ParallelConfig(cp=2, ep=2)),
    "TP2·PP2": (4, ParallelConfig(tp=2, pp=2)),
    "EP2": (2, ParallelConfig(ep=2)),
    "EP2·TP2+SP": (4, ParallelConfig(ep=2, tp=2)),
}


def layouts_of(family: str) -> list[str]:
    """Experts can be spread over ranks; Megatron routes to them under tensor parallelism only with SP."""
    from megatron_vlm.models.families import load

    experts = load(family).has_experts
    return [name for name in LAYOUTS if (name != "TP2" if experts else "EP" not in name)]


# name -> rows: a letter for each part of the user's turn, i image, v video, t a few words
INPUTS: dict[str, list[str]] = {
    "text": ["t"],
    "one image": ["it"],
    "three images": ["ititit"],
    "two adjacent images": ["iit"],
    "0, 1 and 3 images": ["t", "it", "ititit"],
    "video": ["vt"],
    "image and video": ["it", "vtit"],
}


# Families whose model is made of others' parts: another name, another text model that is known, one rule.
RELATIVES = ("glm46v", "glmga", "lighton_ocr", "qianfan_ocr", "minicpmv4_7")
# With these, `make test-long` has each kind of layer in the layouts: windows, shared keys, convolutions,
# M-RoPE, experts, and experts beside linear attention. It tries every other family in one layout, and
# `make test-soak` everywhere.
IN_LAYOUTS = ("gemma3", "gemma4", "lfm2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe")
OF_OTHERS = ("TP2+SP", "TP2+SP, adapter")


# of tests that try a family in one or two layouts: experts with M-RoPE, and experts beside linear attention
IN_LONG = ("gemma3", "qwen3_vl_moe", "qwen3_5_moe")


def marks(family: str) -> list:
    """`make test` has Gemma3, `make test-long` the families of IN_LONG, `make test-soak` the others."""
    if family not in IN_LONG:
        return [pytest.mark.soak]
    return [] if family == "gemma3" else [pytest.mark.long]


FAMILIES = [pytest.param(family, marks=marks(family)) for family in TINY_FAMILIES]
# Of tests of the data: as many tokens for every image, and images of any size; then all other kinds of images
KINDS_OF_IMAGES = ("gemma4", "internvl", "llava_onevision", "lfm2_vl", "mistral3", "smolvlm", "minicpmv4_6")
OF_DATA = [
    pytest.param(
        family,
        marks=()
        if family in ("gemma3", "qwen3_vl")
        else pytest.mark.long
        if family in KINDS_OF_IMAGES
        else pytest.mark.soak,
    )
    for family in TINY_FAMILIES
]
OFTEN = ("1 process", "TP2+SP", "PP2·VPP2", "DP2 dist. optimizer", "CP2")


def cells(of_family: Callable[[str], list[str]], often: Container[str]) -> list:
    """Every family in each of its layouts. `make test` has Gemma3 in those of `often`. `make test-long` has
    each layout with one of the families of IN_LAYOUTS, in turn. `make test-soak` has the rest."""
    having = {name: [family for family in IN_LAYOUTS if name in of_family(family)] for name in LAYOUTS}
    tried = {(each[n % len(each)], name) for n, (name, each) in enumerate(having.items()) if each}

    def mark(family: str, layout: str) -> list:
        if family == "gemma3" and layout in often:
            return []
        return [pytest.mark.long if (family, layout) in tried else pytest.mark.soak]

    return [
        pytest.param(family, layout, marks=mark(family, layout))
        for family in TINY_FAMILIES
        for layout in of_family(family)
    ]


def kinds_of_parallelism(processes: int, layout: ParallelConfig) -> set[str]:
    """The ways in which a layout cuts a model or its data; of one process "none"."""
    found = {name for name in ("tp", "pp", "vpp", "cp", "ep") if getattr(layout, name) > 1}
    found |= {"tp without sp"} if layout.tp > 1 and not layout.sp else set()
    if processes > layout.model_size:
        found.add("dp, sharded optimizer" if layout.distributed_optimizer else "dp")
    found |= set() if layout.vision_dp else {"images on each rank"}
    return found or {"none"}


def cells_of_pairs(
    of_family: Callable[[str], list[str]],
    inputs: Callable[[str], Sequence[str]],
    often: Container[str],
    layouts: dict[str, tuple] = LAYOUTS,
    factors: Callable[[str], tuple[Hashable, ...]] = lambda layout: (),
) -> list:
    """Every family in its layouts, and the inputs on which it is measured there.

    `make test` has Gemma3 in the layouts of `often` on all inputs. `make test-long` has few besides: each two
    of family, kind of parallelism, input and the `factors` of a layout meet in one, if they can, and every
    layout has a model with experts and one without; families out of IN_LAYOUTS only meet each input.
    `make test-soak` has all.
    """
    from megatron_vlm.models.families import load

    every = [
        (family, layout, each)
        for family in TINY_FAMILIES
        for layout in of_family(family)
        for each in inputs(family)
    ]
    short = [cell for cell in every if cell[0] == "gemma3" and cell[1] in often]

    def shows(family: str, layout: str, each: str) -> set[Hashable]:
        if family not in IN_LAYOUTS:
            return {(family, each)} if layout in OF_OTHERS else set()
        kinds = kinds_of_parallelism(*layouts[layout][:2])
        met = [pairs_of((family, kind, *factors(layout), each)) for kind in kinds]
        return set().union(*met, {(layout, load(family).has_experts)})

    shown = {cell: shows(*cell) for cell in every}
    in_short = set().union(*(shown[cell] for cell in short))
    paired = covering(every, lambda cell: shown[cell] - in_short)
    groups = {"": (short, []), "pairs": (paired, [pytest.mark.long]), "all": (every, [pytest.mark.soak])}
    found = []
    for name, (group, marks) in groups.items():
        of_layout: dict[tuple[str, str], list[str]] = {}
        for family, layout, each in group:
            of_layout.setdefault((family, layout), []).append(each)
        for (family, layout), tried in of_layout.items():
            label = "-".join(filter(None, (family, layout, name)))
            found.append(pytest.param(family, layout, tried, marks=marks, id=label))
    return found


def measured(
    request: pytest.FixtureRequest,
    folders: pytest.TempPathFactory,
    layouts: dict[str, tuple],
    cases: Callable[[str, Path], dict],
    measure_one: Callable[[dict[str, list[str]], str, str], list[dict]],
) -> Callable[[int], list[dict]]:
    """A function (processes) -> the rows of all families in their layouts of so many processes, as far as
    this session tests them. One launch serves them all; WRITE_REPORTS=1 puts them into reports/parity.json.
    """

    @cache
    def prepared(family: str) -> tuple[str, str]:
        folder = folders.mktemp(family)
        path, held = build_tiny_checkpoint(family, folder / "checkpoint"), folder / "cases.pt"
        torch.save(cases(family, path), held)
        return str(path), str(held)

    @cache
    def rows(processes: int) -> list[dict]:
        asked = {
            family: (names, *prepared(family))
            for family, names in asked_for(request, processes, layouts).items()
        }
        found = run_distributed(processes, _measure_all, measure_one, asked, timeout=1800)[0]
        if os.environ.get("WRITE_REPORTS"):
            _write_report(found)
        return found

    return rows


def asked_for(request: pytest.FixtureRequest, processes: int, layouts: dict) -> dict[str, dict[str, list]]:
    """Family -> the layouts of so many processes in which it is tested now -> the inputs there, if tests say
    on which."""
    here = [item for item in request.session.items if item.path == request.path]
    tested: dict[tuple, list[str]] = {}
    for cell in (item.callspec.params for item in here if hasattr(item, "callspec")):
        inputs = tested.setdefault((cell.get("family"), cell.get("layout")), [])
        inputs += [each for each in cell.get("inputs", ()) if each not in inputs]
    mine = [name for name in layouts if layouts[name][0] == processes]
    found = {
        family: {name: tested[family, name] for name in mine if (family, name) in tested}
        for family in TINY_FAMILIES
    }
    return {family: names for family, names in found.items() if names}


def _measure_all(measure_one: Callable[..., list[dict]], asked: dict[str, tuple]) -> list[dict]:
    """The rows of all families, one after another in the same processes."""
    return [
        {"family": family} | row for family, arguments in asked.items() for row in measure_one(*arguments)
    ]


def _write_report(found: list[dict]) -> None:
    """Puts the measurements in the place of earlier ones of the same families, layouts and inputs."""
    rows = json.loads(REPORT.read_text()) if REPORT.exists() else []
    new = {_cell_of(row) for row in found}
    others = [row for row in rows if _cell_of(row) not in new]
    REPORT.write_text(json.dumps(others + found, indent=1, ensure_ascii=False) + "\n")


def _cell_of(row: dict) -> tuple:
    return row["family"], row["layout"], row.get("input")


# the rows of one packed row; a number is a text cut to so many tokens
PACKED: dict[str, list[str]] = {
    "packed: short documents": ["it", "1", "3", "ititit", "2", "5", "t"],
    "packed: images in one document": ["t", "t", "ititit", "t"],
    "packed: three tokens": ["3"],
    "packed: one document": ["ititit"],
}
# of families with gated delta nets, whose chunks have 64 tokens
AROUND_A_CHUNK = {"packed: documents around a chunk": ["1", "2", "63", "64", "65", "200"]}


def packed_of(family: str) -> dict[str, list[str]]:
    from megatron_vlm.models.families import load
    from megatron_vlm.models.families.qwen3_5 import Qwen35

    return PACKED | (AROUND_A_CHUNK if issubclass(load(family), Qwen35) else {})


def takes_videos(family: Any) -> bool:
    return family.frames_as_images or "pixel_values_videos" in family.visual_keys


def inputs_of(family: str) -> dict[str, list[str]]:
    """Those that the family takes."""
    from megatron_vlm.models.families import load

    takes_video = takes_videos(load(family))
    media = ["i", "v", "iv"] if takes_video else ["i"]
    if load(family).images_or_videos:
        media.remove("iv")
    kinds = {name: "".join(sorted(set("".join(rows)) - {"t"})) for name, rows in INPUTS.items()}
    return {name: rows for name, rows in INPUTS.items() if kinds[name] in ["", *media]}


def conversation(rng: np.random.Generator, parts: str) -> list[dict]:
    words = ["the", "cat", "shows", "a", "table", "and", "two", "people", "near", "the", "sofa"]

    def text(count: int) -> dict:
        return {"type": "text", "text": " ".join(rng.choice(words, count))}

    def pixels(*frames: int) -> np.ndarray:
        width, height = rng.integers(40, 200, 2)
        return rng.integers(0, 255, (*frames, height, width, 3), dtype=np.uint8)

    def part(kind: str) -> dict:
        if kind == "i":
            return {"type": "image", "image": Image.fromarray(pixels())}
        return {"type": "video", "video": pixels(6)} if kind == "v" else text(3)

    return [
        {"role": "user", "content": [*map(part, parts), text(30)]},
        {"role": "assistant", "content": [text(25)]},
    ]


MEDIA = ("image", "video")
TEXT_KEYS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def encode_row(processor: Any, messages: list[dict]) -> dict:
    """What the processor makes of one conversation. Every 2nd frame of a video, which has 2 a second."""
    media = {kind: [part[kind] for part in messages[0]["content"] if kind in part] for kind in MEDIA}
    prompt = processor.apply_chat_template(messages, tokenize=False)
    bos = processor.tokenizer.bos_token
    given = {f"{kind}s": found for kind, found in media.items() if found}
    if "images" in given:
        given["images"] = get_image_spec(processor).arrange(given["images"])
    if "videos" in given:
        given |= {"fps": 2.0, "do_sample_frames": False}
        given["video_metadata"] = [
            {"fps": 2.0, "total_num_frames": len(video), "frames_indices": list(range(len(video)))}
            for video in given["videos"]
        ]
    special = not (bos and prompt.startswith(bos))
    return dict(processor(text=[prompt], add_special_tokens=special, return_tensors="pt", **given))


def encode(
    processor: Any, description: Any, rows: list[str], talk: Callable = conversation
) -> tuple[dict, dict, list[dict]]:
    """(the HF model's arguments, our batch, our batch row by row) of the same conversations, right padded.

    Both models get our positions: Transformers' own are wrong after a Qwen2.5-VL video.
    """
    rng = np.random.default_rng(sum(map(ord, "".join(rows))))
    spoken = ["t" * (1 + int(parts) // 6 * 2) if parts.isdigit() else parts for parts in rows]
    outputs = [encode_row(processor, talk(rng, parts)) for parts in spoken]
    for parts, out in zip(rows, outputs, strict=True):
        if parts.isdigit():
            out |= {key: value[:, : int(parts)] for key, value in out.items()}
            assert out["input_ids"].shape[1] == int(parts), "the text is too short"
    made = [get_image_spec(processor).unpad(out) for out in outputs]
    visual = [
        GenericVisualInputs(**{key: out[key] for key in description.visual_keys if key in out})
        for out in made
    ]
    both = zip(outputs, visual, strict=True)
    position_ids = [description.position_ids(out["input_ids"][0], v) for out, v in both]
    joined = GenericVisualInputs.cat(visual)
    hf = {key: _stack([out[key][0] for out in outputs]) for key in outputs[0] if key in TEXT_KEYS}
    hf |= _padded(outputs) or (joined.as_model_kwargs() if joined else {})
    real_BS = hf["attention_mask"].bool()
    share_B1 = np.resize([0.9, 0.1, 0.5], (len(rows), 1))  # rows train very different numbers
    trained_BS = real_BS & torch.from_numpy(rng.random(real_BS.shape) < share_B1)
    trained_BS[:, 0] = False
    trained_BS &= hf["input_ids"] < description.text.vocab_size  # Kimi's token of videos is none of it
    hf["labels"] = torch.where(trained_BS, hf["input_ids"], IGNORE_INDEX)
    hf["position_ids"] = _stack(position_ids)
    next_BS = torch.nn.functional.pad(hf["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()
    ours = {
        "input_ids": hf["input_ids"],
        "labels": next_BS,
        "loss_mask": (next_BS != IGNORE_INDEX).float(),
        "position_ids": hf["position_ids"],
        "attention_mask": real_BS.int(),
        "visual_inputs": joined,
    }
    return hf, ours, split_rows(ours, visual)


def _padded(outputs: list[dict]) -> dict[str, torch.Tensor]:
    """What a processor gives that pads images to one number of patches or tiles, of all rows; see
    `megatron_vlm.data.image_processors`."""
    ready = ("pixel_values", "pixel_values_videos")
    sizes = ("target_sizes", "target_sizes_videos")
    if any(key in out for out in outputs for key in sizes):  # patches side by side
        axes = dict.fromkeys(ready, -1) | dict.fromkeys(sizes, 0)
        parts = {key: [out[key] for out in outputs if key in out] for key in axes}
        return {key: torch.cat(tensors, axes[key]) for key, tensors in parts.items() if tensors}
    counted = ("image_position_ids", "image_sizes", "batch_num_images")
    keys = (*ready, "pixel_attention_mask", "spatial_shapes", *counted)
    padded = any(out[key].dim() == 5 for out in outputs for key in ready if key in out)
    if not (padded or any({"spatial_shapes", "image_position_ids"} & out.keys() for out in outputs)):
        return {}
    found = {key: [out[key] for out in outputs if key in out] for key in keys}
    return {key: cat_padded(tensors) for key, tensors in found.items() if tensors}


def _stack(rows: list[torch.Tensor]) -> torch.Tensor:
    """(..., B, S) of rows (..., T), padded on the right."""
    length = max(row.shape[-1] for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, length - row.shape[-1])) for row in rows], dim=-2)


def split_rows(batch: dict, visual: list[GenericVisualInputs]) -> list[dict]:
    """The batch as micro batches of one row, each with its own visual inputs."""
    tensors = {key: value for key, value in batch.items() if key != "visual_inputs"}
    return [
        {key: value[..., row : row + 1, :] for key, value in tensors.items()}
        | {"visual_inputs": inputs if inputs.as_model_kwargs() else None}
        for row, inputs in enumerate(visual)
    ]


def pack(rows: list[dict]) -> dict:
    """One row of all rows' documents, padding between them left out, some behind them."""
    real = [row["attention_mask"].bool() for row in rows]
    cat = {
        key: torch.cat([row[key][..., mask] for row, mask in zip(rows, real, strict=True)], dim=-1)
        for key in ("input_ids", "labels", "loss_mask", "position_ids")
    }
    documents = [torch.full((int(mask.sum()),), n, dtype=torch.int32) for n, mask in enumerate(real, start=1)]
    cat["attention_mask"] = torch.cat(documents)
    visual = [row["visual_inputs"] for row in rows if row["visual_inputs"] is not None]
    packed = {key: torch.nn.functional.pad(value.unsqueeze(-2), (0, 7)) for key, value in cat.items()}
    packed["labels"][:, -7:] = IGNORE_INDEX
    return packed | {"visual_inputs": GenericVisualInputs.cat(visual)}


def packed(case: dict[str, Any]) -> dict[str, Any]:
    """The case with its rows as documents of one row."""
    batch = pack(case["rows"])
    real_BS = case["batch"]["attention_mask"].bool()
    logits = torch.nn.functional.pad(case["logits"][real_BS], (0, 0, 0, 7))[None]
    return case | {"batch": batch, "rows": [batch], "logits": logits}


def save_case(source: Any, rows: list[str], file: Path) -> None:
    """Write the HF model's arguments, our batch and its rows of an opened source, for `saved_cases.read`."""
    hf, batch, single = encode(source.processor, source.description, rows)
    torch.save({"hf": hf, "batch": batch, "rows": single}, file)


def cases_of(family: str, path: Path | str) -> dict[str, dict[str, Any]]:
    """All inputs of the family."""
    reference = Reference(path)
    cases = {name: reference.case(rows) for name, rows in inputs_of(family).items()}
    return cases | {name: packed(reference.case(rows)) for name, rows in packed_of(family).items()}


def case_for(path: Path | str, rows: list[str], weights: Sequence[float] = ()) -> dict[str, Any]:
    """What `Reference` says of a single input."""
    return Reference(path).case(rows, weights)


def token_by_token(model: torch.nn.Module) -> torch.nn.Module:
    """Transformers' model, whose gated delta nets go from token to token, as Transformers' own do in
    generation. In chunks they lose digits: 1e-4 of the gradients of decays."""
    for code in {sys.modules[type(module).__module__] for module in model.modules()}:
        if rule := getattr(code, "torch_recurrent_gated_delta_rule", None):
            code.torch_chunk_gated_delta_rule = rule
    return model


def clip_by_clip(model: torch.nn.Module) -> torch.nn.Module:
    """Transformers' model, whose tower gets clips one at a time if it is Kimi's: Transformers 5.23 raises on
    clips of several frames, as it counts the tokens of all of them and joins clips of one length alone."""
    whole = getattr(model, "model", None)
    if not hasattr(whole, "mm_projector"):
        return model

    def features(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **_) -> BaseModelOutputWithPooling:
        pixels, grids = pixel_values.to(whole.dtype), image_grid_thw  # `generate` reads the names
        side = whole.config.vision_config.patch_size
        patches = pixels.reshape(-1, 3, side, side).split(grids.prod(-1).tolist())
        towers = [
            whole.vision_tower(each, grid_thw=grid[None]) for each, grid in zip(patches, grids, strict=True)
        ]
        made = [whole.mm_projector(each.pooler_output).squeeze(1) for each in towers]
        return BaseModelOutputWithPooling(pooler_output=made)

    whole.get_image_features = features
    return model


def as_meant(model: torch.nn.Module) -> torch.nn.Module:
    """Transformers' model without what it does less exactly, or cannot do, by its own fault."""
    return clip_by_clip(token_by_token(model))


class Reference:
    """The Transformers model of a checkpoint in fp32, read from there or given."""

    def __init__(self, path: Path | str, processor: Any = None, model: torch.nn.Module | None = None):
        from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

        from megatron_vlm.models.families import describe

        self.description = describe(AutoConfig.from_pretrained(path))
        self.processor = processor or AutoProcessor.from_pretrained(path)
        if model is None:
            model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        # grouped products of experts take widths of 16 bytes alone
        if "num_moe_experts" in self.description.architecture:
            model.set_experts_implementation("eager")
        self.model = as_meant(model)

    def case(self, rows: list[str], weights: Sequence[float] = ()) -> dict[str, Any]:
        """Its logits, loss and gradients (by hub key) of one input, and our batch of it, whole and in rows.
        The trained tokens have `weights` in turn; without any they all count alike."""
        from megatron_vlm.weight_files import hub_name

        hf, batch, single = encode(self.processor, self.description, rows)
        self.model.zero_grad(set_to_none=True)  # earlier cases keep theirs
        output = self.model(**hf, use_cache=False)
        loss = output.loss
        if weights:
            weight_BS = batch["loss_mask"]
            trained = weight_BS > 0
            weight_BS[trained] = torch.from_numpy(np.resize(np.float32(weights), int(trained.sum())))
            losses_N = torch.nn.functional.cross_entropy(
                output.logits[trained], batch["labels"][trained], reduction="none"
            )
            loss = (losses_N * weight_BS[trained]).sum() / weight_BS.sum()
        loss.backward()
        named = self.model.named_parameters()
        return {
            "batch": batch,
            "rows": single,
            "logits": output.logits.detach(),
            "loss": loss.item(),
            "grads": {hub_name(name, self.description.renames): param.grad for name, param in named},
        }


def measure(
    wanted: dict[str, list[str]],
    path: str,
    references: str,
    layouts: dict[str, tuple[int, ParallelConfig]] = LAYOUTS,
) -> list[dict]:
    """Every wanted layout on its inputs, or on all cases where none is named: rows for reports/parity.json,
    complete on rank 0."""
    from megatron_vlm.parallel import setup

    if not dist.is_initialized():
        setup.init_distributed(layouts[next(iter(wanted))][1], seed=1)
    cases = saved_cases.read(references)
    rows = []
    for name, inputs in wanted.items():
        setup.reset_layout(layouts[name][1], seed=1)
        model = Model(layouts[name][1], path)
        rows += [{"layout": name, "input": each} | model.compare(cases[each]) for each in inputs or cases]
    return rows


def compare(layout: ParallelConfig, path: str, case: dict, per_token_loss: bool = True, **model: Any) -> dict:
    """The worst differences of a single case; `model` sets fields of ModelConfig."""
    return Model(layout, path, case.get("adapter"), per_token_loss, **model).compare(case)


def load_chunks(path: Path | str, run: RunConfig) -> tuple[Any, list]:
    """Return the description of a checkpoint and our chunks of its model, with its weights."""
    from transformers import AutoConfig

    from megatron_vlm.models.families import describe
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.models.weights.importing import import_hf
    from megatron_vlm.parallel import setup

    description = describe(AutoConfig.from_pretrained(path))
    chunks = build_model(run, description, setup.device())
    import_hf(chunks, path, description.weight_map)
    return description, chunks


class Model:
    """Our model of a checkpoint, in a layout that is laid out; `model` sets fields of ModelConfig."""

    def __init__(
        self,
        layout: ParallelConfig,
        path: str,
        adapter: str | None = None,
        per_token_loss: bool = True,
        **model: Any,
    ):
        from megatron_vlm.models.adapters.files import load_adapters
        from megatron_vlm.training import step

        self.run = run = RunConfig(parallel=layout)
        run.model = ModelConfig(**{"dtype": "fp32", **model})
        run.adapter.start = adapter
        description, self.chunks = load_chunks(path, run)
        self.rules = description.rules
        if run.adapter.used:
            load_adapters(self.chunks, Path(path), description.renames, run.adapter.start)
        self.step_loss = None if per_token_loss else mean_of_means
        self.ddp = step.data_parallel(self.chunks, run)

    def compare(self, case: dict) -> dict:
        """The worst differences over all ranks, the same on every rank."""
        from megatron_vlm.training import step
        from megatron_vlm.training.evaluate import logits_of

        layout = self.run.parallel
        mine = [(on_device(batch), rows) for batch, rows in my_micro_batches(case, layout)]
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        loss, _ = step.mean_loss(backward(self.ddp, [batch for batch, _ in mine], self.step_loss))
        if layout.distributed_optimizer:
            gather_sharded_grads(self.ddp)
        worst, seen = (0.0, ""), []
        scales = gradient_scales(case["grads"])
        for key, grad in gradients_of(self.chunks, self.rules):
            seen.append(key)
            expected = case["grads"].get(key)
            expected = torch.zeros_like(grad) if expected is None else expected.to(grad.device)
            worst = max(worst, ((grad - expected).abs().max().item() / scales(key), key))
        reports = logits_of(self.ddp, [batch for batch, _ in mine])
        logits_error = 0.0
        for logits, (batch, rows) in zip(reports, mine, strict=True) if reports else ():
            real_BS = batch["attention_mask"].bool()
            expected = case["logits"][rows][:, : real_BS.shape[1]]
            difference = (logits.cpu().view(*real_BS.shape, -1) - expected)[real_BS]
            logits_error = max([logits_error, *difference.abs().flatten(1).amax(1).tolist()])
        return self._worst_of_all(case, loss, logits_error, worst, seen)

    def _worst_of_all(
        self, case: dict, loss: float, logits_error: float, worst: tuple[float, str], seen: list[str]
    ) -> dict:
        from megatron.core import parallel_state

        worst_of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(worst_of_all, (logits_error, *worst, seen))
        trained = {key for row in worst_of_all for key in row[3]}
        wanted = {key for key, grad in case["grads"].items() if grad is not None and grad.any()}
        assert wanted <= trained, f"without a gradient here: {sorted(wanted - trained)}"
        if self.run.adapter.used:
            assert trained == case["grads"].keys()
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
        ranks = parallel_state.get_data_parallel_world_size() * self.run.parallel.model_size
        assert ranks == dist.get_world_size()
        return result


def backward(ddp: list, micro_batches: list[dict], step_loss: Callable | None = None) -> list[dict]:
    """Gradients as a training step has them, without the step; the reports of its loss, by default the
    tokens'."""
    from megatron_vlm.training.losses import token_losses
    from megatron_vlm.training.step import reduce_gradients

    reports, weight = (step_loss or token_losses)(ddp, micro_batches)
    reduce_gradients(ddp, weight)
    return reports


def mean_of_means(ddp: list, micro_batches: list[dict]) -> tuple[list[dict], float]:
    """What gradients must not be: those of the mean over micro batches of their mean losses."""
    from megatron_vlm.models.vlm import run_schedule, streams_of
    from megatron_vlm.training.losses import token_loss

    def mean_loss(stream: Any, losses_N: torch.Tensor) -> tuple[torch.Tensor, dict]:
        total, report = token_loss(stream, losses_N)
        return total / max(1, len(losses_N)), report

    return run_schedule(ddp, streams_of(ddp, micro_batches), mean_loss), len(micro_batches)


def gradients_of(chunks: list, rules: list) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF key, whole gradient) of every trained parameter of this stage; adapters have peft's keys."""
    from megatron_vlm.models.adapters.model import adapter_tensors
    from megatron_vlm.models.weights.exporting import hf_tensors

    if chunks[0].adapters is None:
        return hf_tensors(chunks, rules, value=lambda weight: getattr(weight, "main_grad", None))
    trained = [name for chunk in chunks for name, weight in chunk.named_parameters() if weight.requires_grad]
    assert chunks[0].adapters.saved or all(name.startswith("adapters.") for name in trained)
    # adapters of what no output depends on are not trained
    return adapter_tensors(chunks, lambda weight: getattr(weight, "main_grad", torch.zeros_like(weight)))


def compare_gradients(
    ddp: list, rules: list, expected: dict[str, torch.Tensor | None]
) -> tuple[tuple[float, str], list[str]]:
    """The worst difference over all ranks with its HF key, and the keys of gradients that no rank has. Those
    that the distributed optimizer shards are gathered before (`gather_sharded_grads`)."""
    worst, seen, scales = (0.0, ""), set(), gradient_scales(expected)
    for key, grad in gradients_of([chunk.module for chunk in ddp], rules):
        seen.add(key)
        theirs = expected.get(key)
        theirs = torch.zeros_like(grad) if theirs is None else theirs
        worst = max(worst, ((grad - theirs).abs().max().item() / scales(key), key))
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, (worst, seen))
    found = set().union(*(each[1] for each in every))
    missing = {key for key, grad in expected.items() if grad is not None and grad.any()} - found
    return max(each[0] for each in every), sorted(missing)


def on_device(batch: dict) -> dict:
    """The batch as the feed delivers it: its pixels on the device."""
    from megatron_vlm.parallel import setup

    visual = batch["visual_inputs"]
    return batch | {"visual_inputs": visual and visual.to(setup.device())}


def gradient_scales(grads: dict[str, torch.Tensor | None]) -> Callable[[str], float]:
    """A function (key) -> what an error in that gradient is measured against: its largest entry.

    A bias is measured against its layer's weight as well: a key projection's bias has a gradient of exactly
    zero in theory (softmax does not see a shift), and of rounding noise in practice. So has a router that
    takes one expert, whose weight is divided by itself: no scale is below ROUNDING of the largest gradient.
    """
    largest_entries = {key: grad.abs().max().item() for key, grad in grads.items() if grad is not None}
    largest = max(largest_entries.values(), default=0.0)

    def scale(key: str) -> float:
        layer = {key, key.removesuffix("bias") + "weight"} if key.endswith("bias") else {key}
        own = max((largest_entries[name] for name in layer if name in largest_entries), default=0.0)
        return max(own, ROUNDING * largest) or 1.0

    return scale


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
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group, rank = buffer.data_parallel_group, buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                part = bucket.grad_data.view(group.size(), -1)[rank].clone()
                dist.all_gather_into_tensor(bucket.grad_data, part, group=group)
