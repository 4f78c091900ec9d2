"""Tokenizers in the ways in which language models are published, as files in a checkpoint's folder."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tiny import qwen
from tiny.byte_level import byte_level_bpe
from tiny.corpus import default_corpus

TEKKEN = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"]
FILES = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "tekken")


def llama2(folder: Path, **settings) -> None:
    """Pieces of SentencePiece with a byte for what they lack, as in Llama 2 and Mistral 7B; `settings` are
    those of tokenizer_config.json, such as `legacy`."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(default_corpus(), trainers.BpeTrainer(vocab_size=200, show_progress=False))
    state = json.loads(learned.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in state["merges"]]
    bpe = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(steps)
    bpe.add_special_tokens(pieces[:3])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    known = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "LlamaTokenizer",
    }
    _write(folder, {"tokenizer.json": json.loads(bpe.to_str()), "tokenizer_config.json": known | settings})


def tekken(folder: Path) -> None:
    """Mistral's own file alone: bytes in base64, control tokens first."""
    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
    learned = byte_level_bpe(default_corpus(), qwen.PIECES, 400).get_vocab()
    words = [bytes(map(bytes_of.get, word)) for word in sorted(learned, key=learned.get) if len(word) > 1]
    tokens = [bytes([byte]) for byte in range(256)] + words
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    sizes = {"num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + len(TEKKEN)}
    config = {"pattern": qwen.PIECES, **sizes, "default_num_special_tokens": len(TEKKEN), "version": "v7"}
    special = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(TEKKEN)]
    _write(folder, {"tekken.json": {"config": config, "vocab": vocabulary, "special_tokens": special}})


def _write(folder: Path, files: dict[str, dict]) -> None:
    """In place of the tokenizer that was there."""
    for file in folder.iterdir():
        if file.name.startswith(FILES):
            file.unlink()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
