"""Maps that would come after the layer that reads them are given up, and only those."""

from __future__ import annotations

from mapflow.connector.vllm.transfer_model import Transfer, TransferModel

STEP = (8192, 8192)


def model(bytes_per_s: float = 1e9, layer_s: float = 0.01) -> TransferModel:
    one = TransferModel()
    one.observe_copy(int(100 * bytes_per_s), 100.0)
    one.observe_layers(*STEP, layer_s)
    return one


def test_everything_is_in_time_until_something_was_seen() -> None:
    wanted = [Transfer(0, 0, 10**12)]
    assert TransferModel().late(wanted, *STEP) == set()
    half = TransferModel()
    half.observe_copy(10**9, 1.0)
    assert half.late(wanted, *STEP) == set()
    assert model().late(wanted, 16, 16) == set(), "no step of that size was seen"


def test_small_maps_hide_behind_the_first_layers() -> None:
    wanted = [Transfer(layer, layer, 10**6) for layer in range(3, 36)]  # 1.1 ms each, layers of 10 ms
    assert model().late(wanted, *STEP) == set()


def test_a_map_for_the_first_layer_is_always_late() -> None:
    assert model().late([Transfer(5, 0, 10**6), Transfer(6, 1, 10**6)], *STEP) == {5}


def test_those_behind_a_late_one_come_earlier() -> None:
    """22 ms a map, layers of 10 ms: the copies fall behind, and every other map or so is given up."""
    wanted = [Transfer(layer, layer, 20 * 10**6) for layer in range(3, 12)]
    late = model().late(wanted, *STEP)
    copied, done = [one for one in wanted if one.sender_layer not in late], 0.0
    for one in copied:
        done += 0.022
        assert done <= one.first_use * 0.01
    assert copied and late
    assert min(late) > 3, "the first has 30 ms"


def test_waiting_a_little_is_better_than_computing() -> None:
    """11 ms a map, layers of 10 ms, of which reuse saves 5: every layer waits about a millisecond."""
    wanted = [Transfer(layer, layer, 10 * 10**6) for layer in range(3, 36)]
    assert model().late(wanted, *STEP, begin=2, saved_s=5e-3) == set()
    assert len(model().late(wanted, *STEP, begin=2, saved_s=0.0)) in range(1, 6)


def test_means_follow_what_changes() -> None:
    one = model()
    wanted = [Transfer(3, 3, 25 * 10**6)]
    assert one.late(wanted, *STEP) == set()
    for _ in range(20):
        one.observe_copy(10**9, 2.0)  # the link is shared now
    assert one.late(wanted, *STEP) == {3}
    for _ in range(20):
        one.observe_layers(*STEP, 0.05)
    assert one.late(wanted, *STEP) == set()


def test_a_link_that_was_slow_once_gets_another_chance() -> None:
    one = model(bytes_per_s=1e6)
    wanted = [Transfer(3, 3, 25 * 10**6)]
    assert one.late(wanted, *STEP) == {3}
    assert any(one.late(wanted, *STEP) == set() for _ in range(100))


def test_small_copies_say_nothing_about_the_link() -> None:
    one = model(bytes_per_s=50e9)
    for _ in range(100):
        one.observe_copy(300_000, 300e-6, 16)
        one.observe_copy(8 << 20, 640e-6, 64)  # masses of 32k tokens: 10 us a launch
    assert one.late([Transfer(layer, layer, 200 * 10**6) for layer in range(3, 36)], *STEP) == set()


def test_nonsense_is_not_learnt() -> None:
    one = TransferModel()
    one.observe_copy(0, 1.0)
    one.observe_copy(10, 0.0)
    one.observe_layers(0, 5, 1.0)
    one.observe_layers(*STEP, 0.0)
    assert one.late([Transfer(0, 0, 10**12)], *STEP) == set()
