"""Attention maps and the arithmetic on them: layout, wire format, compressor, guide, translate.

Import the modules by name (`mapflow.kernels.attention_map`, `mapflow.kernels.blob`, ...); this package imports none
of them for you, so that reading a blob costs no more than it must. Needs torch, numpy and xxhash, and
Triton for the modules that run on a GPU; never vLLM, transformers or grpc.
"""
