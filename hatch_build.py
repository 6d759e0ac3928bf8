"""Build the compiled core: for a wheel or an editable install, or by `python hatch_build.py`.

The README that the package index shows has addresses of the project in place of paths in the tree.

TIERSTORE_CORE_DEBUG=1 checks every index and keeps symbols. TIERSTORE_CORE_TARGET, such as
aarch64-linux-gnu.2.17, builds for another system with zig, which brings the libraries of each.
"""

import hashlib
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface as Hook
    from hatchling.metadata.plugin.interface import MetadataHookInterface as MetadataHook
except ImportError:  # run as a program
    Hook = MetadataHook = object

CORE = Path(__file__).resolve().parent / "tierstore" / "_core"
FLAGS = ["-std=c11", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
FLAGS += ["-fno-trapping-math"]  # else no loop with a choice in it has vectors
TARGET = os.environ.get("TIERSTORE_CORE_TARGET", "")
ZIG = "ziglang==0.17.1"
WHY = "0+as.no.c.compiler.works.install.gcc.or.clang.or.set.cc"  # a version that there is not
PROGRAMS = {  # the sha256 of its program zig, by machine
    "x86_64": "58959f01285c05a74276f09327b551d42ed6006bf325a78dc661a024e314987b",
    "aarch64": "e7eef14c4b674845fa65bbd6ad0dbf82037f6cb4364db7973ed23579a5fc26c0",
}
HELP = f"install gcc or clang, or name a compiler in CC, or: pip install hatchling {ZIG}"
HELP += ", then pip install --no-build-isolation"

if platform.system() != "Linux" and not TARGET:
    raise SystemExit(
        f"tierstore runs on Linux, not on {platform.system()}: on Windows in WSL 2, on macOS in a "
        "container"
    )
if sysconfig.get_config_var("Py_GIL_DISABLED"):  # before anything is asked for
    raise SystemExit("tierstore does not run on free-threaded Python: use a build with the GIL")


def compiler():
    """Return the command of the first of $CC, cc, gcc and clang that compiles; [] if none does."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "try.c")
        source.write_text("#include <string.h>\nsize_t f(const char *s) { return strlen(s); }\n")
        for cc in map(shlex.split, (os.environ.get("CC") or "cc", "cc", "gcc", "clang")):
            trial = [*cc, *FLAGS, "-shared", "-o", f"{place}/try.so", source]
            if shutil.which(cc[0]) and not subprocess.run(trial, capture_output=True).returncode:
                return cc
    return []


def zig():
    """Return the command of zig; it must be the program that this version was tested with."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None:
        raise SystemExit(f"tierstore has a core in C, and no C compiler works here: {HELP}")
    program = Path(spec.origin).with_name("zig")
    if hashlib.sha256(program.read_bytes()).hexdigest() != PROGRAMS.get(platform.machine()):
        raise SystemExit(f"{program} is not that of {ZIG} for {platform.machine()}: {HELP}")
    libraries = "musl" if "musl" in str(sysconfig.get_config_var("MULTIARCH")) else "gnu.2.17"
    target = TARGET or f"{platform.machine()}-linux-{libraries}"
    return [program, "cc", "-target", target, "-mcpu=baseline", "-fno-sanitize=undefined"]


def build(place):
    """Compile the core into a directory and return its path; one that was there is replaced."""
    linker = cc = [] if TARGET else compiler()
    if not cc:  # the C library is in every process: `zig cc` would first build one to link with
        cc = zig()
        linker = [cc[0], "ld.lld"]
    digest = runpy.run_path(str(CORE / "sources.py"))["digest"]()
    flags, link = [*FLAGS, f"-DTS_SOURCES={digest}"], [*linker, "-shared"]
    if os.environ.get("TIERSTORE_CORE_DEBUG"):
        flags += ["-O1", "-g", "-DTS_DEBUG"]
    else:
        link.append("-s")
    with tempfile.TemporaryDirectory(dir=place) as work:
        env = os.environ | dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), work)
        objects = {source: f"{work}/{source.stem}.o" for source in CORE.glob("*.c")}
        for source, made in objects.items():
            subprocess.run([*cc, *flags, "-c", source, "-o", made], check=True, env=env)
        library = Path(work, "compiled.abi3.so")
        subprocess.run([*link, "-o", library, *objects.values()], check=True)
        return library.replace(Path(place, library.name))


class CoreHook(Hook):
    """Put the core into a wheel, or beside its sources for an editable install."""

    def dependencies(self):
        """Ask for zig only where there is no compiler.

        Where pip cannot have it, it prints what was asked for and nothing else. So this says why.
        """
        return [] if not TARGET and compiler() else [f"{ZIG},!={WHY}"]

    def initialize(self, version, build_data):
        """Build; the wheel is for every Python from 3.11 on."""
        self.place = tempfile.TemporaryDirectory()  # until the wheel is written
        made = build(CORE if version == "editable" else self.place.name)
        if version != "editable":
            build_data["force_include"][str(made)] = f"tierstore/_core/{made.name}"
        machine, _, glibc = TARGET.partition("-linux-gnu.")
        system = f"manylinux_{glibc}_{machine}" if glibc else sysconfig.get_platform()
        tag = f"cp311-abi3-{system.replace('.', '_').replace('-', '_')}"
        build_data.update(tag=tag, pure_python=False)


def readme_elsewhere(text, source):
    """Return a README with paths in the tree as addresses below `source`, pictures as files."""
    raw = source.replace("github.com", "raw.githubusercontent.com")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{raw}/main/", text)
    return re.sub(r"(\]\()(?!https?:)", rf"\g<1>{source}/blob/main/", text)


class ReadmeHook(MetadataHook):
    """Give the package index the README with addresses, which work there."""

    def update(self, metadata):
        """Set `readme`."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = readme_elsewhere(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


if __name__ == "__main__":
    build(CORE)
