"""Energon datasets as others have them: shards that Energon prepared, of each of its sample types."""

from __future__ import annotations

import json
import pickle
import tarfile
from pathlib import Path

import pytest
import yaml
from megatron.energon import (
    Cooker,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.flavors import BaseWebdatasetFactory
from noisy_media import film
from prepared_shards import add_part
from sources import image_bytes

from megatron_vlm.config import ConfigError, DataConfig
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.chatml.sample import ChatMLSample, make_sample
from megatron_vlm.data.encode.chat_template import text_of
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider, EnergonSamples
from megatron_vlm.data.on_disk.paths import sources_of
from megatron_vlm.models.hf import open_source

IMAGES = [image_bytes(number) for number in range(4)]
FILMS = [film((32, 32), 2 + number) for number in range(4)]


def field_map(**places: str) -> dict:
    return {"field_map": places}


def type_of(name: str, module: str = "megatron.energon") -> dict:
    return {"sample_type": {"__module__": module, "__class__": name}}


def js(**content) -> bytes:
    return json.dumps(content).encode()


# name -> (parts of sample n, dataset.yaml, (question, trained reply), media)
TYPES = {
    "VQASample": (
        lambda n: {"jpg": IMAGES[n], "json": js(q=f"What is {n}?", a=[f"no {n}", f"a {n}"], w=[0.2, 0.8])},
        type_of("VQASample")
        | field_map(image="jpg", context="json[q]", answers="json[a]", answer_weights="json[w]"),
        lambda n: (f"What is {n}?", f"a {n}", [IMAGES[n]]),
    ),
    "VQAWebdataset": (
        lambda n: {"jpg": IMAGES[n], "q.txt": f"What is {n}?".encode(), "a.txt": f"a {n}".encode()},
        {"__module__": "megatron.energon", "__class__": "VQAWebdataset"}
        | field_map(image="jpg", context="q.txt", answers="a.txt"),
        lambda n: (f"What is {n}?", f"a {n}", [IMAGES[n]]),
    ),
    "CaptioningSample": (
        lambda n: {"jpg": IMAGES[n], "txt": f"caption {n}".encode()},
        type_of("CaptioningSample") | field_map(image="jpg", caption="txt"),
        lambda n: ("", f"caption {n}", [IMAGES[n]]),
    ),
    "OCRSample": (
        lambda n: {"png": IMAGES[n], "json": js(text=f"line {n}", words=["line", str(n)])},
        type_of("OCRSample") | field_map(image="jpg,png", text="json[text]", words_text="json[words]"),
        lambda n: ("", f"line {n}", [IMAGES[n]]),
    ),
    "MultiChoiceVQASample": (
        lambda n: {"jpg": IMAGES[n], "json": js(q="Which?", c=["cat", "dog"], i=n % 2)},
        type_of("MultiChoiceVQASample")
        | field_map(image="jpg", context="json[q]", choices="json[c]", correct_choice_idx="json[i]"),
        lambda n: (
            "Which?\nA. cat\nB. dog\nAnswer with the option's letter from the given choices directly.",
            "AB"[n % 2],
            [IMAGES[n]],
        ),
    ),
    "InterleavedSample": (
        lambda n: {
            "0.jpg": IMAGES[n],
            "1.jpg": IMAGES[0],
            "json": js(s=["0.jpg", f"one {n}", "1.jpg", "two"]),
        },
        type_of("InterleavedSample") | field_map(sequence="json[s]"),
        lambda n: ("", f"one {n}two", [IMAGES[n], IMAGES[0]]),
    ),
    "VidQASample": (
        lambda n: {"mp4": FILMS[n], "json": js(q=f"What is {n}?", a=[f"a {n}", f"no {n}"], w=[0.7, 0.3])},
        type_of("VidQASample")
        | field_map(video="mp4", context="json[q]", answers="json[a]", answer_weights="json[w]"),
        lambda n: (f"What is {n}?", f"a {n}", [FILMS[n]]),
    ),
    "VidQAWebdataset": (
        lambda n: {
            "mp4": FILMS[n],
            "q.txt": f"What is {n}?".encode(),
            "a.json": json.dumps(["a", "b", "b"]).encode(),
        },
        {"__module__": "megatron.energon", "__class__": "VidQAWebdataset"}
        | field_map(video="mp4", context="q.txt", answers="a.json"),
        lambda n: (f"What is {n}?", "b", [FILMS[n]]),
    ),
    "TextSample": (
        lambda n: {"txt": f"text {n}".encode()},
        type_of("TextSample") | field_map(text="txt"),
        lambda n: ("", f"text {n}", []),
    ),
    "TextWebdataset": (
        lambda n: {"json": js(body=[{"said": f"text {n}"}])},
        {"__module__": "megatron.energon", "__class__": "TextWebdataset"}
        | field_map(text="json[body][0][said]"),
        lambda n: ("", f"text {n}", []),
    ),
    "ChatMLWebdataset": (
        lambda n: {
            "jpgs": pickle.dumps([IMAGES[n]]),
            "json": json.dumps(
                [{"from": "human", "value": f"<image>{n}?"}, {"from": "gpt", "value": f"a {n}"}]
            ).encode(),
        },
        {"__module__": "megatron.bridge.data.energon.task_encoder_utils", "__class__": "ChatMLWebdataset"}
        | field_map(imgs="jpgs", conversation="json"),
        lambda n: (f"{n}?", f"a {n}", [IMAGES[n]]),
    ),
    "CrudeWebdataset": (
        lambda n: {"jpg": IMAGES[n], "json": js(question=f"What is {n}?", answer=f"a {n}")},
        {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": {"kind": "mine"}},
        lambda n: (f"What is {n}?", f"a {n}", [IMAGES[n]]),
    ),
    "img2dataset": (
        lambda n: {"jpg": IMAGES[n], "txt": f"caption {n}".encode()},
        {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"},
        lambda n: ("", f"caption {n}", [IMAGES[n]]),
    ),
}


def prepared(folder: Path, parts, description: dict) -> Path:
    """Four samples in two shards that `energon prepare` has indexed, and its dataset.yaml."""
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"shard_{shard}.tar", "w") as tar:
            for n in (2 * shard, 2 * shard + 1):
                for name, content in parts(n).items():
                    add_part(tar, f"sample{n}.{name}", content)
    names = [f"shard_{shard}.tar" for shard in range(2)]
    BaseWebdatasetFactory.prepare_dataset(folder, names, split_parts_ratio=[("train", 1.0)], workers=1)
    (folder / ".nv-meta/dataset.yaml").write_text(yaml.safe_dump(description))
    return folder


def samples_of(folder: Path, **settings) -> dict[str, ChatMLSample]:
    """By key, as they come to the encoder."""
    data = DataConfig(train_data_path=str(folder), num_workers=0, **settings)
    samples = EnergonSamples(data, sources_of(str(folder)), RAW, "train")
    return {sample.__key__: sample for sample in map(samples.sample, range(len(samples)))}


class RAW:
    decoder = None


def said(sample: ChatMLSample) -> tuple[str, str, list]:
    """(texts of users, texts that are trained, images and videos)"""
    assert sample.problem is None, sample.problem
    texts = {is_user: "" for is_user in (True, False)}
    for turn in sample.messages:
        texts[turn["role"] == "user"] += text_of(turn)
    return texts[True], texts[False], [*(sample.imgs or []), *(sample.videos or [])]


@pytest.mark.parametrize("name", TYPES)
def test_each_sample_type_that_energon_prepared_is_read(name, tmp_path):
    parts, description, expected = TYPES[name]
    samples = samples_of(prepared(tmp_path / "shards", parts, description))
    assert sorted(samples) == [f"sample{n}" for n in range(4)]
    for n in range(4):
        assert said(samples[f"sample{n}"]) == expected(n)


# ---- what the user says in place of a dataset.yaml

OWN = """
def cooker(parts):
    if parts["json"]["n"] == 1:
        return None
    asked = {"role": "user", "content": f"<image>{parts['note.txt']}"}
    return {"messages": [asked, {"role": "assistant", "content": "yes"}], "images": ["pic.jpg"]}


def loader(parts):
    return {"image": parts["pic.jpg"], "context": parts["note.txt"], "answers": [str(parts["json"]["n"])]}


def fails(parts):
    return parts["no such"]
"""
UNKNOWN = {"sample_type": {"__module__": "theirs", "__class__": "TheirSample"}, "sample_loader": "x.py:f"}


def own_parts(n: int) -> dict[str, bytes]:
    return {"pic.jpg": IMAGES[n], "note.txt": f"note {n}".encode(), "json": js(n=n, theirs=f"said {n}")}


@pytest.fixture
def own(tmp_path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return prepared(tmp_path / "shards", own_parts, UNKNOWN)


def test_a_cooker_reads_any_shard_and_leaves_out_what_it_gives_none_for(own, tmp_path):
    samples = samples_of(own, cooker=f"{tmp_path}/own.py:cooker")
    assert said(samples["sample2"]) == ("note 2", "yes", [IMAGES[2]])
    assert samples["sample1"].problem.reason == "left_out"


def test_columns_name_parts_and_keys_of_the_part_json(own):
    columns = {"images": "pic.jpg", "question": "note.txt", "answer": "json[theirs]"}
    assert said(samples_of(own, columns=columns)["sample3"]) == ("note 3", "said 3", [IMAGES[3]])
    assert said(samples_of(own, columns=columns | {"answer": "theirs"})["sample3"])[1] == "said 3"
    lost = samples_of(own, columns=columns | {"answer": "json[ours]"})["sample3"].problem
    assert lost.reason == "bad_conversation" and "no json[ours] among its parts json, n, note" in lost.detail


def test_a_sample_loader_that_the_user_names_gives_the_fields_of_the_sample_type(own, tmp_path):
    description = own / ".nv-meta/dataset.yaml"
    description.write_text(yaml.safe_dump(type_of("VQASample") | {"sample_loader": "sample_loader.py:f"}))
    with pytest.raises(ValueError, match="made by sample_loader.py:f, code that is not run; look at it, and"):
        samples_of(own)
    samples = samples_of(own, sample_loader=f"{tmp_path}/own.py:loader")
    assert said(samples["sample3"]) == ("note 3", "3", [IMAGES[3]])


def test_what_fails_in_a_cooker_ends_the_run_with_its_line(own, tmp_path):
    with pytest.raises(ConfigError, match=r"data.cooker: .*own.py:fails: KeyError: 'no such' in line 14;"):
        samples_of(own, cooker=f"{tmp_path}/own.py:fails")


def test_a_type_that_is_not_known_is_named(own):
    with pytest.raises(ValueError, match="of the type TheirSample, and those read are VQASample"):
        samples_of(own)


def test_a_pickle_with_code_in_it_is_dropped(tmp_path):
    parts, description, _ = TYPES["ChatMLWebdataset"]
    marker = tmp_path / "executed"
    evil = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    samples = samples_of(prepared(tmp_path / "s", lambda n: parts(n) | {"jpgs": evil}, description))
    assert {sample.problem.reason for sample in samples.values()} == {"unsafe_pickle"}
    assert not marker.exists()


# ---- a training loader over several of them


def test_a_metadataset_of_foreign_datasets_is_trained_on_and_resumed(tmp_path, tiny_gemma3):
    names = ("VQASample", "CaptioningSample", "ChatMLWebdataset")
    folders = [prepared(tmp_path / name, *TYPES[name][:2]) for name in names]
    blend = [{"repetitions": 1, "path": str(folder)} for folder in folders]
    split = {"blend_epochized": blend}
    description = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": split}}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(description))
    source = open_source(tiny_gemma3)
    data = DataConfig(train_data_path=str(tmp_path / "all.yaml"), num_workers=0, seq_length=512)

    def loader():
        encoder = HFEncoderVLMTaskEncoder(source.processor, data, source.needs)
        options = {"micro_batch_size": 2, "rank": 0, "world_size": 1, "seed": 3}
        return EnergonProvider(data).train_loader(encoder, **options)

    first = loader()
    batches = [next(iter(first)) for _ in range(2)]
    assert all(batch["labels"].ne(-100).any() for batch in batches)
    state = json.loads(json.dumps(first.state_dict()))
    after = [next(iter(first))["__key__"] for _ in range(3)]
    second = loader()
    second.load_state_dict(state)
    assert [next(iter(second))["__key__"] for _ in range(3)] == after


# ---- Energon's own loader, in a program that is not ours


@stateless
def cook_note(sample: dict) -> ChatMLSample:
    record = {"images": [sample["pic.jpg"]], "question": sample["note.txt"].decode(), "answer": "yes"}
    conversation = parse_record(record)
    return make_sample(conversation, conversation.media["image"], [], **basic_sample_keys(sample))


class Noting(HFEncoderVLMTaskEncoder):
    """With a cooker of its own, and more in each encoded sample."""

    cookers = [Cooker(cook_note)]

    @stateless
    def encode_sample(self, sample: ChatMLSample) -> Sample:
        encoded = super().encode_sample(sample)
        encoded.loss_mask[encoded.loss_mask > 0] = 0.5
        return encoded


@pytest.mark.parametrize(
    ("encoder_class", "parts", "weight"),
    [(HFEncoderVLMTaskEncoder, TYPES["CrudeWebdataset"][0], 1.0), (Noting, own_parts, 0.5)],
)
def test_the_encoder_works_with_energons_own_loader(tmp_path, tiny_gemma3, encoder_class, parts, weight):
    folder = prepared(tmp_path / "shards", parts, TYPES["CrudeWebdataset"][1])
    source = open_source(tiny_gemma3)
    encoder = encoder_class(source.processor, DataConfig(seq_length=4096), source.needs)

    def loader():
        dataset = get_train_dataset(
            folder,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=2,
            shuffle_buffer_size=4,
            max_samples_per_sequence=4,
            task_encoder=encoder,
        )
        return get_savable_loader(dataset)

    first = loader()
    batches = [batch for batch, _ in zip(first, range(2), strict=False)]
    keys = sorted(key for batch in batches for row in batch["__key__"] for key in row)
    assert keys == [f"sample{n}" for n in range(4)]
    assert all(batch["loss_mask"].max() == weight and batch["visual_inputs"] for batch in batches)
    state = first.save_state_rank()
    after = [batch["__key__"] for batch, _ in zip(first, range(3), strict=False)]
    second = loader()
    second.restore_state_rank(state)
    assert [batch["__key__"] for batch, _ in zip(second, range(3), strict=False)] == after
