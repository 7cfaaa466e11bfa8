"""Checksums on a GPU against the library's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash

from mapflow.kernels.checksum import section_checksums


def wanted(data: torch.Tensor, ends: torch.Tensor) -> list[int]:
    raw, starts = data.cpu().numpy(), [0, *ends.flatten().tolist()]
    return [xxhash.xxh3_64_intdigest(raw[begin:end].tobytes()) for begin, end in pairwise(starts)]


def checksums(data: torch.Tensor, ends: torch.Tensor) -> npt.NDArray[np.uint64]:
    found = section_checksums(data, ends)
    assert found.dtype == torch.int64 and found.device == data.device
    return found.cpu().numpy().view(np.uint64)


@pytest.mark.parametrize(
    "sizes",
    [[64, 128, 192, 256], [1024], [1088, 64, 960, 2048, 2112], [16384 + 320, 192, 5056, 1024 * 7]],
    ids=str,
)
def test_as_the_library(device: torch.device, sizes: list[int]) -> None:
    ends = torch.tensor(sizes).cumsum(0)
    data = torch.randint(0, 256, (int(ends[-1]) + 64,), dtype=torch.uint8)
    found = checksums(data.to(device), ends.to(device))
    assert found.tolist() == wanted(data, ends)


def test_many_ranges_in_a_table(device: torch.device) -> None:
    """Of all sizes up to some blocks; the shape is that of `ends`."""
    sizes = torch.randint(1, 40, (6, 4), generator=torch.Generator().manual_seed(3)) * 64
    ends = sizes.flatten().cumsum(0).view_as(sizes)
    data = torch.randint(0, 256, (int(ends[-1, -1]),), dtype=torch.uint8)
    found = checksums(data.to(device), ends.to(device))
    assert found.shape == (6, 4) and found.flatten().tolist() == wanted(data, ends)


def test_ranges_behind_the_data_are_not_read(device: torch.device) -> None:
    data = torch.randint(0, 256, (512,), dtype=torch.uint8)
    ends = torch.tensor([320, 512, 1024, 1088])
    found = checksums(data.to(device), ends.to(device))
    assert found[:2].tolist() == wanted(data, ends[:2])


@pytest.mark.parametrize(
    ("data", "ends", "message"),
    [
        (torch.zeros(64), torch.tensor([64]), "data"),
        (torch.zeros(64, dtype=torch.uint8), torch.tensor([64], dtype=torch.int32), "ends"),
    ],
)
def test_says_what_is_wrong(data: torch.Tensor, ends: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section_checksums(data, ends)
