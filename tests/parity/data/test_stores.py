"""Rows, media and shards in a store give what the same files give on disk; a store that fails is told."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest
from loaders import open_loader, take
from prepared_shards import prepare
from programs import TYPED, ask
from sources import write_hf_folder, write_sharegpt

pytest.importorskip("moto", reason="moto is not installed")
from store_server import BUCKET, KEY, SECRET, Line, forget, put, store  # noqa: E402

from megatron_vlm import stores  # noqa: E402
from megatron_vlm.checks import checkpoint_problems, data_problems  # noqa: E402
from megatron_vlm.config import ConfigError, DataConfig, RunConfig  # noqa: E402
from megatron_vlm.data.accounts.drops import BadSample  # noqa: E402
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder  # noqa: E402
from megatron_vlm.data.media.files import read_media  # noqa: E402
from megatron_vlm.messages import printable  # noqa: E402
from megatron_vlm.overrides import apply_overrides  # noqa: E402
from megatron_vlm.supported import resolve  # noqa: E402

ROWS = 23
AT = f"s3://{BUCKET}/data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """JSON Lines with images, the same as parquet, and the same for Energon; and all of it in a store."""
    folder = tmp_path_factory.mktemp("stores")
    source = write_sharegpt(folder / "rows", ROWS)
    write_hf_folder(folder / "saved", source)
    import datasets

    datasets.load_from_disk(str(folder / "saved")).to_parquet(folder / "rows/data.parquet")
    prepare(source, folder / "energon", splits={"train": 0.8, "val": 0.2}, samples_per_shard=5)
    (folder / "msc.yaml").write_text(
        f"profiles: {{mine: {{storage_provider: {{type: s3, options: {{base_path: {BUCKET}}}}}}}}}\n"
    )
    with store(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSC_CONFIG", str(folder / "msc.yaml"))
        put(folder / "rows", f"{AT}/rows")
        put(folder / "energon", f"{AT}/energon")
        yield folder


@pytest.fixture
def encoder(processor):
    return HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("home", [f"s3://{BUCKET}", pytest.param("msc://mine", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", ["rows/data.jsonl", "rows/data.parquet", pytest.param("energon", marks=pytest.mark.long)]
)
def test_a_store_gives_the_batches_of_the_disk_and_resumes(folder, encoder, name, home, workers):
    kind = "energon" if name == "energon" else "hf"
    options = {"seed": 3, "batch": 2, "num_workers": workers}
    local = open_loader(kind, folder / name, encoder, **options)
    expected = take(local, 9)
    there = open_loader(kind, f"{home}/data/{name}", encoder, **options)
    assert take(there, 5) == expected[:5]
    state = there.state_dict()
    there.close()
    resumed = open_loader(kind, f"{home}/data/{name}", encoder, **options)
    resumed.load_state_dict(state)
    assert take(resumed, 4) == expected[5:]
    for each in (local, resumed):
        each.close()


def test_images_may_lie_in_a_store_and_rows_on_disk(folder, encoder, tmp_path):
    rows = tmp_path / "data.jsonl"
    rows.write_bytes((folder / "rows/data.jsonl").read_bytes())
    whole = open_loader("hf", folder / "rows/data.jsonl", encoder, seed=3, num_workers=0)
    apart = open_loader("hf", rows, encoder, seed=3, num_workers=0, media_dir=f"{AT}/rows/")
    assert take(apart, 5) == take(whole, 5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("images/none.jpg", "is not in the store"),
        ("/etc/passwd", "leads out of"),
        ("images/a.lmdb::key", "is not in the store"),
        ("new\nline.jpg", "is not in the store"),
        ("\ud800.jpg", "surrogates"),
        ("é" * 600, "is no name of a file"),
    ],
)
def test_a_medium_that_is_not_there_is_counted_as_missing(folder, name, said):
    with pytest.raises(BadSample, match=said) as bad:
        read_media(name, f"{AT}/rows")
    assert bad.value.reason == "missing_media"


# ---- a store that fails


def problem_of(kind: str, path: str) -> str:
    began = time.monotonic()
    [problem] = data_problems(kind, "data.train_data_path", path)
    assert time.monotonic() - began < 10
    return problem


@pytest.mark.parametrize(("kind", "name"), [("hf", "rows/data.jsonl"), ("energon", "energon")])
def test_a_store_that_fails_is_told_in_a_line_before_a_run(folder, kind, name, monkeypatch):
    assert list(data_problems(kind, "data.train_data_path", f"{AT}/{name}")) == []
    missing = "does not exist; give"
    assert missing in problem_of(kind, f"s3://no-such-bucket/{name}")
    assert missing in problem_of(kind, f"{AT}/none{name}")
    assert "MSC_CONFIG cannot be used (ValueError)" in problem_of(kind, f"msc://nobody/{name}")
    with anew(monkeypatch, AWS_ENDPOINT_URL="http://127.0.0.1:1"):
        said = "the store does not answer (EndpointConnectionError); see AWS_ENDPOINT_URL or MSC_CONFIG."
        assert problem_of(kind, f"{AT}/{name}").endswith(said)
    with anew(monkeypatch, AWS_ENDPOINT_URL="127.0.0.1:1"):
        assert "AWS_ENDPOINT_URL or MSC_CONFIG cannot be used" in problem_of(kind, f"{AT}/{name}")
    with anew(monkeypatch, AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None):
        assert "the store refuses the keys (NoCredentialsError); see AWS" in problem_of(kind, f"{AT}/{name}")


def test_a_checkpoint_may_lie_in_a_store(folder, tiny_gemma3, monkeypatch, tmp_path):
    """Each version is fetched once; what is no checkpoint is told in a line."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    put(tiny_gemma3, f"{AT}/model")
    put(folder / "rows", f"{AT}/model/deeper")
    assert list(checkpoint_problems(f"{AT}/model")) == []
    there = resolve(f"{AT}/model/")
    names = {
        file.name for file in tiny_gemma3.iterdir() if file.suffix in (".json", ".safetensors", ".jinja")
    }
    assert {file.name: file.read_bytes() for file in there.iterdir()} == {
        name: (tiny_gemma3 / name).read_bytes() for name in names
    }
    assert resolve(f"{AT}/model") == there
    with stores.at(f"{AT}/model/config.json") as (client, path):
        client.write(path, b"{}")
    assert list(checkpoint_problems(f"{AT}/model")) == [
        f"model.hf_path: checkpoint {AT}/model: config.json has no model_type; give the folder of a "
        "Hugging Face checkpoint."
    ]
    [said] = checkpoint_problems(f"{AT}/rows")
    assert said.startswith(f"model.hf_path: checkpoint {AT}/rows: no config.json in this folder; give")
    with anew(monkeypatch, AWS_ENDPOINT_URL="http://127.0.0.1:1"):
        [said] = checkpoint_problems(f"{AT}/model")
        assert "the store does not answer" in said
    with pytest.raises(stores.StoreError, match="is no address"):
        stores.is_file(f"{AT}/model/../rows")


