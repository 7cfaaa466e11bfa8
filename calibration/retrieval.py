"""Retrieval tasks made by a seeded generator: something is hidden in a long text, and asked for behind it.

The text, with what is hidden in it, is the prefix that maps are reused for; question and answer follow and attend
fully. An answer counts when the model's most likely token is right at each of its tokens, given those before. Names and
values are words and numbers without meaning, so that nothing can be answered from anywhere but the text. Text and token
ids only: no model is known here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

_WORD_LIST = (
    "amber anchor apple arrow basket beacon bottle bridge butter candle canyon carpet castle cedar copper cotton "
    "crystal desert dragon eagle ember falcon feather forest garden ginger glacier hammer harbor hazel island ivory "
    "jacket jungle kettle ladder lantern lemon magnet maple marble meadow mirror needle ocean olive orchid oyster "
    "paper pebble pepper pillow planet pocket quartz rabbit ribbon river rocket saddle salmon shadow silver spider "
    "summer sunset temple thunder timber tunnel turtle valley velvet violet walnut willow window winter yellow zebra "
)
_WORDS = _WORD_LIST.split()


class Task(StrEnum):
    """What is hidden, and how it is asked for."""

    SINGLE_KEY = "single_key"  # one sentence with a number
    MULTI_KEY = "multi_key"  # eight of them, one is asked for
    COPY = "copy"  # a passage whose beginning is repeated
    CHAIN = "chain"  # variables that take each other's value, among others that do
    SCHEMA = "schema"  # tools as JSON, of which a parameter's name is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Texts to hide, in order, and what is asked behind them all. answer: begins with a space."""

    task: Task
    hidden: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Token ids, of which the first `num_rows` are the prefix and the last `num_answer` the answer.

    depth: where in the prefix what is asked for lies, 0 at its beginning and 1 at its end.
    """

    task: Task
    depth: float
    token_ids: tuple[int, ...]
    num_rows: int
    num_answer: int


def make_samples(
    fillers: Sequence[Sequence[int]],
    encode: Callable[[str], list[int]],
    *,
    samples_per_task: int,
    num_rows: int,
    chunk_tokens: int,
) -> list[Sample]:
    """Samples of every task, at depths from beginning to end, in prefixes of a quarter, a half and all of `num_rows`.

    Shorter prefixes are whole chunks, and at least twice as long as what is hidden in them.

    Args:
        fillers: token ids of texts, taken in turn.
        encode: token ids of a text, without any for its beginning or end.
        samples_per_task: of each task.
        num_rows: tokens of the longest prefix.
        chunk_tokens: that prefixes are multiples of.

    Raises:
        ValueError: a filler is shorter than a prefix, or what is hidden longer than the longest.
    """
    lengths = sorted({max(num_rows * part // 4 // chunk_tokens, 1) * chunk_tokens for part in (1, 2)} | {num_rows})
    samples = []
    for task in Task:
        for number in range(samples_per_task):
            question = make_question(task, number)
            hidden = sum(map(len, _encoded(question, encode)))
            fitting = [length for length in lengths if length >= 2 * hidden] or [num_rows]
            filler, prefix = fillers[number % len(fillers)], fitting[number % len(fitting)]
            depth = (number + 0.5) / samples_per_task
            samples.append(make_sample(question, filler, encode, num_rows=prefix, depth=depth))
    return samples


def make_question(task: Task, seed: int) -> Question:
    """The same one for the same seed."""
    chance = random.Random(f"{task}/{seed}")
    return _MAKERS[task](chance)


def make_sample(
    question: Question, filler: Sequence[int], encode: Callable[[str], list[int]], *, num_rows: int, depth: float
) -> Sample:
    """Hide a question's texts in `filler`, what is asked for at `depth`, the others evenly over the prefix.

    Args:
        question: what is hidden and asked for; the first of its texts is the one that is asked for.
        filler: token ids of a text, at least `num_rows` of them.
        encode: token ids of a text, without any for its beginning or end.
        num_rows: tokens of the prefix.
        depth: in [0, 1].

    Raises:
        ValueError: too little filler, a depth outside [0, 1], or texts that do not fit the prefix.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth: expected 0 to 1, got {depth}")
    hidden = _encoded(question, encode)
    room = num_rows - sum(map(len, hidden))
    if room < 0 or len(filler) < room:
        needed = f"{num_rows} tokens with {num_rows - room} of them hidden"
        raise ValueError(f"filler: expected enough for a prefix of {needed}, got {len(filler)} tokens")
    others = [(place + 1) / len(hidden) for place in range(len(hidden) - 1)]
    places = sorted(zip([depth, *others], range(len(hidden))))
    ids: list[int] = []
    used = 0
    for place, number in places:
        ids += filler[used : round(place * room)]
        used = round(place * room)
        ids += hidden[number]
    ids += filler[used:room]
    answer = encode(question.answer)
    return Sample(
        task=question.task,
        depth=depth,
        token_ids=(*ids, *encode(f"\n{question.question}"), *answer),
        num_rows=num_rows,
        num_answer=len(answer),
    )


def _encoded(question: Question, encode: Callable[[str], list[int]]) -> list[list[int]]:
    return [encode(f"\n{text}\n") for text in question.hidden]


def _number(chance: random.Random) -> str:
    return str(chance.randrange(10_000, 100_000))


def _single_key(chance: random.Random) -> Question:
    name, number = chance.choice(_WORDS), _number(chance)
    return _key_question(Task.SINGLE_KEY, [(name, number)])


def _multi_key(chance: random.Random) -> Question:
    return _key_question(Task.MULTI_KEY, [(name, _number(chance)) for name in chance.sample(_WORDS, 8)])


def _key_question(task: Task, pairs: Sequence[tuple[str, str]]) -> Question:
    texts = tuple(f"The access code of the {name} door is {number}." for name, number in pairs)
    name, number = pairs[0]
    return Question(task=task, hidden=texts, question=f"The access code of the {name} door is", answer=f" {number}")


def _copy(chance: random.Random) -> Question:
    words = chance.sample(_WORDS, 24)
    return Question(
        task=Task.COPY,
        hidden=(f"The list reads: {' '.join(words)}.",),
        question=f"The list reads: {' '.join(words[:8])}",
        answer=f" {' '.join(words[8:16])}",
    )


def _chain(chance: random.Random) -> Question:
    names, numbers = chance.sample(_WORDS, 9), [_number(chance) for _ in range(3)]
    texts = []
    for number, own in zip(numbers, (names[:3], names[3:6], names[6:])):
        steps = [f"{name} takes the value of {before}." for before, name in pairwise(own)]
        texts.append(" ".join([f"{own[0]} has the value {number}.", *steps]))
    question = f"So {names[2]} has the value"
    return Question(task=Task.CHAIN, hidden=tuple(texts), question=question, answer=f" {numbers[0]}")


def _schema(chance: random.Random) -> Question:
    names = chance.sample(_WORDS, 16)
    tools = [
        {"name": f"get_{one}", "parameters": {"type": "object", "required": [two]}}
        for one, two in zip(names[:8], names[8:])
    ]
    question = f"The tool get_{names[0]} requires one parameter. It is named"
    texts = tuple(json.dumps(tool) for tool in tools)
    return Question(task=Task.SCHEMA, hidden=texts, question=question, answer=f" {names[8]}")


_MAKERS: dict[Task, Callable[[random.Random], Question]] = {
    Task.SINGLE_KEY: _single_key,
    Task.MULTI_KEY: _multi_key,
    Task.COPY: _copy,
    Task.CHAIN: _chain,
    Task.SCHEMA: _schema,
}
