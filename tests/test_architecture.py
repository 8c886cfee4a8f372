"""The import table and the other rules of the layout, checked over the syntax trees of every file.

A rule that fails here is a decision to be made, not a list to be extended: the tables say what each package may know.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
OURS = (
    "protos",
    "wire",
    "engine",
    "kvtransfer",
    "prefill_service",
    "decode_service",
    "shared_service",
    "router",
    "pagewire",
)
STDLIB_ONLY = frozenset({"engine.types", "engine.messages", "engine.blocks", "engine.prefix_cache"})

# Package -> what of ours it may import. "engine" covers "engine.batch"; "engine.types" covers itself alone.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "protos": (),
    "engine": (),
    "wire": ("protos", "engine.types", "engine.messages"),
    "kvtransfer": ("engine", "wire", "protos"),
    "prefill_service": ("engine", "kvtransfer", "wire", "protos"),
    "decode_service": ("engine", "kvtransfer", "wire", "protos"),
    "shared_service": ("prefill_service", "decode_service", "engine", "kvtransfer", "wire", "protos"),
    "router": ("wire", "protos", *sorted(STDLIB_ONLY)),
    "pagewire": ("wire", "protos", "router", "engine.types", "engine.messages"),
}
# pagewire may start the rest, but only inside functions (or for types), so that `import pagewire` stays light.
MAY_IMPORT_INSIDE_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "pagewire": ("engine", "kvtransfer", "prefill_service", "decode_service", "shared_service", "benchmarks"),
}

# State machines: an event and a time go in, actions come out.
SANS_IO = (
    "kvtransfer/actions.py",
    "kvtransfer/inbox.py",
    "kvtransfer/outbox.py",
    "prefill_service/prefiller.py",
    "prefill_service/scheduler.py",
    "decode_service/decoder.py",
    "decode_service/scheduler.py",
    "router/admission.py",
    "router/dispatch.py",
    "router/flow.py",
    "router/policy.py",
    "router/workers.py",
    "wire/liveness.py",
)
OUTSIDE_WORLD = frozenset(
    {"asyncio", "concurrent", "grpc", "numpy", "os", "select", "socket", "subprocess", "threading", "time", "torch"}
)

PB2_OUTSIDE_WIRE = frozenset(
    {
        "prefill_service/servicer.py",
        "decode_service/servicer.py",
        "kvtransfer/peers.py",
        "kvtransfer/service.py",
        "kvtransfer/transports/grpc_bytes.py",
        "pagewire/client.py",
        "pagewire/codec.py",
    }
)
PB2_FREE_ROUTER = frozenset({"router/flow.py", "router/dispatch.py", "router/workers.py", "router/policy.py"})

BANNED_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "imp"})
BANNED_CALLS = frozenset({"eval", "exec", "yaml.load", "torch.load", "os.system", "tempfile.mktemp"})
BANNED_FILE_NAMES = frozenset({"utils.py", "util.py", "common.py", "helpers.py", "helper.py", "misc.py"})

MAX_FILE_LINES = 600  # the aim is 250
MAX_FUNCTION_LINES = 80  # the aim is 40


class Import(NamedTuple):
    module: str
    line: int
    inside_function: bool
    typing_only: bool


def sources(*packages: str) -> list[Path]:
    names = packages or OURS
    found = [path for name in names for path in sorted((ROOT / name).rglob("*.py"))]
    return [path for path in found if "_pb2" not in path.name]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def imports(path: Path) -> list[Import]:
    return list(_imports(tree(path), path, False, False))


def _imports(node: ast.AST, path: Path, inside: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, inside, typing_only)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                package = path.relative_to(ROOT).parent.parts
                base = ".".join([*package[: len(package) - child.level + 1], *([base] if base else [])])
            for alias in child.names:
                full = f"{base}.{alias.name}"
                yield Import(full if _is_module(full) else base, child.lineno, inside, typing_only)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            checking = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            yield from _imports(child, path, inside or function, typing_only or checking)


def _is_module(name: str) -> bool:
    if name.split(".")[0] not in OURS:
        return False
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir() or name.endswith(("_pb2", "_pb2_grpc"))


def covered(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def call_name(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def test_every_package_imports_only_what_the_table_allows() -> None:
    wrong = []
    for package, allowed in MAY_IMPORT.items():
        inside = MAY_IMPORT_INSIDE_FUNCTIONS.get(package, ())
        for path in sources(package):
            for each in imports(path):
                own = each.module.split(".")[0]
                if own not in (*OURS, "benchmarks", "tests") or own == package:
                    continue
                table = (*allowed, *inside) if each.inside_function or each.typing_only else allowed
                if not covered(each.module, table):
                    wrong.append(f"{relative(path)}:{each.line} imports {each.module}")
    assert not wrong, "\n".join(wrong)


def test_what_the_router_shares_with_the_engine_uses_the_standard_library_alone() -> None:
    wrong = []
    for name in sorted(STDLIB_ONLY):
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        wrong += [
            f"{relative(path)}:{each.line} imports {each.module}"
            for each in imports(path)
            if each.module.split(".")[0] not in sys.stdlib_module_names and each.module not in STDLIB_ONLY
        ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_knows_no_network_and_only_its_device_thread_knows_asyncio() -> None:
    wrong = []
    for path in sources("engine"):
        banned = {"grpc", "google.protobuf", "protos"} | (set() if path.name == "device_thread.py" else {"asyncio"})
        wrong += [
            f"{relative(path)}:{each.line} imports {each.module}"
            for each in imports(path)
            if covered(each.module, tuple(banned))
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["wire", "router", "pagewire"])
def test_light_packages_name_no_heavy_library_at_module_level(package: str) -> None:
    wrong = [
        f"{relative(path)}:{each.line} imports {each.module}"
        for path in sources(package)
        for each in imports(path)
        if covered(each.module, ("torch", "transformers", "gguf")) and not each.inside_function
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", SANS_IO)
def test_state_machines_touch_neither_network_nor_clock_nor_device(name: str) -> None:
    path = ROOT / name
    wrong = [
        f"{name}:{each.line} imports {each.module}"
        for each in imports(path)
        if each.module.split(".")[0] in OUTSIDE_WORLD and not each.typing_only
    ]
    for node in ast.walk(tree(path)):
        call = call_name(node)
        if call.startswith("random.") and call != "random.Random":
            wrong.append(f"{name}:{node.lineno} calls {call}: ids and choices come from an injected random.Random")  # type: ignore[attr-defined]
        if call == "random.Random" and not node.args:  # type: ignore[attr-defined]
            wrong.append(f"{name}:{node.lineno} seeds itself from the system")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def test_protobuf_types_stay_at_the_borders() -> None:
    wrong = []
    for path in sources():
        name = relative(path)
        package = name.split("/")[0]
        border = package in ("wire", "protos") or name in PB2_OUTSIDE_WIRE
        if border or (package == "router" and name not in PB2_FREE_ROUTER):
            continue
        named = [each for each in imports(path) if covered(each.module, ("protos", "google.protobuf"))]
        wrong += [f"{name}:{each.line} imports {each.module}" for each in named]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Name) and node.id.endswith(("_pb2", "_pb2_grpc")):
                wrong.append(f"{name}:{node.lineno} names {node.id}")
    assert not wrong, "\n".join(wrong)


def test_nothing_that_runs_what_it_reads() -> None:
    wrong = []
    for path in sources():
        wrong += [
            f"{relative(path)}:{each.line} imports {each.module}"
            for each in imports(path)
            if each.module.split(".")[0] in BANNED_MODULES
        ]
        for node in ast.walk(tree(path)):
            if call_name(node) in BANNED_CALLS:
                wrong.append(f"{relative(path)}:{node.lineno} calls {call_name(node)}")  # type: ignore[attr-defined]
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "shell", "allow_pickle"):
                value = node.value
                if not (isinstance(value, ast.Constant) and value.value is False):
                    wrong.append(f"{relative(path)}:{value.lineno} sets {node.arg}")
    assert not wrong, "\n".join(wrong)


def test_no_handler_swallows_everything() -> None:
    """A handler of Exception raises again, or is a border that logs the traceback."""
    wrong = []
    for path in sources():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type else "everything"
            if caught not in ("everything", "Exception", "BaseException"):
                continue
            inside = list(ast.walk(node))
            raises = any(isinstance(inner, ast.Raise) for inner in inside)
            if not raises and not any(call_name(inner).endswith(".exception") for inner in inside):
                wrong.append(f"{relative(path)}:{node.lineno} catches {caught}")
    assert not wrong, "\n".join(wrong)


def test_files_have_a_purpose_and_a_size_that_can_be_read() -> None:
    wrong = []
    for path in sources():
        name, text = relative(path), path.read_text("utf-8")
        if path.name in BANNED_FILE_NAMES:
            wrong.append(f"{name}: name the noun that it owns")
        if text.strip() and not ast.get_docstring(tree(path)):
            wrong.append(f"{name}: no module docstring says what it owns and what it never does")
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            wrong.append(f"{name}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{name}:{node.lineno} {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    assert not wrong, "\n".join(wrong)


def loaded_by(statements: str, *heavy: str) -> list[str]:
    """Which of `heavy` a fresh interpreter has loaded after the statements."""
    code = f"import sys; {statements}; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_whole_router_loads_neither_torch_nor_transformers() -> None:
    modules = [relative(path)[: -len(".py")].replace("/", ".") for path in sources("router")]
    names = ", ".join(name.removesuffix(".__init__") for name in modules)
    assert loaded_by(f"import {names}", "torch", "transformers", "numpy", "gguf") == []


def test_the_command_line_is_light_until_a_command_runs() -> None:
    assert loaded_by("import pagewire.cli", "torch", "transformers", "numpy", "grpc", "asyncio") == []
