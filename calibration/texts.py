"""Reads calibration texts and turns them into token ids.

A `.jsonl` holds one document a line: `{"text": ...}`, or `{"messages": [...], "tools": [...]}` which the tokenizer's
chat template renders. A `.txt` is one text, cut into documents of `max_tokens`. No model is known here, and nothing
is ever logged about what the texts say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mapflow.calibration.config import CalibrationError, first_line


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory.

    Raises:
        CalibrationError: the directory holds none that can be read.
    """
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"no tokenizer can be read from {directory}: {first_line(error)}") from error


def read_documents(path: Path, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> list[list[int]]:
    """Token ids of every document of a file, each at most `max_tokens` long; empty documents are left out.

    Raises:
        CalibrationError: the file is missing, of another kind, or a line cannot be used.
    """
    if not path.is_file():
        raise CalibrationError(f"texts file {path} does not exist")
    if path.suffix == ".jsonl":
        documents = [_token_ids(record, tokenizer, where) for where, record in _records(path)]
        return [ids[:max_tokens] for ids in documents if ids]
    if path.suffix == ".txt":
        ids = list(tokenizer(path.read_text(encoding="utf-8"), verbose=False).input_ids)
        return [ids[start : start + max_tokens] for start in range(0, len(ids), max_tokens)]
    raise CalibrationError(f"texts must be a .jsonl or a .txt file, got {path}")


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The lines of a `.jsonl`, each with where it stands for messages."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise CalibrationError(f"{where} is not JSON: {error.msg}") from error
            if not isinstance(record, dict) or not ({"text", "messages"} & record.keys()):
                raise CalibrationError(f'{where} needs a "text" or a "messages" field')
            yield where, record


def _token_ids(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if "text" in record:
        if not isinstance(record["text"], str):
            raise CalibrationError(f'{where}: "text" must be a string, got {type(record["text"]).__name__}')
        return list(tokenizer(record["text"], verbose=False).input_ids)
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError(f'{where} holds "messages" but the tokenizer has no chat template; use "text" instead')
    try:
        text = tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=False)
    except Exception as error:  # a template may raise anything, jinja's own errors among them
        raise CalibrationError(f"{where}: the chat template refuses these messages: {first_line(error)}") from error
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
