"""Retrieval tasks: what is hidden lies where it should, can be found, and is judged as it must be."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mapflow.calibration.answers import Score, all_answers, judge_answers, right_tokens  # noqa: E402
from mapflow.calibration.calibrate import calibrate  # noqa: E402
from mapflow.calibration.config import CalibrationConfig  # noqa: E402
from mapflow.calibration.models import read_facts  # noqa: E402
from mapflow.calibration.pair_models import PairModels  # noqa: E402
from mapflow.calibration.retrieval import Sample, Task, make_question, make_sample, make_samples  # noqa: E402
from mapflow.calibration.reuse_runs import Run  # noqa: E402
from mapflow.connector.plan import Mode  # noqa: E402

FILLER = [0] * 4096


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(ids) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("task", Task)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prefix_of_the_right_length_hides_the_answer(task: Task, depth: float) -> None:
    question = make_question(task, 3)
    sample = make_sample(question, FILLER, encode, num_rows=2048, depth=depth)
    prefix, rest = decode(sample.token_ids[:2048]), decode(sample.token_ids[2048:])
    assert all(text in prefix for text in question.hidden)
    assert rest == f"\n{question.question}{question.answer}" and len(question.answer) == sample.num_answer
    value = question.answer.strip()
    assert value in question.hidden[0] and value not in question.question
    room = 2048 - sum(len(text) + 2 for text in question.hidden)
    before = prefix[: prefix.index(question.hidden[0])]
    assert before.count("\0") == round(depth * room)


@pytest.mark.parametrize("task", Task)
def test_the_same_question_for_the_same_seed(task: Task) -> None:
    assert make_question(task, 5) == make_question(task, 5)
    assert len({make_question(task, seed).answer for seed in range(20)}) > 10


def test_only_one_of_the_hidden_texts_answers() -> None:
    for seed in range(20):
        question = make_question(Task.MULTI_KEY, seed)
        assert sum(question.question in text for text in question.hidden) == 1


@pytest.mark.parametrize(("change", "message"), [({"depth": 1.5}, "depth"), ({"num_rows": 16}, "filler")])
def test_says_what_does_not_fit(change, message: str) -> None:
    place = {"num_rows": 2048, "depth": 0.5} | change
    with pytest.raises(ValueError, match=message):
        make_sample(make_question(Task.MULTI_KEY, 0), FILLER, encode, **place)


def test_samples_of_every_task_length_and_depth() -> None:
    made = make_samples([FILLER, FILLER[1:]], encode, samples_per_task=6, num_rows=2048, chunk_tokens=256)
    assert len(made) == 6 * len(Task) and len({sample.token_ids for sample in made}) == len(made)
    assert [sample.num_rows for sample in made[:4]] == [512, 1024, 2048, 512]
    assert [sample.depth for sample in made[:6]] == pytest.approx([(n + 0.5) / 6 for n in range(6)])
    assert {sample.num_rows % 256 for sample in made} == {0}


def test_what_is_hidden_takes_no_more_than_half_of_a_short_prefix() -> None:
    made = make_samples([FILLER], encode, samples_per_task=3, num_rows=1024, chunk_tokens=64)
    for sample in made:
        hidden = sum(len(encode(f"\n{text}\n")) for text in make_question(sample.task, 0).hidden)
        assert sample.num_rows >= 2 * hidden or sample.num_rows == 1024


def test_tokens_of_an_answer_count_one_by_one() -> None:
    sample = Sample(task=Task.COPY, depth=0.5, token_ids=(5, 6, 1, 2), num_rows=2, num_answer=2)
    logits = torch.nn.functional.one_hot(torch.tensor([1, 2, 0]), 8).float()
    assert right_tokens(logits, sample) == 2
    assert right_tokens(logits[[0, 0, 2]], sample) == 1


def test_reuse_that_changes_nothing_answers_as_without(pair, tmp_path) -> None:
    """Of a model with random weights: what it says without reuse is made the answer to every other sample."""
    config = CalibrationConfig(
        sender=pair.sender,
        receiver=pair.receiver,
        texts=pair.texts,
        out=tmp_path / "plan.safetensors",
        mode=Mode.GUIDE,
        chunk_tokens=64,
        first_layer=0,
        top_p=1.0,
    )
    plan = calibrate(config)
    facts = (read_facts(one) for one in (pair.sender, pair.receiver))
    sender, receiver = PairModels(*facts, device="cpu", dtype="float32").both
    samples = []
    for seed in range(4):
        ids = torch.randint(3, 90, (140,), generator=torch.Generator().manual_seed(seed)).tolist()
        said = int(receiver.run(ids, _Exact(), logits_from=139).argmax())
        answer = said if seed % 2 else (said + 1) % 90
        samples.append(Sample(task=Task.COPY, depth=0.5, token_ids=(*ids, answer), num_rows=128, num_answer=1))
    samples[0] = replace(samples[0], task=Task.CHAIN)
    (found,) = judge_answers([plan], sender, receiver, samples)
    copied, chained = found[Task.COPY], found[Task.CHAIN]
    assert copied.full == Score(right=2 / 3, tokens=2 / 3) and copied.scores == dict.fromkeys(Run, copied.full)
    assert chained.full == chained.scores[Run.PLAN] == Score(right=0.0, tokens=0.0) and chained.num_samples == 1
    both = all_answers(found.values())
    assert (both.num_samples, both.num_tokens, both.prefixes) == (4, 4, (128,))
    assert both.full == both.scores[Run.STATIC] == Score(right=0.5, tokens=0.5)


class _Exact:
    """No reuse."""

    def attend(self, call):
        return call.output()
