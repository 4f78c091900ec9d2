"""Byte-level BPE trained on the spot, the tokenizer of every family but Gemma3."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers


def byte_level_bpe(
    corpus: Iterable[str],
    pattern: str,
    vocab_size: int,
    specials: Iterable[str] = (),
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """A trained tokenizer: no merge crosses a cut of the regular expression `pattern`; `specials` get the
    first ids."""
    bpe = Tokenizer(models.BPE())
    if normalizer:
        bpe.normalizer = normalizer
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    return bpe
