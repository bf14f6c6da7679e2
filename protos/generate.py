"""Compiles the protos beside their sources, or proves with --check that the committed code is fresh.

Owns nothing else. `_pb2_grpc.py` is made only for files that declare a service, so that nothing the
worker imports pulls in grpc. The compiler is pinned low on purpose: the oldest runtime decides
(docs/adr/0004).
"""

import argparse
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def sources() -> list[Path]:
    """All proto files below this folder, as paths relative to it."""
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.proto"))


def compile_into(target: Path) -> None:
    """Runs protoc for every file; raises SystemExit with protoc's own message on a syntax error."""
    include = str(resources.files("grpc_tools") / "_proto")
    for source in sources():
        arguments = ["protoc", f"-I{ROOT}", f"-I{include}", f"--python_out={target}", f"--pyi_out={target}"]
        if re.search(r"^service ", (ROOT / source).read_text(), re.MULTILINE):
            arguments.append(f"--grpc_python_out={target}")
        if protoc.main([*arguments, str(source)]) != 0:
            raise SystemExit(f"protoc failed on {source}")


def generated(root: Path) -> dict[str, bytes]:
    """Generated files below `root` by relative path."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*_pb2*.py*")
        if path.suffix in (".py", ".pyi")
    }


def main() -> int:
    """0 when fresh or written; 1 with the names of stale files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        compile_into(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        fresh, committed = generated(Path(folder)), generated(ROOT)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    for name in stale:
        print(f"stale: {name}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
