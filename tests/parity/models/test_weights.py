"""Hugging Face weights in and out: bit-equal under every layout, complete, and loadable by Transformers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from parity import RELATIVES
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from weight_trips import EXPERT_LAYOUTS, LAYOUTS, all_tensors, check_equal, check_tensors_equal, round_trips

from megatron_vlm.commands.weights import show_weights
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.models.families import load
from megatron_vlm.models.weights.files import Dequantised, SafetensorsFile, Stored
from megatron_vlm.models.weights.rules import Vocabulary, matches
from megatron_vlm.weight_files import hub_name
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

EXACT = [
    (layout, family)
    for family in TINY_FAMILIES
    for layout in LAYOUTS
    if layout == "TP2" or family not in RELATIVES
]
EXACT += [("TP2", kind) for kind in ("bf16", "hub", "untied", "untied mistral3")] + [("PP2", "untied")]
IN_MEMORY = [
    "gemma3",
    "mistral3",
    "qwen2_5_vl",
    "qianfan_ocr",
]  # whose keys are others in Transformers' memory than on the hub
EXACT += [("TP2", f"{family} as in memory") for family in IN_MEMORY] + [("PP2", "sharded")]
EXACT += [("TP2", "qianfan_ocr as on the hub")]
# how the output layer is stored, what config.json says of it: whether it is the embedding
HEADS = {
    ("equal", True): True,
    ("alone", True): True,
    ("different", True): False,
    ("equal", False): False,
    ("absent", None): True,
    ("equal", None): True,
    ("different", None): False,
}
TIED = {
    f"{family} head {stored}, flag {flag}": tied
    for family in ("gemma3", "mistral3")  # whose default is to tie
    for (stored, flag), tied in HEADS.items()
} | {
    "qwen3_vl head different, flag True": False,
    "qwen2_5_vl head alone, flag True": True,
    "qwen2_5_vl head equal, flag in text": True,
}
# in one layout each: the two families have a head of each kind in different ones
TIED_CELLS = [(("TP2", "PP2")[number % 2], kind) for number, kind in enumerate(TIED)]
ODD = {  # kind -> what differs in the text model
    "gemma3 with attention biases": {"attention_bias": True},
    "qwen3_vl with attention biases": {"attention_bias": True},
    "gemma3 with odd vocabulary": {"vocab_size": 577},
    "qwen3_vl_moe with odd vocabulary": {"vocab_size": 513},
    "qwen3_5 with odd vocabulary": {"vocab_size": 513},
}
EXACT += [("TP2", kind) for kind in ODD] + [("PP2", "gemma3 with odd vocabulary")]
MIXED = "qwen3_5 bf16 with F32 tensors"
EXACT += [("TP2", MIXED)]
EXPERT_FAMILIES = [family for family in TINY_FAMILIES if load(family).has_experts]
# how checkpoints hold experts, apart from what Transformers writes
EXPERT_SOURCES = ["glm4v_moe fused", "glm4v_moe bf16", "qwen3_vl_moe turned"]
PREDICTION = "glm4v_moe with a layer of multi-token prediction"  # after its last, and of another depth
EXACT += [("TP2", "qwen3_5 with multi-token prediction"), ("EP2", PREDICTION)]
EXACT += [("EP2", f"{family} with multi-token prediction") for family in ("qwen3_5_moe", "mistral4")]
EXACT += [(layout, kind) for layout in EXPERT_LAYOUTS for kind in EXPERT_FAMILIES + EXPERT_SOURCES]
FP8_EXPERTS, BUFFERS = "qwen3_vl_moe fp8", "llava with buffers"


def of_one(layout: str, kind: str, *marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Of a test that looks at a single export."""
    return pytest.mark.parametrize(("layout", "kind"), [pytest.param(layout, kind, marks=marks)])


