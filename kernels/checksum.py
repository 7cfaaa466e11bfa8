"""xxh3_64 of byte ranges on a GPU: what `blob_layout.checksum` says of them, without a trip to the host.

One program for each range. Of its 1,024-byte blocks, the stripes of eight are mixed at once, then the blocks' sums are
taken in one after the other. Source: the XXH3 specification (xxHash, doc/xxhash_spec.md), its way with more than 240
bytes and its default secret; and with 17 to 128, and with 129 to 240, of which there are 64, 128 and 192 here.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from mapflow.kernels.tensor_check import check_tensor
from mapflow.kernels.upload import upload

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PRIME: tl.constexpr = tl.constexpr(_PRIME64_1)
_START = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)


def section_checksums(data: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Checksums of adjoining ranges of `data`, the first of which begins at 0.

    data: u8 [bytes], contiguous, 64-byte aligned. ends: i64 [...] on the same device, ascending multiples of 64; ranges
    that end behind `data` get an undefined checksum. Returns the bits of u64 as i64 [...], in the shape of `ends`, on
    the same device.

    Raises ValueError for wrong shapes or dtypes.
    """
    check_tensor("data", data, shape=("bytes",), dtypes=(torch.uint8,))
    flat = ends.reshape(-1)
    check_tensor("ends", flat, shape=("ranges",), dtypes=(torch.int64,), device=data.device)
    out = torch.empty_like(flat)
    words = data[: data.shape[0] // 8 * 8].view(torch.int64)
    _checksum_kernel[(flat.shape[0],)](words, flat, _keys(data.device), out, words.shape[0] * 8, num_warps=1)
    return out.view(ends.shape)


_keys_by_device: dict[torch.device, torch.Tensor] = {}


def _keys(device: torch.device) -> torch.Tensor:
    """i64 [24 * 8], in rows of eight: the secret of a block's 16 stripes, its scramble, the last stripe and the end;
    what lanes start with; and of short ranges, two rows for the first 128 bytes and two for the rest.
    """
    if device not in _keys_by_device:
        starts = [*range(0, 128, 8), 128, 121, 11]
        rows = [np.frombuffer(_SECRET, dtype="<u8", count=8, offset=start) for start in starts]
        rows.append(np.array(_START, dtype=np.uint64))
        rows.append(np.frombuffer(_SECRET, dtype="<u8", count=16))
        rows += [np.frombuffer(_SECRET, dtype="<u8", count=2, offset=start) for start in (3, 19, 35, 51, 119, 0, 0, 0)]
        _keys_by_device[device] = upload(torch.from_numpy(np.concatenate(rows).view(np.int64)), device)
    return _keys_by_device[device]


@triton.jit
def _avalanche(value):
    value ^= value >> 37
    value *= 0x165667919E3779F9
    return value ^ (value >> 32)


@triton.jit
def _short_mix(words, at, keys, inside):
    """The sum of lanes of 16 bytes each, from byte `at` on, where `inside`; keys: two words a lane."""
    lane = tl.arange(0, 8)
    low = tl.load(words + at // 8, mask=inside, other=0) ^ tl.load(keys + 2 * lane)
    high = tl.load(words + at // 8 + 1, mask=inside, other=0) ^ tl.load(keys + 2 * lane + 1)
    return tl.sum(tl.where(inside, (low * high) ^ tl.umulhi(low, high), 0), 0)


@triton.jit
def _mix(value, key):
    """What a lane adds to itself, of a stripe's eight words."""
    keyed = value ^ key
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit(do_not_specialize=["num_bytes"])
def _checksum_kernel(data, ends, keys, out, num_bytes):
    number = tl.program_id(0)
    begin = tl.load(ends + number - 1, mask=number > 0, other=0)
    end = tl.load(ends + number)
    size = end - begin
    words = data.to(tl.pointer_type(tl.uint64)) + begin // 8
    secret = keys.to(tl.pointer_type(tl.uint64))
    place = out.to(tl.pointer_type(tl.uint64)) + number
    lane, stripe = tl.arange(0, 8), tl.arange(0, 16)
    if (size <= 240) & (end <= num_bytes):
        from_both_ends = tl.where(lane % 2 == 1, size - 16 - lane // 2 * 16, lane // 2 * 16)
        at = tl.where(size < 192, from_both_ends, lane * 16)
        short = _avalanche(_short_mix(words, at, secret + 160, lane * 16 < size) + size.to(tl.uint64) * _PRIME)
        at = tl.where(lane == 4, 176, 128 + lane * 16)
        rest = _short_mix(words, at, secret + 176, lane < tl.where(size == 192, 5, 0))
        tl.store(place, tl.where(size == 192, _avalanche(short + rest), short))
    if (size > 240) & (end <= num_bytes):
        own, other = stripe[:, None] * 8 + lane[None, :], stripe[:, None] * 8 + (lane ^ 1)[None, :]
        key = tl.load(secret + own)
        at_once = tl.arange(0, 8)
        scramble = tl.load(secret + 16 * 8 + lane)
        acc = tl.load(secret + 19 * 8 + lane)
        num_blocks = (size - 1) // 1024
        for block in range(0, num_blocks, 8):
            inside = (block + at_once < num_blocks)[:, None, None]
            eight = words + (block + at_once)[:, None, None] * 128
            mixed = _mix(tl.load(eight + own[None, :, :], mask=inside, other=0), key[None, :, :])
            mixed += tl.load(eight + other[None, :, :], mask=inside, other=0)
            sums = tl.sum(mixed, 1)
            for place_of_one in tl.static_range(8):
                taken = acc + tl.sum(tl.where((at_once == place_of_one)[:, None], sums, 0), 0)
                taken = (taken ^ (taken >> 47) ^ scramble) * 0x9E3779B1
                acc = tl.where(block + place_of_one < num_blocks, taken, acc)
        rest = ((size - 1) - num_blocks * 1024) // 64
        inside = (stripe < rest)[:, None]
        at = words + num_blocks * 128
        mixed = _mix(tl.load(at + own, mask=inside, other=0), key) + tl.load(at + other, mask=inside, other=0)
        acc += tl.sum(tl.where(inside, mixed, 0), 0)
        last = words + size // 8 - 8
        acc += _mix(tl.load(last + lane), tl.load(secret + 17 * 8 + lane)) + tl.load(last + (lane ^ 1))
        keyed = tl.reshape(acc ^ tl.load(secret + 18 * 8 + lane), [4, 2])
        low, high = tl.split(keyed)
        folded = (low * high) ^ tl.umulhi(low, high)
        tl.store(place, _avalanche(tl.sum(folded, 0) + size.to(tl.uint64) * _PRIME))
