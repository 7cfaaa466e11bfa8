"""The attention map of one chunk of a prompt in one sender layer: block masses, and the tiles of the blocks kept.

    block columns ->   0 1 2 3 | 4 5 6 7      chunk_index = 1, num_row_blocks R = 4, num_col_blocks C = 8
    block row 0        m m m m | m 0 0 0      m: mass of the block (u8, square root)
    block row 1        m m m m | m m 0 0      0: above the causal diagonal, always zero
    block row 2        m m m m | m m m 0      a kept block also has a tile: its block x block probabilities
    block row 3        m m m m | m m m m

The mass of a block is the root mean square, over the rows of its block row, of the probability that a row gives to the
block. What leaving it out does to a row's output grows with that probability, and errors add up in squares: a few rows
that need a block count for more than many that hardly do.

Values only: nothing here computes attention, reads a cache, or knows the wire format (`blob.py`).
"""

from dataclasses import dataclass, replace

import torch

from mapflow.kernels.tensor_check import check_block, check_int, check_tensor
from mapflow.kernels.tile_codec import TILE_DTYPES, tiles_are_valid

MAX_CHUNK_INDEX = 2**31 - 1


def encode_mass(mass: torch.Tensor) -> torch.Tensor:
    """Masses (float, any shape, in [0, 1] up to rounding) as u8: `round(255 * sqrt(mass))`.

    The square root spends the 256 steps on small masses: below 3.8e-6 a mass becomes 0, elsewhere it is off by at
    most sqrt(mass) / 255. Raises ValueError for NaN or anything outside [0, 1.001].
    """
    if mass.numel() == 0:
        return mass.to(torch.uint8)
    low, high = (float(bound) for bound in mass.aminmax())
    if not (low >= 0.0 and high <= 1.001):  # also false for NaN
        raise ValueError(f"mass: expected values in [0, 1], got minimum {low} and maximum {high}")
    return mass.clamp(max=1.0).float().sqrt_().mul_(255.0).round_().to(torch.uint8)


