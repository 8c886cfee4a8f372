"""The build hook: every build and every editable install makes the protobuf modules with protoc.

Configuration lives in pyproject.toml; this file only adds the step that it cannot express. The generated files are
written beside the .proto files in an editable install, and into the build folder otherwise. They are never committed.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()


def generate_protos(into: Path) -> None:
    """Runs protoc with -I. so that the modules are protos.*_pb2, importable without any rewriting."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    sources = [f"protos/{path.name}" for path in sorted((ROOT / "protos").glob("*.proto"))]
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "pyi")]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *outputs, *sources]) != 0:
        raise SystemExit("protoc could not generate code from protos/*.proto; its own message is above")


class BuildWithProtos(build_py):
    """build_py, then protoc: over the copied .proto files, or in place for an editable install."""

    def run(self) -> None:
        super().run()
        generate_protos(ROOT if self.editable_mode else Path(self.build_lib).resolve())


setup(cmdclass={"build_py": BuildWithProtos})