def often(cells: list[tuple[str, str]]) -> list:
    """Those of other families than Gemma3 and Qwen3-VL with experts belong to `make test-long`."""
    others = ("mistral4", *(family for family in TINY_FAMILIES if family not in ("gemma3", "qwen3_vl_moe")))
    long = {cell for cell in cells if cell[1].startswith(others) or cell[0] == "EP2·TP2"}
    return [pytest.param(*cell, marks=pytest.mark.long if cell in long else ()) for cell in cells]


class Sources(dict[str, Path]):
    """Checkpoints as they are found, each made when it is first asked for: every family; bf16, hub tower
    names, untied output weights, FP8."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __missing__(self, kind: str) -> Path:
        self[kind] = _made(kind, self._folder / kind, self)
        return self[kind]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"))


def _made(kind: str, target: Path, of: Sources) -> Path:
    """A checkpoint of that kind in `target`, which may be another one, changed."""
    family = kind.split()[0]
    if kind in TINY_FAMILIES:
        return build_tiny_checkpoint(kind, target)
    if kind in TIED:
        return with_head(of[family], target, *kind.split(" head ")[1].split(", flag "))
    if kind.endswith(" as in memory"):
        return in_memory(of[family], target)
    if kind in ODD:
        return build_tiny_checkpoint(family, target, text=ODD[kind])
    return OTHERS[kind](target, of)


def fp8(of: Sources, target: Path, *grid: int) -> Path:
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    return rewritten(of["mistral3"], target, lambda tensors: quantise(tensors, grid), config)


def fp8_experts(of: Sources, target: Path) -> Path:
    """Experts as Transformers quantises and saves them, in blocks of 16 x 16."""
    settings = FineGrainedFP8Config(weight_block_size=(16, 16))
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=settings))

    def change(tensors):
        for key in [key for key in tensors if ".experts." in key]:
            tensors |= quantiser.convert({key: tensors[key]})

    config = settings.to_dict() | {"quant_method": "fp8"}
    return rewritten(of["qwen3_vl_moe"], target, change, {"quantization_config": config})


def in_memory(source: Path, target: Path) -> Path:
    """The same checkpoint with the names that tensors have in Transformers' memory."""
    shutil.copytree(source, target)
    AutoModelForImageTextToText.from_pretrained(source).save_pretrained(target, save_original_format=False)
    assert not all_tensors(target).keys() & all_tensors(source).keys()
    return target


