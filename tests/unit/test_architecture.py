"""The directions of imports, and what else every file keeps to. `ARCHITECTURE.md` says why."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ringplug"

# A new module of the backend needs a line here. A folder's line counts for its files without one.
LAYER = {
    "errors": 0,
    "config": 0,
    "parsing": 0,
    "horovod": 0,
    "log": 0,
    "world": 1,
    "hooks": 1,
    "same_settings": 1,
    "handle": 1,
    "stall": 1,
    "buffers": 1,
    "adapters": 1,
    "trace": 1,
    "control": 2,
    "fusion": 2,
    "compression": 2,
    "coordinator": 2,
    "request": 2,
    "transport.__init__": 2,
    "transport.direct": 2,
    "transport.segment": 2,
    "transport": 3,
    "xla_ffi": 2,
    "reduction": 3,
    "adasum": 3,
    "execution": 4,
    "lane": 4,
    "traced": 4,
    "plan": 5,
    "pending": 5,
    "named": 5,
    "process_set": 5,
    "groups": 6,
    "runtime": 6,
    "ops.submission": 7,
    "ops": 8,
    "ops.__init__": 9,
    "place": 7,
    "probes": 7,
    "timeline": 7,
}
PLUGINS = ("keras", "lightning", "torch", "tensorflow", "elastic")

# Upward imports inside functions, beside a room's own factory: each with its reason.
LAZY_UPWARD = {}

# Where a framework may be imported: paths below ringplug/, a folder means all in it.
HOMES = {
    "torch": ("backend/adapters/torch.py", "torch/", "lightning/", "keras/"),
    "tensorflow": ("backend/adapters/tensorflow.py", "tensorflow/", "keras/"),
    "jax": ("backend/adapters/jax.py", "keras/"),
    "jaxlib": ("backend/adapters/jax.py", "keras/"),
    "keras": ("keras/", "tensorflow/"),
    "lightning": ("lightning/",),
    "pytorch_lightning": ("lightning/",),
    "mpi4py": ("backend/control/mpi.py",),
    "cupy": ("backend/adapters/cupy.py", "backend/transport/nccl.py"),
}


@dataclass
class Module:
    """One file: its imports at module level, and those inside functions."""

    name: str
    path: Path
    tree: ast.Module
    top: set[str] = field(default_factory=set)
    lazy: set[str] = field(default_factory=set)

    @property
    def below(self) -> str:
        """Path below the package."""
        return self.path.relative_to(PACKAGE).as_posix()


def imports(nodes: list[ast.stmt], module: Module, lazy: bool, known: set[str]) -> None:
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            imports(node.orelse, module, lazy, known)
            continue
        found = module.lazy if lazy else module.top
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.below}: relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in ("body", "orelse", "finalbody"):
            imports(getattr(node, name, []), module, inside, known)
        for handler in getattr(node, "handlers", []):
            imports(handler.body, module, inside, known)


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    known = {dotted(path) for path in paths}
    found = {}
    for path in paths:
        module = Module(dotted(path), path, ast.parse(path.read_text()))
        imports(module.tree.body, module, False, known)
        found[module.name] = module
    return found


def each() -> list[object]:
    return [pytest.param(module, id=module.below) for module in modules().values()]


def inside_backend(name: str) -> str | None:
    """``transport.ring`` of ``ringplug.backend.transport.ring``; None for other modules."""
    if not name.startswith("ringplug.backend."):
        return None
    return name.removeprefix("ringplug.backend.")


def layer(short: str) -> int:
    module = modules()[f"ringplug.backend.{short}"]
    if module.path.name == "__init__.py" and f"{short}.__init__" in LAYER:
        return LAYER[f"{short}.__init__"]
    if short in LAYER:
        return LAYER[short]
    folder = short.partition(".")[0]
    assert folder in LAYER, f"{short} has no layer: add it to LAYER in {__file__}"
    return LAYER[folder]


def test_every_module_is_seen():
    assert "ringplug.backend.transport.ring" in modules()
    ring = modules()["ringplug.backend.transport.ring"]
    assert "ringplug.backend.transport" in ring.top
    assert "torch" in modules()["ringplug.backend.adapters.torch"].top


@pytest.mark.parametrize("module", each())
def test_the_backend_imports_lower_layers_only(module):
    here = inside_backend(module.name)
    if here is None:
        return
    own = layer(here)
    for name in module.top | module.lazy:
        there = inside_backend(name)
        if there is None:
            continue
        is_factory = module.path.name == "__init__.py" and there.startswith(f"{here}.")
        allowed = name in module.lazy and (is_factory or (here, there) in LAZY_UPWARD)
        assert layer(there) <= own or allowed, f"{here} (layer {own}) imports {there}"


def test_exceptions_are_used():
    for here, there in LAZY_UPWARD:
        assert f"ringplug.backend.{there}" in modules()[f"ringplug.backend.{here}"].lazy


@pytest.mark.parametrize("module", each())
def test_plugins_use_the_backend_and_not_each_other(module):
    room = module.name.split(".")[1] if "." in module.name else ""
    used = {
        name.split(".")[1]
        for name in module.top | module.lazy
        if name.startswith("ringplug.") and name.split(".")[1] in (*PLUGINS, "launch")
    } - {room}
    allowed = {
        "as_horovod": {"launch"},
        "lightning": {"torch", "launch"},
        "keras": {"tensorflow"},
        # Horovod's tensorflow.DistributedOptimizer takes Keras optimizers; the import is lazy.
        "tensorflow": {"keras"},
    }
    # The part of elastic training that knows no framework serves all of them.
    assert used - {"elastic"} <= allowed.get(room, set()), f"{module.below} imports {used}"


@pytest.mark.parametrize("module", each())
def test_frameworks_are_imported_at_home_only(module):
    for name in module.top | module.lazy:
        homes = HOMES.get(name.partition(".")[0])
        assert homes is None or module.below.startswith(homes), f"{module.below} imports {name}"


@pytest.mark.parametrize("module", each())
def test_the_environment_is_read_in_one_file(module):
    if module.below == "backend/config.py":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            text = f"{node.value.id}.{node.attr}"
            assert text not in ("os.environ", "os.getenv", "os.putenv"), f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            assert not names & {"environ", "getenv", "putenv"}, f"line {node.lineno}"


def cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> Iterator[list[str]]:
        if name in trail:
            yield trail[trail.index(name) :]
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                yield from visit(other, [*trail, name])
            done.add(name)

    for name in sorted(graph):
        yield from visit(name, [])


def test_cycles_are_found():
    assert list(cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == [["b", "c"]]
    assert not list(cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}))


def test_no_import_cycles():
    graph = {name: module.top & set(modules()) - {name} for name, module in modules().items()}
    assert not list(cycles(graph))


@pytest.mark.parametrize("module", each())
def test_files_are_short_and_named_for_their_duty(module):
    assert len(module.path.read_text().splitlines()) <= 400
    # What follows there are Horovod's names.
    ours = module.name.partition("as_horovod.horovod")[0]
    for part in ours.split("."):
        assert not {"utils", "util", "helpers", "helper", "common", "misc"} & set(part.split("_"))


@pytest.mark.parametrize("module", each())
def test_everything_public_is_described(module):
    assert ast.get_docstring(module.tree), f"{module.below} has no docstring"
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in module.tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module.below}: {node.name} has no docstring"


def test_the_map_of_the_backend_is_complete():
    text = (PACKAGE / "backend" / "__init__.py").read_text()
    rooms = {path.name for path in (PACKAGE / "backend").iterdir() if path.name[0] not in "_."}
    for room in rooms:
        name = room.removesuffix(".py")
        assert f"``{name}``" in text or f"``{name}/``" in text, f"{name} is missing in the map"


HEAVY = (
    "torch", "tensorflow", "jax", "keras", "lightning", "pytorch_lightning", "mpi4py", "cupy",
    "numpy",
)  # fmt: skip


@pytest.mark.parametrize("name", ["ringplug", "ringplug.launch", "ringplug.backend.config"])
def test_importing_is_light(name):
    code = f"import sys, {name}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {module.partition(".")[0] for module in done.stdout.split()}
    assert not loaded & set(HEAVY)


def test_every_public_name_exists():
    import ringplug

    for name in ringplug.__all__:
        assert getattr(ringplug, name) is not None
