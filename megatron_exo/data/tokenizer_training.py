"""Train a SentencePiece tokenizer that Megatron reads with ``--tokenizer-type SentencePieceTokenizer``."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_exo.data.progress import Progress
from megatron_exo.data.readers import DocumentReader
from megatron_exo.data.tokenizers import TokenizerError

MODEL_TYPES = ("bpe", "unigram")

_SENTENCE_CHARACTERS = 1024
_SEED = 1234


def train_tokenizer(
    inputs: Sequence[str],
    output: str,
    vocab_size: int,
    *,
    model_type: str = "bpe",
    json_key: str = "text",
    max_sentences: int = 1_000_000,
) -> Path:
    """Train on a bounded random sample of lines and write one ``.model`` file.

    No text is lost: there is no Unicode normalisation, runs of spaces are kept (and can be pieces), and what the
    vocabulary lacks, line ends among it, is spelled in bytes. Encoding and decoding give the text back, except
    that U+2581, SentencePiece's own mark, becomes a space. No space is put before the text, so ids do not depend
    on where a text was cut, as in GPT-2. Digits are split, so numbers do not fill the vocabulary. The ids 0 to 3
    are unknown, begin, end of document and padding.

    Args:
        inputs, json_key: see :class:`megatron_exo.data.readers.DocumentReader`; all of it is read.
        output: the file to write (``.model`` is appended if missing), or a folder, which gets ``tokenizer.model``.
        vocab_size: total number of pieces, with the 4 ids above and the 256 bytes.
        max_sentences: size of the sample; it is held in memory. The same input gives the same sample.

    Raises:
        InputError: for inputs that cannot be read.
        TokenizerError: if the text is too little for the vocabulary, or sentencepiece is missing.
    """
    try:
        import sentencepiece
    except ImportError:
        raise TokenizerError("training needs the package sentencepiece (pip install sentencepiece)") from None
    path = Path(output) / "tokenizer.model" if os.path.isdir(output) or output.endswith("/") else Path(output)
    path = path if path.suffix == ".model" else path.with_name(path.name + ".model")

    reader = DocumentReader(inputs, json_key, text_split="blank-lines")
    sample = _sample(_sentences(reader), max_sentences)
    if not sample:
        raise TokenizerError(f"no text in {', '.join(inputs)} to train a tokenizer on")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            split_digits=True,
            max_sentence_length=4 * _SENTENCE_CHARACTERS,  # in bytes
            num_threads=16,  # a constant: the unigram model depends on how the sums are split
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", 1)[-1].strip()
        raise TokenizerError(
            f"no tokenizer of {vocab_size} pieces from {len(sample)} lines of text: {reason or error} "
            "(--vocab-size counts 260 fixed pieces; more text allows more pieces)"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(model.getvalue())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _sentences(reader: DocumentReader) -> Iterator[str]:
    """Lines with text in them, cut to the length that SentencePiece takes."""
    progress = Progress("read", reader.total_bytes)
    text_bytes = count = 0
    for count, document in enumerate(reader, start=1):
        for line in document.text.splitlines():
            if not line.strip() or "\0" in line:
                continue
            for begin in range(0, len(line), _SENTENCE_CHARACTERS):
                yield line[begin : begin + _SENTENCE_CHARACTERS]
        text_bytes += len(document.text.encode())
        progress.update(count, text_bytes, reader.bytes_read)
    progress.finish(count, text_bytes)


def _sample(sentences: Iterator[str], size: int) -> list[str]:
    """A uniform sample (reservoir sampling), always the same for the same sentences."""
    generator = random.Random(_SEED)
    sample: list[str] = []
    for number, sentence in enumerate(sentences):
        if number < size:
            sample.append(sentence)
        elif (slot := generator.randrange(number + 1)) < size:
            sample[slot] = sentence
    return sample
