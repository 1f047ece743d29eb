"""The house: an import goes down the layers, and there is no circle, not even inside a function."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

# From the ground up. A file may import what lies below its own layer, or its own layer.
LAYERS = [
    ("loss", "buffer", "weights"),
    ("objectives", "config"),
    ("models",),
    ("learner",),
    ("tasks",),
    ("runtime",),
    ("searcher", "trainer"),  # what processes run
    ("runtime.launch",),
    ("tba",),
]
GROUND = LAYERS[0]


def find_modules(root: Path) -> dict[str, Path]:
    """Name -> file of each module of the product."""
    files = [*root.glob("*.py")]
    for package in ("models", "tasks", "runtime"):
        files += root.glob(f"{package}/**/*.py")
    modules = {}
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = file
    return modules


def find_imports(modules: dict[str, Path]) -> set[tuple[str, str]]:
    """(importer, imported) for every import of the project's own, wherever in the file it stands.

    That a module's packages are imported with it is no arrow of its own.
    """
    arrows = set()
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            targets = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative imports are not followed"
                submodules = [f"{node.module}.{alias.name}" for alias in node.names]
                is_name = [submodule not in modules for submodule in submodules]
                targets = [submodule for submodule in submodules if submodule in modules]
                targets += [node.module] * any(is_name)
            arrows |= {(name, target) for target in targets if target in modules}
    return arrows


def room_of(module: str) -> str:
    """Return the package that it stands in; itself, if that is the top level or runtime/."""
    package = module.rpartition(".")[0]
    return module if package in ("", "runtime") else package


def layer_of(module: str) -> int:
    """Its own entry, or that of its package."""
    for name in (module, module.split(".")[0]):
        for height, names in enumerate(LAYERS):
            if name in names:
                return height
    raise AssertionError(f"{module} has no layer: give it one")


def find_upward(arrows: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Arrows that go up, and those from one module of the ground to another."""
    return sorted(
        (importer, imported)
        for importer, imported in arrows
        if layer_of(imported) > layer_of(importer) or {importer, imported} <= set(GROUND)
    )


def find_circle(arrows: set[tuple[str, str]]) -> list[str]:
    """The modules that lie on circles or between them; [] if there is no circle."""
    left = set(arrows)
    while True:
        importers = {importer for importer, _ in left}
        imported = {name for _, name in left}
        inner = {(a, b) for a, b in left if a in imported and b in importers}
        if inner == left:
            return sorted(importers)
        left = inner


def test_no_import_goes_up_and_the_ground_imports_nothing():
    assert find_upward(find_imports(find_modules(ROOT))) == []


def test_there_is_no_circle():
    arrows = find_imports(find_modules(ROOT))
    assert len(arrows) > 100, "they were read"
    assert find_circle(arrows) == []


def test_there_is_no_circle_of_packages_in_runtime():
    arrows = find_imports(find_modules(ROOT))
    rooms = {(room_of(importer), room_of(imported)) for importer, imported in arrows}
    assert ("runtime.record", "runtime.transport") in rooms, "they were read"
    assert find_circle({(a, b) for a, b in rooms if a != b and b.startswith("runtime")}) == []


def test_a_folder_holds_at_most_twelve_files_that_say_something():
    folders = Counter(file.parent for file in find_modules(ROOT).values() if is_code(file))
    assert {folder: count for folder, count in folders.items() if count > 12} == {}


def test_only_the_engine_imports_vllm():
    modules = find_modules(ROOT)
    importers = [
        name
        for name, file in modules.items()
        if "import vllm" in file.read_text().replace("from vllm", "import vllm")
    ]
    assert importers == ["models.engine"]


@pytest.mark.parametrize(
    "planted, importer, imported",
    [
        ("import trainer\n", "buffer", "trainer"),
        ("def f():\n    from runtime import launch\n", "models.policy", "runtime.launch"),
        ("def f():\n    import buffer\n", "loss", "buffer"),
    ],
)
def test_a_planted_upward_import_is_found(planted, importer, imported, tmp_path):
    subprocess.run(["cp", "-r", *map(str, copied(ROOT)), str(tmp_path)], check=True)
    with open(find_modules(tmp_path)[importer], "a") as file:
        file.write(planted)
    assert find_upward(find_imports(find_modules(tmp_path))) == [(importer, imported)]


def test_a_planted_circle_is_found_inside_a_function_too(tmp_path):
    subprocess.run(["cp", "-r", *map(str, copied(ROOT)), str(tmp_path)], check=True)
    with open(tmp_path / "runtime" / "transport" / "board.py", "a") as file:
        file.write("def f():\n    from runtime.processes.supervisor import Supervisor\n")
    circle = find_circle(find_imports(find_modules(tmp_path)))
    assert {"runtime.transport.board", "runtime.processes.supervisor"} <= set(circle)


def is_code(file: Path) -> bool:
    """Return whether there is more than the docstring of a package."""
    return len(ast.parse(file.read_text(encoding="utf-8")).body) > 1


def copied(root: Path) -> list[Path]:
    return [*root.glob("*.py"), *(root / package for package in ("models", "tasks", "runtime"))]
