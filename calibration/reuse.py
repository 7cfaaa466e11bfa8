"""Simulates a plan inside a receiver that runs under transformers: what reuse does to quality, not to speed.

Masks, masses and tiles come from the same kernels that serve requests, in the precision in which they are stored;
attention itself is dense arithmetic on a few rows at a time. Requests, caches and engines are unknown here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mapflow.calibration.attention import AttentionCall
from mapflow.calibration.growth import density_at, growth
from mapflow.connector.plan import LayerPlan, Mode, Plan
from mapflow.kernels.attention_map import decode_mass, encode_mass
from mapflow.kernels.mask import guide_mask, mask_density, static_mask
from mapflow.kernels.tile_codec import TILE_DTYPE_BY_NAME, decode_tiles, encode_tiles
from mapflow.kernels.top_p import select_top_p
from mapflow.kernels.translate_reference import dense_head_weights

_BISECTIONS = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRecord:
    """One layer's attention over one document.

    Attributes:
        call: its queries, keys and values.
        mass: f32 [num_heads, num_blocks, num_blocks], exact block masses of the rows that may be reused.
    """

    call: AttentionCall
    mass: torch.Tensor


class Recorder:
    """Runs exact attention and keeps a `LayerRecord` of the wanted layers."""

    def __init__(self, layers: frozenset[int], *, num_rows: int, block: int) -> None:
        """Keep `layers`; measure masses of rows [0, num_rows), a multiple of `block`."""
        self._layers = layers
        self._num_rows = num_rows
        self._block = block
        self.records: dict[int, LayerRecord] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The exact output."""
        if call.layer in self._layers:
            mass = block_masses(call, num_rows=self._num_rows, block=self._block)
            self.records[call.layer] = LayerRecord(call=call, mass=mass)
        return call.output()


def block_masses(call: AttentionCall, *, num_rows: int, block: int) -> torch.Tensor:
    """Masses of rows [0, num_rows), as `kernels.attention_map` has them: f32 [num_heads, num_blocks, num_blocks]."""
    size = num_rows // block
    mass = torch.zeros(call.num_heads, size, size, device=call.query.device)
    for row in range(size):
        maps = call.probabilities(_rows(call, row, block))  # [num_heads, block, (row + 1) * block]
        shares = maps.view(call.num_heads, block, row + 1, block).sum(3)  # of each row, by block
        mass[:, row, : row + 1] = shares.square().mean(1).sqrt()
    return mass


def pooled_masses(call: AttentionCall, *, num_rows: int, block: int) -> torch.Tensor:
    """Masses of rows [0, num_rows) as estimated from each block's mean query and mean key: f32, as `block_masses`.

    Source: the estimate of query-aware heads in FlexPrefill (Lai et al., 2025), section 3.1.
    """
    size = num_rows // block
    whole = [tensor[:, :num_rows].float() for tensor in (call.query, call.key)]
    query, key = (tensor.reshape(tensor.shape[0], size, block, -1).mean(2) for tensor in whole)
    query = query.reshape(key.shape[0], call.group, size, -1)  # [num_kv_heads, group, num_blocks, head_dim]
    scores = query @ key[:, None].transpose(-1, -2) * call.scaling
    future = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
    masses: torch.Tensor = scores.flatten(0, 1).masked_fill(future, -torch.inf).softmax(-1)
    return masses


