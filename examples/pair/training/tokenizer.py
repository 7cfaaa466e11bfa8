"""Train the pair's byte-level BPE tokenizer and encode the corpus with it.

    python tokenizer.py --corpus DIR --out TOKENIZER_DIR --data DATA_DIR [--vocabulary 4096]

TOKENIZER_DIR gets tokenizer.json and tokenizer_config.json, in the same bytes whenever the corpus is the same. DATA_DIR
gets train.bin and heldout.bin (u16 token ids, every text followed by <|end|>), train.starts.bin (i64: where each text
begins) and meta.json. Never trains a model.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from conversations import BEGIN, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTEXT = 8192  # tokens
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SAMPLE_MB = 30.0
CHAT_WEIGHT = 3  # conversations are what the pair is shown at work with


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def sample(rows: list[dict[str, str]], megabytes: float) -> Iterator[str]:
    """Random texts of about `megabytes` in all; conversations come `CHAT_WEIGHT` times as often."""
    rng = random.Random(11)
    weighted = [row for row in rows for _ in range(CHAT_WEIGHT if "heldout" in row else 1)]
    rng.shuffle(weighted)
    size = 0
    for row in weighted:
        yield row["text"]
        size += len(row["text"])
        if size > megabytes * 1e6:
            return


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE with ids 0..7 for the special tokens; plain text is prefixed with <|begin|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two tokenizer files, compactly: they lie in both model folders."""
    folder.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode(tokenizer: Tokenizer, rows: list[dict[str, str]]) -> tuple[np.ndarray, np.ndarray, int]:
    """Token ids u16 [num_tokens], where each text starts i64 [num_texts], and the bytes of text that went in."""
    end = tokenizer.token_to_id(END)
    pieces: list[np.ndarray] = []
    num_bytes = 0
    for begin in range(0, len(rows), 512):
        texts = [row["text"] for row in rows[begin : begin + 512]]
        num_bytes += sum(len(text.encode()) for text in texts)
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            ids = encoding.ids if encoding.ids[-1] == end else [*encoding.ids, end]
            pieces.append(np.asarray(ids, dtype=np.uint16))
    starts = np.cumsum([0] + [len(piece) for piece in pieces[:-1]], dtype=np.int64)
    return np.concatenate(pieces), starts, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder for the token files")
    parser.add_argument("--vocabulary", type=int, default=4096)
    options = parser.parse_args()
    train_rows = read_rows(options.corpus / "train.jsonl")
    tokenizer = train_tokenizer(sample(train_rows, SAMPLE_MB), options.vocabulary)
    save(tokenizer, options.out)
    options.data.mkdir(parents=True, exist_ok=True)
    meta: dict[str, int] = {"vocabulary": tokenizer.get_vocab_size()}
    for name, token in (("begin_id", BEGIN), ("end_id", END), ("pad_id", PAD)):
        meta[name] = int(tokenizer.token_to_id(token) or 0)
    heldout_rows = [row for row in read_rows(options.corpus / "heldout.jsonl") if not row.get("heldout")]
    for name, rows in (("train", train_rows), ("heldout", heldout_rows)):
        ids, starts, num_bytes = encode(tokenizer, rows)
        ids.tofile(options.data / f"{name}.bin")
        starts.tofile(options.data / f"{name}.starts.bin")
        meta |= {f"{name}_tokens": len(ids), f"{name}_bytes": num_bytes, f"{name}_texts": len(rows)}
    (options.data / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    print(meta, f"bytes/token {meta['train_bytes'] / meta['train_tokens']:.2f}")


if __name__ == "__main__":
    main()
