"""The daemon of one node: holds attention maps in shared memory and says who may read and write which bytes of it.

`core/` decides; the modules here are the sockets, files, clocks and signals around it. Imports neither torch, vllm nor
transformers.
"""
