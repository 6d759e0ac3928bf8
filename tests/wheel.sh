#!/usr/bin/env bash
# Build the wheel and use it in fresh environments: without extras, on the lowest and the newest versions
# of its dependencies, then with torch alone. An editable install is used from the directory above its clone.
# usage: tests/wheel.sh PYTHON TORCH...   where TORCH is what pip installs for torch
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD python=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf dist
"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet auditwheel build check-wheel-contents 'readme-renderer[md]' twine
"$work/build/bin/python" -m build --sdist --outdir dist
# Wheels from the unpacked sources, for old systems and both processors, whatever this machine is.
mkdir "$work/sources"
tar xzf dist/*.tar.gz -C "$work/sources" --strip-components=1
for machine in x86_64 aarch64; do
    TIERSTORE_CORE_TARGET=$machine-linux-gnu.2.17 \
        "$work/build/bin/python" -m build --wheel --outdir dist "$work/sources"
    "$work/build/bin/auditwheel" show dist/*"_$machine.whl" | tee "$work/audit"
    grep -q "\"manylinux_2_\(5\|12\|17\)_$machine\"" "$work/audit"
done
"$work/build/bin/twine" check --strict dist/*
"$work/build/bin/check-wheel-contents" dist/*.whl

# What a fresh environment can do with the wheel, without extras.
use() {
    echo "== without extras, $1"
    rm -rf ./*.tier ./*.npy
    python -c 'import tierstore, sys; assert "site-packages" in tierstore.__file__; assert "torch" not in sys.modules'
    tierstore --version
    if grep -q sse4_2 /proc/cpuinfo; then tierstore --version | grep -q 'core sse4.2'; fi
    python -m tierstore --help
    tierstore init a.tier --rows 1000 --dim 8 --init 'normal(0,1)'
    tierstore export a.tier a.npy
    tierstore load b.tier a.npy
    tierstore verify b.tier
    tierstore doctor || true # reports file systems that were not tested
}
cd "$work" # where `import tierstore` finds the wheel, not the source tree

# The lowest versions have no wheels for newer Pythons.
if "$python" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))'; then
    "$python" -m venv "$work/lowest"
    "$work/lowest/bin/pip" install --quiet "$root"/dist/*"_$(uname -m).whl" -c "$root/tests/lowest.txt"
    PATH=$work/lowest/bin:$PATH use "the lowest versions"
fi

"$python" -m venv "$work/user"
PATH=$work/user/bin:$PATH
pip install --quiet "$root"/dist/*"_$(uname -m).whl"
use "the newest versions"

echo "== with torch"
pip install --quiet "$@"
python "$root/examples/minimal.py"
python "$root/examples/matrix_factorization.py" --epochs 1 --device cpu

echo "== editable, from the directory above the clone"
mkdir "$work/above"
ln -s "$root" "$work/above/tierstore"
"$python" -m venv "$work/editable"
"$work/editable/bin/pip" install --quiet -e "$work/above/tierstore" mypy
cd "$work/above"
"$work/editable/bin/python" -c 'import tierstore; tierstore.create(None, {"item": tierstore.TableSpec(10, 4)}).close()'
"$work/editable/bin/tierstore" --version
echo 'import tierstore; reveal_type(tierstore.open("a.tier"))' > typed.py
"$work/editable/bin/mypy" --strict typed.py | grep 'Revealed type is "tierstore._store.store.Store"'
