"""The cache without its surroundings: plain objects that take values and `now`, and return frozen dataclasses.

No grpc, asyncio, torch, files, threads or clock in here. Nothing outside talks to anything but `cache.Cache`.
"""