@contextmanager
def anew(monkeypatch, **environment: str | None):
    """Stores are asked with other variables meanwhile."""
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value) if value else patch.delenv(name)
        forget()
        yield
    forget()


@pytest.mark.long
@pytest.mark.parametrize("name", ["rows/data.jsonl", "energon"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_no_sample_is_lost_while_a_store_is_away(folder, encoder, name, workers, monkeypatch):
    """boto3 asks again, AWS_MAX_ATTEMPTS times; if the store stays away, the run ends by name."""
    kind = "energon" if name == "energon" else "hf"
    options = {"seed": 3, "num_workers": workers, "shuffle_buffer_size": 2}
    local = open_loader(kind, folder / name, encoder, **options)
    expected = take(local, 12)
    line = Line(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]))
    with anew(monkeypatch, AWS_ENDPOINT_URL=line.address, AWS_MAX_ATTEMPTS="12"):
        there = open_loader(kind, f"{AT}/{name}", encoder, **options)
        got = take(there, 1)
        line.cut()
        Timer(5, line.mend).start()
        assert got + take(there, 11) == expected
        there.close()
    with anew(monkeypatch, AWS_ENDPOINT_URL=line.address):
        there = open_loader(kind, f"{AT}/{name}", encoder, **options)
        line.cut()
        said = r"the store does not answer \(\w*(Connection|Timeout)\w*\); see AWS_ENDPOINT_URL"
        with pytest.raises((RuntimeError, stores.StoreError), match=said):
            take(there, 12)
    local.close()


def test_keys_in_an_address_are_refused_and_never_shown():
    address = f"s3://{KEY}:{SECRET}@bucket/data.jsonl"
    others = [f"S3:/{KEY}:a/{SECRET}@bucket/x", f"msc://{KEY}:a/{SECRET}@bucket/x"]
    presigned = [
        f"s3://bkt/data.jsonl?AWSAccessKeyId={KEY}&Signature={SECRET}",
        f"https://bkt.s3.amazonaws.com/x.jsonl?X-Amz-Credential={KEY}&X-Amz-Signature={SECRET}",
        f"https://{KEY}:{SECRET}@host/x.jsonl",
        f"s3://bkt/x.jsonl?token%3D{SECRET}",  # pasted out of a page that had encoded it
    ]
    for setting in ("data.train_data_path", "data.media_dir", "train.upload_to", "model.hf_path", "run_dir"):
        for value in (address, f"[{address}]", *others, *presigned, f"[a.jsonl,{presigned[0]}]"):
            with pytest.raises(ConfigError, match="an address with keys") as error:
                apply_overrides(RunConfig(), [f"{setting}={value}"])
            assert KEY not in str(error.value) and SECRET not in str(error.value)
    assert printable(address) == "s3://…@bucket/data.jsonl"
    assert [printable(other) for other in others] == ["S3:/…@bucket/x", "msc://…@bucket/x"]
    assert printable("s3://bucket/a:b@c/x") == "s3://bucket/a:b@c/x"
    assert (
        printable(presigned[0]) == "s3://bkt/data.jsonl?…" and printable("s3://b/x-?.tar") == "s3://b/x-?.tar"
    )


@pytest.mark.long
def test_nothing_that_a_run_prints_or_writes_has_a_key(tmp_path, tiny_gemma3):
    """Records may hold presigned addresses of images: they are dropped, and named without their keys."""
    (tmp_path / "rows").mkdir()
    file = write_sharegpt(tmp_path / "rows", 8)
    rows = (tmp_path / "rows" / "data.jsonl").read_text().splitlines()
    signed = {"images": [f"https://bkt.s3.amazonaws.com/a.png?X-Amz-Signature={SECRET}"]}
    bucket = {"images": [f"s3://{KEY}:{SECRET}@bkt/a.png"]}
    bad = [json.dumps(json.loads(rows[0]) | one) for one in (signed, bucket)]
    (tmp_path / "rows" / "data.jsonl").write_text("\n".join([*rows, *bad]) + "\n")
    answer = ask(
        *TYPED,
        *("train", "--recipe=gemma3_tiny_digits", f"--hf_path={tiny_gemma3}", "--dataset_type=hf", "tp=1"),
        *(f"--train_data_path={file}", f"--run_dir={tmp_path}/run", "steps=4", "data.max_drop_share=1"),
    )
    written = [path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert sum("missing_media" in text for text in written) and "a.png?…" in "".join(written)
    assert not any(SECRET in text for text in [answer.stdout, answer.stderr, *written])
