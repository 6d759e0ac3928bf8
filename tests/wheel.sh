#!/usr/bin/env bash
# Build the wheel and use it in fresh environments: without extras, on the lowest and the newest versions
# of its dependencies, on other Pythons and an old processor, then with torch alone. Install the sources with
# a compiler, without one, and without an index either. An editable install is used from the directory above
# its clone. What this machine lacks is named: "not shown".
# usage: tests/wheel.sh PYTHON TORCH...   where TORCH is what pip installs for torch;
#        PYTHONS names the others: those from 3.12 on, with and without the GIL
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
wheel=$(echo "$root"/dist/*"_$(uname -m).whl") sources=$(echo "$root"/dist/*.tar.gz)

cat > "$work/try.py" << 'END'
import numpy as np

import tierstore
from tierstore import _core

with tierstore.create("try.tier", {"item": tierstore.TableSpec(1000, 16)}) as store:
    store["item"].write(range(0, 1000, 3), np.ones((334, 16), np.float32))
    store.commit()
    store.fold()
with tierstore.open("try.tier") as store:
    assert store.verify().ok
    assert store["item"].read(range(0, 1000, 3)).sum() == 334 * 16
print("used with the core", _core.NAME)
END

# Create a store, write, commit, fold and verify. $2, if given, runs Python.
try() {
    echo "== $1"
    rm -rf ./*.tier
    ${2:-} "$(command -v python)" "$work/try.py"
}

# What a fresh environment can do with the wheel, without extras.
use() {
    try "without extras, $1"
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
    "$work/lowest/bin/pip" install --quiet "$wheel" -c "$root/tests/lowest.txt"
    PATH=$work/lowest/bin:$PATH use "the lowest versions"
    if ! command -v qemu-x86_64 > /dev/null; then
        echo "== not shown: a processor of 2006, for which qemu-x86_64 is missing (apt install qemu-user)"
    elif [ "$(uname -m)" = x86_64 ]; then # of NumPy, newer versions want a newer processor
        PATH=$work/lowest/bin:$PATH try "a processor of 2006" "qemu-x86_64 -cpu core2duo" | tee "$work/old"
        grep -q 'the core table' "$work/old"
    fi
fi

for other in ${PYTHONS:-python3.12 python3.13 python3.14 python3.13t python3.14t}; do
    place=$(mktemp -d "$work/other.XXXX")
    if ! "$other" -m venv "$place" 2> /dev/null; then
        echo "== not shown: there is no $other"
    elif "$place/bin/python" -c 'import sys; raise SystemExit("t" not in sys.abiflags)'; then
        echo "== $other, which is refused"
        ! "$place/bin/pip" install "$sources" > "$work/refusal" 2>&1
        grep 'does not run on free-threaded Python' "$work/refusal"
    else
        "$place/bin/pip" install --quiet "$wheel"
        PATH=$place/bin:$PATH try "$other"
    fi
done

"$python" -m venv "$work/user"
PATH=$work/user/bin:$PATH
pip install --quiet "$wheel"
use "the newest versions"

# Into that environment, which has all that tierstore depends on.
again=(pip install --force-reinstall --no-deps)
"${again[@]}" --quiet "$sources"
try "from the sources"
if cc -M -DTS_SOURCES=0 "$work"/sources/tierstore/_core/*.c | grep -i python; then exit 1; fi # headers it may lack
(unset CC && PATH=$work/user/bin "${again[@]}" --quiet "$sources")
try "from the sources, without a compiler"
echo "== without a compiler and without zig"
pip download --quiet --dest "$work/links" hatchling
for isolation in "" --no-build-isolation; do
    if (unset CC && PATH=$work/user/bin "${again[@]}" --no-index --find-links "$work/links" \
        $isolation "$sources") > "$work/refusal" 2>&1; then exit 1; fi
    grep 'install.gcc.or.clang' "$work/refusal"
    pip install --quiet hatchling # for the second time
done
pip uninstall --quiet --yes hatchling
try "after what failed"

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
