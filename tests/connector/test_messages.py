"""Translation between our values and the wire, and pickling of what schedulers hand to workers."""

from __future__ import annotations

import pickle

import pytest

from mapflow.connector.messages import (
    NO_COPY,
    Extent,
    Hit,
    Interest,
    LayerInterest,
    Lease,
    LookupResult,
    Peers,
    Producer,
    TileDtype,
    Want,
)
from mapflow.connector.namespace import Namespace
from mapflow.v1 import cache_pb2

NAMESPACE = Namespace(tokenizer_fingerprint="ab")
BOOT = b"b" * 16
LEASE = Lease(boot_id=BOOT, session_id=1, lease_id=2, expires_at=3.0)
WANTS = [Want(model="m@1", layers=(4, 7)), Want(model="n@1", layers=(0,))]


def _hit(want: int, num_chunks: int, num_extents: int) -> cache_pb2.LookupResponse:
    offsets = [64 * number for number in range(num_extents)]
    extents = cache_pb2.Extents(arena_ids=[1] * num_extents, offsets=offsets, num_bytes=[60] * num_extents)
    hit = cache_pb2.Hit(want=want, producer="m@1/float32/tp0of1", num_chunks=num_chunks, extents=extents)
    return cache_pb2.LookupResponse(hits=[hit])


def test_extents_come_chunk_by_chunk_and_layer_by_layer() -> None:
    result = LookupResult.from_proto(_hit(0, 2, 4), WANTS, 3, BOOT, LEASE)
    rows = ((Extent(1, 0, 60), Extent(1, 64, 60)), (Extent(1, 128, 60), Extent(1, 192, 60)))
    assert result.hits == (Hit(want=0, producer="m@1/float32/tp0of1", num_chunks=2, extents=rows),)
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_result_without_a_lease_has_no_extents() -> None:
    (hit,) = LookupResult.from_proto(_hit(0, 2, 0), WANTS, 3, BOOT, None).hits
    assert (hit.num_chunks, hit.extents) == (2, ())


@pytest.mark.parametrize(
    ("want", "num_chunks", "num_extents", "lease"),
    [(2, 1, 1, LEASE), (0, 4, 8, LEASE), (0, 0, 0, LEASE), (0, 2, 3, LEASE), (1, 2, 4, LEASE), (0, 2, 4, None)],
)
def test_answers_that_do_not_fit_the_question(
    want: int, num_chunks: int, num_extents: int, lease: Lease | None
) -> None:
    with pytest.raises(ValueError, match="chunks"):
        LookupResult.from_proto(_hit(want, num_chunks, num_extents), WANTS, 3, BOOT, lease)


def test_columns_of_different_lengths_are_no_extents() -> None:
    answer = _hit(0, 2, 4)
    answer.hits[0].extents.num_bytes.pop()
    with pytest.raises(ValueError, match="4 extents for 2 chunks"):
        LookupResult.from_proto(answer, WANTS, 3, BOOT, LEASE)


def test_copies_come_chunk_by_chunk_too() -> None:
    answer = _hit(0, 2, 4)
    answer.hits[0].device_offsets.extend([0, NO_COPY, 128, 192])
    result = LookupResult.from_proto(answer, WANTS, 3, BOOT, LEASE, 2)
    assert result.device_arena_id == 2 and result.hits[0].device_offsets == ((0, NO_COPY), (128, 192))
    answer.hits[0].device_offsets.pop()
    with pytest.raises(ValueError, match="3 device offsets for 4 extents"):
        LookupResult.from_proto(answer, WANTS, 3, BOOT, LEASE, 2)


def test_interests_survive_the_wire() -> None:
    layers = (
        LayerInterest(layer=3),
        LayerInterest(layer=5, heads=(0, 2), tile_top_p=0.5, tile_dtype=TileDtype.BF16),
    )
    interest = Interest(namespace=NAMESPACE, model="m@1", layers=layers)
    assert Interest.from_proto(interest.to_proto()) == interest


def test_malformed_peers_are_left_out_and_counted() -> None:
    good = Interest(namespace=NAMESPACE, model="m@1", layers=(LayerInterest(layer=0),)).to_proto()
    bad_block, bad_top_p, bad_dtype = cache_pb2.Interest(), cache_pb2.Interest(), cache_pb2.Interest()
    for bad in (bad_block, bad_top_p, bad_dtype):
        bad.CopyFrom(good)
    bad_block.namespace.block = 32
    bad_top_p.layers[0].tile_top_p = 2.0
    bad_dtype.layers[0].tile_dtype = 9  # type: ignore[assignment]
    publisher = cache_pb2.Publisher(
        producer=cache_pb2.Producer(id="m@1/float32/tp0of1", model="m@1"), namespace=NAMESPACE.to_proto()
    )
    message = cache_pb2.Peers(
        publishers=[cache_pb2.Publisher(), publisher], interests=[bad_block, good, bad_top_p, bad_dtype]
    )
    peers = Peers.from_proto(message)
    assert [publisher.producer for publisher in peers.publishers] == [Producer.of("m@1", "float32")]
    assert peers.interests == (Interest.from_proto(good),)
    assert peers.malformed == 4
