"""Metadata of some of a batch's rows, for FlashAttention: what each row may see stays what it was."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from mapflow.connector.vllm.batch import RowRange  # noqa: E402

pytestmark = pytest.mark.vllm


def test_rows_see_what_they_saw() -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    from mapflow.connector.vllm import compat_attention

    query_start = torch.tensor([0, 100, 101, 141], dtype=torch.int32)
    seq_lens = torch.tensor([300, 50, 40], dtype=torch.int32)
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    common = CommonAttentionMetadata(
        query_start_loc=query_start,
        query_start_loc_cpu=query_start,
        seq_lens=seq_lens,
        num_reqs=3,
        num_actual_tokens=141,
        max_query_len=100,
        max_seq_len=300,
        block_table_tensor=table,
        slot_mapping=torch.arange(141),
    )
    known = {field.name for field in dataclasses.fields(FlashAttentionMetadata)}
    cascade = {
        "use_cascade": True,
        "common_prefix_len": 16,
        "cu_prefix_query_lens": None,
        "prefix_kv_lens": None,
        "suffix_kv_lens": None,
    }
    whole = FlashAttentionMetadata(
        num_actual_tokens=141,
        max_query_len=100,
        query_start_loc=query_start,
        max_seq_len=300,
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=common.slot_mapping,
        scheduler_metadata=torch.zeros(5),
        max_num_splits=32,
        **{name: value for name, value in cascade.items() if name in known},
    )
    compat_attention.remember_source(whole, None, common)
    # the first 28 and the last 8 of the first request's 100 rows, and the whole decode
    ranges = [
        RowRange(entry=0, query_begin=0, row_begin=200, row_end=228),
        RowRange(entry=0, query_begin=92, row_begin=292, row_end=300),
        RowRange(entry=1, query_begin=100, row_begin=0, row_end=1),
    ]
    rest = compat_attention.flash_metadata_of_rows(whole, ranges)
    assert rest.query_start_loc.tolist() == [0, 28, 36, 37]
    assert rest.seq_lens.tolist() == [228, 300, 50]
    assert rest.block_table.tolist() == [table[0].tolist(), table[0].tolist(), table[1].tolist()]
    assert (rest.num_actual_tokens, rest.max_query_len, rest.max_seq_len) == (37, 28, 300)
    assert rest.scheduler_metadata is None and not getattr(rest, "use_cascade", False) and rest.max_num_splits == 0
    assert whole.scheduler_metadata is not None
    index = compat_attention.row_index(ranges, torch.device("cpu"))
    assert index.tolist() == [*range(28), *range(92, 101)]
    assert compat_attention.row_index(ranges[1:], torch.device("cpu")) == slice(92, 101)
    assert compat_attention.batch_shape(whole, _Paged(), 16)["seq_lens"] == [300, 50, 40]


class _Paged:
    page_size = 16
