"""Generates the Python stubs of ``proto/*.proto`` into ``services/common/pb``.

Run as ``python proto/generate.py [OUT_DIR]``. The proto folder is mapped onto the import path
``services/common/pb``, so what protoc writes can be imported as it stands.
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "services/common/pb"


def generate(out_dir: Path) -> None:
    """Write ``*_pb2.py``, ``*_pb2_grpc.py`` and their ``.pyi`` below ``out_dir``.

    Raises:
        RuntimeError: protoc refused the files; its own message is on standard error.
    """
    scripts = Path(sys.executable).parent
    sources = [f"{PACKAGE}/{path.name}" for path in sorted((ROOT / "proto").glob("*.proto"))]
    arguments = [
        "protoc",
        f"-I{PACKAGE}={ROOT / 'proto'}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={out_dir}",
        f"--grpc_python_out={out_dir}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--mypy_out={out_dir}",
        f"--mypy_grpc_out={out_dir}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