class ReuseAttention:
    """Attends rows [0, num_rows) as a plan says, and the rows after them exactly."""

    def __init__(
        self,
        plan: Plan,
        sender: Mapping[int, LayerRecord],
        *,
        num_rows: int,
        own: Mapping[int, LayerRecord] | None = None,
        online: Mapping[int, float] | None = None,
    ) -> None:
        """Prepare one document.

        Args:
            plan: says for each layer what to do.
            sender: records of the sender layers that the plan reads.
            num_rows: rows that reuse, a multiple of the plan's block.
            own: the receiver's records of an exact run; guide layers then take their mask from its own masses in
                place of the sender's: the oracle that guidance can at best reach.
            online: the density of each layer that reuses a map; it is then guided, at that density, by masses that the
                receiver estimates from its blocks' mean queries and keys (`pooled_masses`): needs no sender.
        """
        self._plan = plan
        self._sender = sender
        self._num_rows = num_rows
        self._own = own
        self._online = online
        self.densities: dict[int, float] = {}
        self.growths: dict[int, float] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The layer's output, [num_heads, num_tokens, value_dim]."""
        layer = self._plan.layers[call.layer]
        output = call.output()
        if layer.mode is Mode.COMPUTE or self._num_rows == 0:
            return output
        if layer.mode is Mode.TRANSLATE and self._online is None:
            self._translate(call, layer, output)
        else:
            self._masked(call, self._mask(call, layer), output)
        return output

    def densities_at(self, context: int) -> dict[int, float]:
        """Of a prompt of so many tokens, as `growth.py` expects them."""
        blocks = self._num_rows // self._plan.block, max(1, context // self._plan.block)
        return {layer: density_at(one, self.growths[layer], *blocks) for layer, one in self.densities.items()}

    def _note(self, layer: int, mask: torch.Tensor) -> None:
        self.densities[layer], self.growths[layer] = mask_density(mask, first_block_row=0), growth(mask)

    def _mask(self, call: AttentionCall, layer: LayerPlan) -> torch.Tensor:
        """bool [num_heads, num_blocks, num_blocks]."""
        if layer.sender_layer is None:
            return static_mask(
                num_heads=call.num_heads,
                first_block_row=0,
                num_block_rows=self._num_rows // self._plan.block,
                sink_blocks=layer.sink_blocks,
                local_blocks=layer.local_blocks,
                device=call.query.device,
            )
        if self._online is not None:
            return self._online_mask(call, layer, self._online[call.layer])
        if self._own is None:
            mass, head_map = self._sender[layer.sender_layer].mass, self._plan.head_map[call.layer]
        else:
            mass, head_map = self._own[call.layer].mass, torch.eye(call.num_heads)
        return guide_mask(
            decode_mass(encode_mass(mass)),
            head_map.to(mass.device),
            layer.top_p,
            first_block_row=0,
            sink_blocks=layer.sink_blocks,
            local_blocks=layer.local_blocks,
        )

    def _online_mask(self, call: AttentionCall, layer: LayerPlan, density: float) -> torch.Tensor:
        """As `_mask`: the smallest top-p of at least this density, by bisection."""
        mass = pooled_masses(call, num_rows=self._num_rows, block=self._plan.block)
        head_map = torch.eye(call.num_heads, device=mass.device)
        floor = {"sink_blocks": layer.sink_blocks, "local_blocks": layer.local_blocks}

        def mask_of(top_p: float) -> torch.Tensor:
            return guide_mask(mass, head_map, top_p, first_block_row=0, **floor)

        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if mask_density(mask_of(middle), first_block_row=0) < density:
                low = middle
            else:
                high = middle
        return mask_of(high)

    def _masked(self, call: AttentionCall, mask: torch.Tensor, output: torch.Tensor) -> None:
        """Exact attention inside the mask, into `output`."""
        block = self._plan.block
        self._note(call.layer, mask)
        for row in range(mask.shape[1]):
            rows = _rows(call, row, block)
            kept = mask[:, row, : row + 1].repeat_interleave(block, 1)[:, None]  # [num_heads, 1, end]
            _store(output, rows, call.probabilities(rows, kept), call)

    def _translate(self, call: AttentionCall, layer: LayerPlan, output: torch.Tensor) -> None:
        """The sender's kept tiles, combined, times the receiver's values, into `output`."""
        assert layer.sender_layer is not None
        block, record = self._plan.block, self._sender[layer.sender_layer]
        index, weight = self._plan.head_index[call.layer], self._plan.head_weight[call.layer]
        combine = dense_head_weights(index, weight, record.call.num_heads).to(record.mass.device)
        kept = select_top_p(record.mass, layer.top_p, first_block_row=0)
        self._note(call.layer, kept[(combine != 0).any(0)])
        for row in range(kept.shape[1]):
            tiles = self._tiles(record, kept, row)
            _store(output, _rows(call, row, block), torch.einsum("is,src->irc", combine, tiles), call)

    def _tiles(self, record: LayerRecord, kept: torch.Tensor, row: int) -> torch.Tensor:
        """A block row of the sender's maps as it is read back, f32 [num_heads, block, (row + 1) * block]."""
        return decode_tiles(stored_tiles(record, kept, row, self._plan.block, self._plan.tile_dtype))


def stored_tiles(record: LayerRecord, kept: torch.Tensor, row: int, block: int, dtype: str) -> torch.Tensor:
    """A block row of a sender's maps as it is stored, zeros where nothing is kept.

    Args:
        record: of the sender's layer.
        kept: bool [num_heads, block rows, blocks].
        row: the block row.
        block: tokens along one side of a block.
        dtype: of the tiles, as plans name it.

    Returns:
        stored dtype [num_heads, block, (row + 1) * block].
    """
    maps = record.call.probabilities(_rows(record.call, row, block))
    inside = kept[:, row, : row + 1].repeat_interleave(block, 1)[:, None]
    return encode_tiles(maps * inside, TILE_DTYPE_BY_NAME[dtype])


def _rows(call: AttentionCall, block_row: int, block: int) -> torch.Tensor:
    return torch.arange(block_row * block, (block_row + 1) * block, device=call.query.device)


def _store(output: torch.Tensor, rows: torch.Tensor, maps: torch.Tensor, call: AttentionCall) -> None:
    """Multiply maps, f32 [num_heads, num_rows, end], by the values and write the rows."""
    values = call.value[:, : maps.shape[-1]].float()[:, None]  # [num_kv_heads, 1, end, value_dim]
    result = maps.reshape(values.shape[0], call.group, len(rows), -1) @ values
    output[:, rows] = result.flatten(0, 1).to(output.dtype)
