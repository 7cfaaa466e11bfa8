#!/usr/bin/env bash
# Regenerate the gRPC stubs of proto/mapflow/v1 into OUT (default: in place).   usage: proto/generate.sh [OUT]
# PROTOC_PYTHON names a Python with grpcio-tools 1.76.0, whose generated code runs under protobuf 6 and 7.
set -euo pipefail
root=$(cd "$(dirname "$0")" && pwd)
out=${1:-$root}
"${PROTOC_PYTHON:-python3}" -P -m grpc_tools.protoc -I "$root" --python_out="$out" --pyi_out="$out" \
  --grpc_python_out="$out" mapflow/v1/cache.proto
# what the stubs were made from, so that stale ones are noticed without protoc
sha256sum "$root/mapflow/v1/cache.proto" | cut -d' ' -f1 >"$out/mapflow/v1/cache.proto.sha256"