def sharded(source: Path, target: Path) -> Path:
    """The same checkpoint in several files with an index."""
    shutil.copytree(source, target)
    (target / "model.safetensors").unlink()
    model = AutoModelForImageTextToText.from_pretrained(source)
    model.save_pretrained(target, max_shard_size="200KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


def rewritten(source: Path, target: Path, change, config: dict | None = None) -> Path:
    """A copy of a checkpoint of one file with other tensors and other entries in config.json."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(stored | (config or {})))
    return target


def predicting(tensors):
    """A layer after the last, with what only the multi-token prediction has."""
    last, after = "model.language_model.layers.2.", "model.language_model.layers.3."
    tensors |= {after + key.removeprefix(last): value + 1 for key, value in tensors.items() if last in key}
    tensors[after + "eh_proj.weight"] = torch.randn(64, 128)


def predicting_besides(tensors):
    """A layer after the four of Mistral Small 4's text model."""
    last, after = "language_model.model.layers.3.", "language_model.model.layers.4."
    layer = {key: value for key, value in tensors.items() if last in key}
    assert layer
    tensors |= {key.replace(last, after): value + 1 for key, value in layer.items()}


def mistral4(target: Path) -> Path:
    sizes = TINY_FAMILIES["mistral3"].variants["mistral4"]
    return rewritten(
        build_tiny_checkpoint("mistral3", target.with_name("mistral4"), **sizes), target, predicting_besides
    )


def predicting_apart(tensors):
    """As Qwen3.5 has it, with experts in one tensor, in a tensor each, and in another type."""
    for name in ("experts.gate_up_proj", "experts.0.gate_proj.weight", "experts.0.up_proj.weight"):
        tensors[f"mtp.layers.0.mlp.{name}"] = torch.randn(4, 6, 5)
    tensors["mtp.fc.weight"] = torch.randn(64, 128).bfloat16()


def published(tensors):
    """As Qwen3.5's hub files have them."""
    for key, value in tensors.items():
        kept = key.endswith((".linear_attn.A_log", ".linear_attn.norm.weight"))
        tensors[key] = value if kept else value.bfloat16()


def routers_in_bf16(tensors):
    """As GLM's hub files have them; since 5.24, Transformers keeps them in fp32 and saves them so."""
    for key in [key for key in tensors if key.endswith("mlp.gate.weight")]:
        tensors[key] = tensors[key].bfloat16()


def hub_tower_names(tensors):
    for key in [key for key in tensors if key.startswith("vision_tower.")]:
        tensors[key.replace("vision_tower.", "vision_tower.vision_model.")] = tensors.pop(key)


def untied(tensors):
    embedding = tensors["language_model.model.embed_tokens.weight"]
    tensors["language_model.lm_head.weight"] = embedding.flip(0).contiguous()


def layers_of_no_encoder(tensors):
    """Transformers saves Qianfan-OCR's text layers as an encoder's; the hub's files do not name them so."""
    for key in [key for key in tensors if key.startswith("language_model.model.encoder.")]:
        tensors[key.replace(".encoder.", ".")] = tensors.pop(key)


def with_head(source: Path, target: Path, stored: str, flag: str) -> Path:
    """A copy of a tied checkpoint with an output layer in it, and other flags in its config.json."""

    def change(tensors):
        [name] = [key for key in tensors if key.endswith("embed_tokens.weight")]
        head = "language_model.lm_head.weight" if name.startswith("language_model.") else "lm_head.weight"
        assert head not in tensors
        if stored != "absent":
            tensors[head] = tensors[name].clone()
        if stored == "different":
            tensors[head][-1, -1] += 1
        if stored == "alone":
            del tensors[name]

    rewritten(source, target, change)
    config = json.loads((target / "config.json").read_text())
    for level in (config, config["text_config"]):
        level.pop("tie_word_embeddings", None)
    if flag in ("True", "False"):
        config["tie_word_embeddings"] = flag == "True"
    if flag == "in text":
        config["text_config"]["tie_word_embeddings"] = True
    (target / "config.json").write_text(json.dumps(config))
    return target


def quantise(tensors: dict[str, torch.Tensor], grid: tuple[int, ...]) -> None:
    """The language model's linears as FP8 with a scale each, or one per block of a grid."""
    for key in [key for key in tensors if key.endswith("_proj.weight") and "language_model" in key]:
        weight = tensors[key]
        rows, columns = grid or (1, 1)
        blocks = weight.unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        tensors[key] = (blocks / scale).reshape(weight.shape).to(torch.float8_e4m3fn)
        tensors[key + "_scale_inv"] = scale.reshape(grid).clone()
        tensors[key.replace(".weight", ".activation_scale")] = torch.tensor(0.5)


def fused(source: Path, target: Path) -> Path:
    """GLM's experts as in memory."""
    model = AutoModelForImageTextToText.from_pretrained(source)
    model.save_pretrained(target, save_original_format=False)
    return target


def turned(tensors):
    """Qwen3-VL's experts as its hub files have them."""
    tensors |= {key: value.mT.contiguous() for key, value in tensors.items() if ".experts." in key}


def predicted(target: Path) -> Path:
    shallow = build_tiny_checkpoint("glm4v_moe", target.with_name("shallow"), text={"num_hidden_layers": 3})
    return rewritten(shallow, target, predicting)


OTHERS = {
    "bf16": lambda at, of: build_tiny_checkpoint("gemma3", at, dtype=torch.bfloat16),
    "hub": lambda at, of: rewritten(of["gemma3"], at, hub_tower_names),
    "untied": lambda at, of: rewritten(of["gemma3"], at, untied, {"tie_word_embeddings": False}),
    "untied mistral3": lambda at, of: build_tiny_checkpoint(
        "mistral3", at, text={"tie_word_embeddings": False}
    ),
    "fp8 per tensor": lambda at, of: fp8(of, at),
    "fp8 per block": lambda at, of: fp8(of, at, 4, 2),
    FP8_EXPERTS: lambda at, of: fp8_experts(of, at),
    BUFFERS: lambda at, of: rewritten(of["llava"], at, with_buffers),
    MIXED: lambda at, of: rewritten(of["qwen3_5"], at, published),
    "qianfan_ocr as on the hub": lambda at, of: rewritten(of["qianfan_ocr"], at, layers_of_no_encoder),
    "sharded": lambda at, of: sharded(of["qwen3_vl"], at),
    PREDICTION: lambda at, of: predicted(at),
    "mistral4 with multi-token prediction": lambda at, of: mistral4(at),
    **{
        f"{family} with multi-token prediction": lambda at, of, family=family: rewritten(
            of[family], at, predicting_apart
        )
        for family in ("qwen3_5", "qwen3_5_moe")
    },
    "glm4v_moe fused": lambda at, of: fused(of["glm4v_moe"], at),
    "glm4v_moe bf16": lambda at, of: rewritten(
        build_tiny_checkpoint("glm4v_moe", at.with_name("router_in_fp32"), dtype=torch.bfloat16),
        at,
        routers_in_bf16,
    ),
    "qwen3_vl_moe turned": lambda at, of: rewritten(of["qwen3_vl_moe"], at, turned),
}


@pytest.fixture(scope="module")
def exports(request, sources, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Of the cells that are tested now."""
    folder, wanted = tmp_path_factory.mktemp("exports"), {}
    for item in request.session.items:
        cell = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and {"layout", "kind"} <= cell.keys():
            wanted[cell["layout"], cell["kind"]] = None
    for processes in (1, 2):
        keys = [key for key in wanted if (1 if key[0] == "TP1" else 2) == processes]
        jobs = [(layout, str(sources[kind]), str(folder / f"{layout}-{kind}")) for layout, kind in keys]
        run_distributed(processes, round_trips, jobs)
    return {(layout, kind): folder / f"{layout}-{kind}" for layout, kind in wanted}


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_read_their_rows_of_a_vocabulary(tmp_path, ranks):
    """Also of blocks with scales, and where ranks have no row."""
    values, scale = torch.randn(10, 4).to(torch.float8_e4m3fn), torch.rand(4, 2)
    save_file({"plain": values.float(), "fp8": values}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        fp8 = Dequantised(file.get_slice("fp8"), scale, ([row // 3 for row in range(10)], [0, 0, 1, 1]))
        for source, whole in ((file.get_slice("plain"), values.float()), (fp8, fp8[...])):
            parts = [Vocabulary(10).part(source, [10, 4], rank, ranks) for rank in range(ranks)]
            assert {len(part) for part in parts} == {-(-10 // ranks)}
            rows, padding = torch.cat(parts).tensor_split([10])
            assert torch.equal(rows, whole) and not padding.any()
            [joined] = Vocabulary(10).join(parts)
            assert torch.equal(joined, whole)


def loaded_by_transformers(folder: Path, **kwargs):
    from transformers import AutoModelForImageTextToText

    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize(("layout", "kind"), often(EXACT))
def test_round_trip_is_bit_equal(exports, sources, layout, kind):
    check_equal(exports[layout, kind], sources[kind])


# ---- tied or not ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TIED)
def test_tied_is_what_transformers_makes_of_flag_and_weights(sources, kind):
    from megatron_vlm.models.hf import look_at, open_source

    model = loaded_by_transformers(sources[kind])
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == TIED[kind]
    assert open_source(sources[kind]).description.hf_config.tie_word_embeddings == TIED[kind]
    assert look_at(sources[kind])[0].hf_config.tie_word_embeddings == TIED[kind]


@pytest.mark.parametrize(("layout", "kind"), often(TIED_CELLS))
def test_an_export_holds_the_output_layer_as_its_source_does(exports, sources, layout, kind):
    check_equal(exports[layout, kind], sources[kind])
    model = loaded_by_transformers(exports[layout, kind])
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == TIED[kind]
    flags = [
        json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
        for folder in (exports[layout, kind], sources[kind])
    ]
    assert flags[0] == (flags[1] if TIED[kind] else False)


def imported_then_without_weights(source: str, run_dir: str) -> list[torch.Tensor]:
    """The output layer of a run that was imported from `source`, whose weights are gone since."""
    from megatron_vlm.commands.runs import import_run, open_run

    config = RunConfig(run_dir=run_dir, model=ModelConfig(hf_path=source, dtype="fp32"))
    import_run(config)
    for file in Path(source).glob("*.safetensors"):
        file.unlink()
    [chunk], _ = open_run(config)
    return [weight.detach() for name, weight in chunk.named_parameters() if "output_layer" in name]


@pytest.mark.parametrize("kind", ["mistral3 head different, flag None", "mistral3 head equal, flag None"])
def test_a_run_stays_as_it_was_imported(sources, tmp_path, kind):
    shutil.copytree(sources[kind], tmp_path / "source")
    paths = str(tmp_path / "source"), str(tmp_path / "run")
    [held] = run_distributed(1, imported_then_without_weights, *paths)
    head = all_tensors(sources[kind])["language_model.lm_head.weight"]
    assert len(held) == (not TIED[kind]) and all(torch.equal(weight, head) for weight in held)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [pytest.param("TP2", "fp8 per tensor", marks=pytest.mark.long), ("TP2", "fp8 per block")],
)
def test_fp8_weights_are_multiplied_by_their_scales(exports, sources, layout, kind):
    """Transformers' own dequantisation, with accelerate installed, gives the same numbers."""
    stored, exported = all_tensors(sources[kind]), all_tensors(exports[layout, kind])
    expected = {key: tensor for key, tensor in stored.items() if "scale" not in key}
    quantised = [key for key, tensor in expected.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(quantised) == 4 * 7
    for key in quantised:
        scale, shape = stored[key + "_scale_inv"], expected[key].shape
        if scale.dim():
            scale = scale.repeat_interleave(shape[0] // 4, 0).repeat_interleave(shape[1] // 2, 1)
        expected[key] = expected[key].float() * scale
    check_tensors_equal(exported, expected)


@of_one("EP2", FP8_EXPERTS)
def test_fused_experts_in_fp8_are_what_transformers_makes_of_them(exports, sources, layout, kind):
    """By its own operation: loading them on a CPU, Transformers 5.23 leaves their scales out."""
    exported, stored = all_tensors(exports[layout, kind]), all_tensors(sources[kind])
    experts = [key for key in exported if ".experts." in key]
    assert len(experts) > 4 and all(stored[key].dtype == torch.float8_e4m3fn for key in experts)
    assert all(stored[key + "_scale_inv"].dim() == 3 for key in experts)
    expected = {key: tensor for key, tensor in stored.items() if "scale" not in key}
    for key in experts:
        scales = stored[key + "_scale_inv"]
        expected[key] = Fp8Dequantize(None)._dequantize_one(stored[key], scales, torch.float32)
    check_tensors_equal(exported, expected)


@of_one("TP2", BUFFERS)
def test_buffers_that_models_make_themselves_are_ignored_as_by_transformers(exports, sources, layout, kind):
    loaded_by_transformers(sources[kind])
    check_equal(exports[layout, kind], sources["llava"])
    assert len(all_tensors(sources[kind])) == len(all_tensors(sources["llava"])) + 3


@of_one("TP2", "fp8 per block")
def test_export_of_fp8_weights_says_that_they_are_no_longer_fp8(exports, sources, layout, kind):
    exported, source = exports[layout, kind], sources[kind]
    assert "quantization_config" in json.loads((source / "config.json").read_text())
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    assert not any("scale" in key for key in all_tensors(exported))


@of_one("TP2", "gemma3")
def test_export_has_everything_but_weights_as_it_was(exports, sources, layout, kind):
    exported, source = exports[layout, kind], sources[kind]
    names = {file.name for file in source.iterdir()} - {"model.safetensors"}
    assert {"config.json", "tokenizer.json", "processor_config.json", "chat_template.jinja"} <= names
    for name in names:
        assert (exported / name).read_bytes() == (source / name).read_bytes()


LOADED = [(layout, kind) for layout, kind in EXACT if layout in LAYOUTS and kind in TINY_FAMILIES]


@pytest.mark.parametrize(("layout", "kind"), often(LOADED))
def test_transformers_loads_the_export_without_a_missing_key(exports, layout, kind):

    loaded_by_transformers(exports[layout, kind])
    AutoProcessor.from_pretrained(exports[layout, kind])


# ---- files written in place -------------------------------------------------------------------------------


def test_a_file_written_in_parts_and_out_of_order_is_what_safetensors_reads(tmp_path):
    tensors = {"odd": torch.randn(3).bfloat16(), "rows": torch.randn(4, 2, 3), "one": torch.tensor(2.0)}
    file = SafetensorsFile(
        tmp_path / "x.safetensors", [Stored(k, t.dtype, (*t.shape,)) for k, t in tensors.items()]
    )
    for row in (2, 0, 3, 1):
        file.write("rows", tensors["rows"][row].t().contiguous().t(), row)
    file.write("one", tensors["one"])
    file.write("odd", tensors["odd"].double())
    file.close()
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_a_file_with_a_row_missing_is_refused(tmp_path):
    file = SafetensorsFile(tmp_path / "x.safetensors", [Stored("rows", torch.float32, (4, 2))])
    file.write("rows", torch.zeros(2), row=1)
    with pytest.raises(AssertionError, match="24 bytes were not written"):
        file.close()


# ---- checkpoints that do not fit --------------------------------------------------------------------------


def refusals(sources: list[str]) -> list[str]:
    """What import says to each of them."""
    from transformers import AutoConfig

    from megatron_vlm.models.families import describe
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.models.weights.importing import import_hf
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    messages = []
    for source in sources:
        hf_config = AutoConfig.from_pretrained(source)
        description = describe(hf_config)
        chunks = build_model(RunConfig(), description, setup.device())
        for weight in chunks[0].parameters():
            weight.data.fill_(7)
        with pytest.raises(ValueError) as refused:
            import_hf(chunks, source, description.weight_map)
        untouched = all((weight == 7).all() for weight in chunks[0].parameters())
        assert untouched == (spoil.__name__ not in source)  # nothing else is read before it is refused
        messages.append(str(refused.value))
    return messages


def last_norm(tensors) -> str:
    [key] = [key for key in tensors if key.endswith(("language_model.norm.weight", "model.norm.weight"))]
    return key


def add_key(tensors):
    tensors[last_norm(tensors).replace("norm", "extra")] = torch.zeros(2)


def drop_key(tensors):
    del tensors[last_norm(tensors)]


def reshape_key(tensors):
    tensors[last_norm(tensors)] = torch.zeros(65)


def add_layer(tensors):
    """After GLM's layer for multi-token prediction, which is not imported."""
    tensors[last_norm(tensors).replace("norm", "layers.5.input_layernorm")] = torch.zeros(64)


def shift_gate_and_up(tensors):
    """As many rows together as there should be."""
    kinds = ("0.mlp.gate_proj", "1.mlp.gate_proj", "0.mlp.shared_expert.gate_proj")
    text, ends = last_norm(tensors).removesuffix("norm.weight"), [f".{kind}.weight" for kind in kinds]
    names = [key for end in ends for key in tensors if key.startswith(text) and key.endswith(end)]
    name = names[0]  # the first that is for all tokens
    gate, up = tensors[name], tensors[name.replace("gate", "up")]
    tensors[name] = torch.cat((gate, up[:2]))
    tensors[name.replace("gate", "up")] = up[2:].contiguous()


def drop_expert(tensors):
    del tensors[last_norm(tensors).replace("norm", "layers.2.mlp.experts.3.up_proj")]


def add_expert(tensors):
    prefix = last_norm(tensors).replace("norm.weight", "layers.2.mlp.experts.")
    tensors[f"{prefix}8.down_proj.weight"] = tensors[f"{prefix}7.down_proj.weight"].clone()


def fuse_fewer_experts(tensors):
    key = last_norm(tensors).replace("norm.weight", "layers.2.mlp.experts.down_proj")
    tensors[key] = tensors[key][:7].contiguous()


def _first_mlp(tensors) -> str:
    return last_norm(tensors).replace("norm", "layers.0.mlp.down_proj")


def spell_twice(tensors):
    """Under a name found in the wild, too."""
    key = _first_mlp(tensors)
    tensors[key.replace("language_model.model.", "model.language_model.")] = tensors[key] + 1


def as_integers(tensors):
    tensors[_first_mlp(tensors)] = (100 * tensors[_first_mlp(tensors)]).to(torch.int8)


def as_fp8(tensors):
    tensors[_first_mlp(tensors)] = tensors[_first_mlp(tensors)].to(torch.float8_e4m3fn)


def scale_of_no_fp8(tensors):
    tensors[_first_mlp(tensors) + "_scale_inv"] = torch.tensor(2.0)


def wrap(tensors):
    """As `module.state_dict()` of a wrapped model has them."""
    for key in list(tensors):
        tensors[f"module.{key}"] = tensors.pop(key)


def with_buffers(tensors):
    """As Transformers wrote them up to 4.31: no parameter, and of any type."""
    layers = last_norm(tensors).removesuffix("norm.weight") + "layers."
    tensors |= {f"{layers}{i}.self_attn.rotary_emb.inv_freq": torch.rand(8) for i in range(2)}
    tower = next(key for key in tensors if "position_embedding" in key).rpartition("position_embedding")[0]
    tensors[tower + "position_ids"] = torch.arange(16)[None]


def spoil(tensors):
    tensors[_first_mlp(tensors)][3, 5] = float("nan")


# what is wrong: the message, where K is the last norm's key but for "norm.weight"
BROKEN = {
    add_key: r"1 keys that this FAMILY does not have, such as 'Kextra.weight' \(2,\)",
    drop_key: r"lacks 'Knorm.weight': \(64,\), of which .*final_layernorm.weight is \(64,\)",
    reshape_key: r"'Knorm.weight' is \(65,\) and must be \(64,\), of which .*final_layernorm.weight is \(64",
    add_layer: r"1 keys that this FAMILY does not have, such as 'Klayers.5.input_layernorm.weight' \(64,\)",
    shift_gate_and_up: r"'Klayers.[01].mlp.(shared_expert.)?gate_proj.weight' is "
    r"\((1[36][02]|34), 64\) and must be \((1[26]|32)",
}
BROKEN_EXPERTS = {
    ("glm4v_moe", drop_expert): r"lacks 'Klayers.2.mlp.experts.3.up_proj.weight': \(48, 64\), of which",
    ("glm4v_moe", add_expert): r"such as 'Klayers.2.mlp.experts.8.down_proj.weight' \(64, 48\)",
    ("qwen3_vl_moe", fuse_fewer_experts): r"'Klayers.2.mlp.experts.down_proj' is \(7, .* must be \(8, ",
}
MLP = "'Klayers.0.mlp.down_proj.weight'"
BROKEN_VALUES = {  # Transformers loads each of them
    (
        "gemma3",
        spell_twice,
    ): "down_proj.weight of .* and .*down_proj.weight of .* are the same tensor .*; remove",
    (
        "gemma3",
        wrap,
    ): "lacks .*; is the download complete, and does a name such as module.* begin as the hub's do.$",
    ("gemma3", as_integers): MLP + " is stored as I8; .*: take the checkpoint in bf16",
    ("gemma3", as_fp8): MLP + " is stored as F8_E4M3 without a scale",
    ("gemma3", scale_of_no_fp8): "does not have, such as " + MLP[:-1] + "_scale_inv' \\(\\)",
    ("gemma3", spoil): MLP + " holds values that are not finite; .*: download it again",
}
CASES = (
    {
        (family, change): text
        for family in TINY_FAMILIES
        for change, text in BROKEN.items()
        if family not in RELATIVES and (family != "glm4v" or change != shift_gate_and_up)  # one tensor there
    }
    | BROKEN_EXPERTS
    | BROKEN_VALUES
)


@pytest.fixture(scope="module")
def refused(request, sources, tmp_path_factory) -> dict[tuple, str]:
    """Of the cases that are tested now."""
    folder, asked = tmp_path_factory.mktemp("broken"), {}
    for item in request.session.items:
        case = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and {"family", "change"} <= case.keys():
            family, change = case["family"], case["change"]
            name = folder / f"{family}-{change.__name__}"
            asked[family, change] = str(rewritten(sources[family], name, change))
    return dict(zip(asked, run_distributed(1, refusals, list(asked.values()))[0], strict=True))


def often_refused() -> list:
    """What is the same in every family is Gemma3's in `make test`."""
    long = {case for case in CASES if case[0] != "gemma3" and case not in BROKEN_EXPERTS}
    return [
        pytest.param(
            family,
            change,
            id=f"{family}-{change.__name__}",
            marks=pytest.mark.long if (family, change) in long else (),
        )
        for family, change in CASES
    ]


@pytest.mark.parametrize(("family", "change"), often_refused())
def test_a_checkpoint_that_does_not_fit_is_refused_by_key_and_shapes(refused, sources, family, change):
    norm = hub_name(last_norm(all_tensors(sources[family])), load(family).renames)
    prefix = norm.removesuffix("norm.weight")
    expected = CASES[family, change].replace("FAMILY", family).replace("'K", f"'{re.escape(prefix)}")
    assert re.search(expected, refused[family, change]), refused[family, change]


# ---- the table of a family's mapping ----------------------------------------------------------------------


def test_show_weights_prints_where_every_tensor_of_a_checkpoint_goes(tmp_path, capsys):
    folder = build_tiny_checkpoint("kimi_k25", tmp_path / "kimi")
    show_weights(str(folder))
    head, *rows = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert head == ["Hugging Face", "Megatron", "parallel", "transform"]
    layers = "language_model.decoder.layers.*."
    experts = ["model.language_model.layers.*.mlp.experts.down_proj", f"{layers}mlp.experts.*.linear_fc2"]
    assert [*experts, "experts", "8 fused"] in rows
    output = ["model.language_model.layers.*.self_attn.o_proj.weight"]
    assert [*output, f"{layers}self_attention.linear_proj.weight", "row"] in rows
    patterns = []
    for name in [row[0] for row in rows]:
        start, *braces = re.split(r"[{}]", name)
        patterns += [start + part + braces[1] for part in braces[0].split(",")] if braces else [start]
    names = [hub_name(key, load("kimi_k25").renames) for key in all_tensors(folder)]
    assert len(names) > 50
    assert [name for name in names if not any(matches(pattern, name) for pattern in patterns)] == []