def decode_mass(mass: torch.Tensor) -> torch.Tensor:
    """u8 masses (any shape) as float32: `(mass / 255) ** 2`. The squares of a block row sum to at most 1."""
    if mass.dtype != torch.uint8:
        raise ValueError(f"mass: expected dtype torch.uint8, got {mass.dtype}")
    return mass.float().div_(255.0).square_()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileSet:
    """Block-sparse rows (BSR) of all heads, head-major: the kept blocks of head h, block row r are
    `[indptr[h, r], indptr[h, r + 1])` of `indices` and `values`, columns ascending.

    Contents are checked where the tensors lie on the CPU; on an accelerator only shapes are (a check would stall it).
    """

    indptr: torch.Tensor  # i32 [num_heads, num_row_blocks + 1], global: indptr[h, -1] == indptr[h + 1, 0]
    indices: torch.Tensor  # i32 [nnz], block column of each kept block
    values: torch.Tensor  # e4m3 or bf16 [nnz, block, block], rows then columns; see tile_codec.py

    def __post_init__(self) -> None:
        check_tensor("tiles.indptr", self.indptr, shape=("num_heads", "num_row_blocks + 1"), dtypes=(torch.int32,))
        device = self.indptr.device
        check_tensor("tiles.indices", self.indices, shape=("nnz",), dtypes=(torch.int32,), device=device)
        shape = (self.indices.shape[0], "block", "block")
        check_tensor("tiles.values", self.values, shape=shape, dtypes=TILE_DTYPES, device=device)
        if self.values.shape[1] != self.values.shape[2]:
            raise ValueError(f"tiles.values: expected square tiles, got {list(self.values.shape)}")
        check_block(self.values.shape[1])
        if self.indptr.shape[0] < 1 or self.indptr.shape[1] < 2:
            raise ValueError(f"tiles.indptr: expected at least one head and one row, got {list(self.indptr.shape)}")
        if device.type == "cpu":
            self._check_contents()

    def _check_contents(self) -> None:
        offsets = self.indptr.reshape(-1).long()
        steps = offsets.diff()
        between_heads = steps[self.indptr.shape[1] - 1 :: self.indptr.shape[1]]
        if int(offsets[0]) != 0 or int(offsets[-1]) != self.num_tiles or bool((steps < 0).any()):
            raise ValueError(f"tiles.indptr: expected offsets that ascend from 0 to {self.num_tiles}")
        if bool(between_heads.any()):
            raise ValueError("tiles.indptr: expected each head to begin where the one before it ends")
        if self.num_tiles == 0:
            return
        row_starts = torch.zeros(self.num_tiles + 1, dtype=torch.bool)
        row_starts[offsets] = True
        if bool((self.indices < 0).any()) or not bool(((self.indices.diff() > 0) | row_starts[1:-1]).all()):
            raise ValueError("tiles.indices: expected block columns of at least 0, ascending within each block row")
        if not tiles_are_valid(self.values):
            raise ValueError("tiles.values: expected probabilities in [0, 1], got NaN, a negative value or more than 1")

    @property
    def num_tiles(self) -> int:
        """Kept blocks of all heads (nnz)."""
        return self.indices.shape[0]

    @property
    def block(self) -> int:
        """Tokens along one side of a tile."""
        return self.values.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMap:
    """What one sender layer attended to in chunk `chunk_index`, for all heads of the producer (or those read).

    Raises TypeError or ValueError for anything inconsistent: shapes, masses or tiles above the causal diagonal,
    tiles of another block size. Contents are checked on the CPU only, as in `TileSet`.
    """

    chunk_index: int
    block: int
    mass: torch.Tensor  # u8 [num_heads, num_row_blocks, num_col_blocks], see encode_mass
    row_counts: torch.Tensor  # i32 [num_row_blocks], rows measured in each block row: reusable only where == block
    tiles: TileSet | None = None
    approximate: bool = False  # the sender's own rows came from reused maps

    def __post_init__(self) -> None:
        check_int("chunk_index", self.chunk_index, minimum=0, maximum=MAX_CHUNK_INDEX)
        check_block(self.block)
        shape = ("num_heads", "num_row_blocks", "num_col_blocks")
        check_tensor("mass", self.mass, shape=shape, dtypes=(torch.uint8,))
        heads, rows, columns = self.mass.shape
        if heads < 1 or rows < 1 or columns != (self.chunk_index + 1) * rows:
            wanted = f"[num_heads, R, {self.chunk_index + 1} * R] for chunk_index {self.chunk_index}"
            raise ValueError(f"mass: expected shape {wanted}, got {list(self.mass.shape)}")
        check_tensor("row_counts", self.row_counts, shape=(rows,), dtypes=(torch.int32,), device=self.mass.device)
        if self.tiles is not None:
            check_tensor(
                "tiles.indptr",
                self.tiles.indptr,
                shape=(heads, rows + 1),
                dtypes=(torch.int32,),
                device=self.mass.device,
            )
            if self.tiles.block != self.block:
                raise ValueError(f"tiles: expected block {self.block}, got {self.tiles.block}")
        if self.mass.device.type == "cpu":
            self._check_contents()

    def _check_contents(self) -> None:
        if bool((self.row_counts < 0).any()) or bool((self.row_counts > self.block).any()):
            raise ValueError(f"row_counts: expected 0 to {self.block}, got {self.row_counts.tolist()}")
        own_columns = self.mass[:, :, self.first_block_row :]  # [num_heads, R, R], the only ones past the diagonal
        if bool(own_columns.triu(1).any()):
            raise ValueError("mass: expected zeros above the causal diagonal")
        if self.tiles is not None and self.tiles.num_tiles:
            counts = self.tiles.indptr.long().diff(dim=1)  # [num_heads, R]
            diagonal = torch.arange(self.first_block_row, self.num_col_blocks).expand_as(counts)
            last_columns = torch.repeat_interleave(diagonal.reshape(-1), counts.reshape(-1))
            if bool((self.tiles.indices > last_columns).any()):
                raise ValueError("tiles.indices: expected no block above the causal diagonal")

    def to(self, device: torch.device) -> "AttentionMap":
        """The same map on a device."""
        tiles = self.tiles
        if tiles is not None:
            tiles = TileSet(
                indptr=tiles.indptr.to(device), indices=tiles.indices.to(device), values=tiles.values.to(device)
            )
        return replace(self, mass=self.mass.to(device), row_counts=self.row_counts.to(device), tiles=tiles)

    @property
    def num_heads(self) -> int:
        """Heads of the sender layer held here."""
        return self.mass.shape[0]

    @property
    def num_row_blocks(self) -> int:
        """Block rows of the chunk (R)."""
        return self.mass.shape[1]

    @property
    def num_col_blocks(self) -> int:
        """Block columns from the first token of the prompt to the end of the chunk (C)."""
        return self.mass.shape[2]

    @property
    def tile_dtype(self) -> torch.dtype | None:
        """How the tiles are stored; None without tiles."""
        return None if self.tiles is None else self.tiles.values.dtype

    @property
    def first_block_row(self) -> int:
        """Block row of the prompt where the chunk begins."""
        return self.chunk_index * self.num_row_blocks

    @property
    def row_begin(self) -> int:
        """First token row of the chunk; it covers `[row_begin, row_end)`."""
        return self.first_block_row * self.block

    @property
    def row_end(self) -> int:
        """One past the last token row of the chunk."""
        return self.num_col_blocks * self.block

    @property
    def measured(self) -> torch.Tensor:
        """bool [num_row_blocks]: the block rows whose every row was measured, which alone may be reused."""
        return self.row_counts == self.block
