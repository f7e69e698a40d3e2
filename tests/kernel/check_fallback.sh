#!/bin/sh
# Runs the op's suite on another version of torch, where nothing is compiled: the reference has to carry it alone.
# Usage: tests/kernel/check_fallback.sh [torch version]     (the environment is kept in .venv-fallback)
set -eu
version="${1:-2.13.0}"
cd "$(dirname "$0")/../.."
here="$(pwd)"
python="${PYTHON:-.venv/bin/python}"

[ -x .venv-fallback/bin/python ] || "$python" -m venv .venv-fallback
fallback="$here/.venv-fallback/bin/python"
if ! "$fallback" -c "import torch, numpy, pytest, hypothesis; assert torch.__version__.split('+')[0] == '$version'" 2>/dev/null; then
  "$fallback" -m pip install -q "torch==$version" numpy pytest hypothesis setuptools
fi

copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/minillava" "$copy/tests"
cp pyproject.toml "$copy"
cp minillava/__init__.py minillava/layer_norm.py "$copy/minillava"  # and no compiled library, even if there is one
cp tests/conftest.py tests/kernel/test_layer_norm.py "$copy/tests"
cd "$copy"
MINILLAVA_EXPECT=reference "$fallback" -m pytest -q -p no:cacheprovider tests
