"""The house: an import goes down the layers, and there is no circle, not even inside a function."""

import ast
import re
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import ROOT

# From the ground up. A file may import what lies below its own layer, or its own layer.
LAYERS = [
    ("loss", "rollouts", "weights"),
    ("buffer",),
    ("config",),
    ("models",),
    ("learner",),
    ("tasks",),
    ("runtime",),
    ("searcher", "trainer"),  # what processes run
    ("launch",),
    ("tba",),
    ("extras",),  # what a flag turns on: imported inside a function alone, where the flag is seen
]
HEIGHTS = {name: height for height, names in enumerate(LAYERS) for name in names}
PACKAGES = ("models", "tasks", "runtime", "launch", "extras")
FILES = [*ROOT.glob("*.py"), *(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))]


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {name_of(file): file.read_text(encoding="utf-8") for file in FILES}


def find_imports(sources: dict[str, str]) -> set[tuple[str, str]]:
    """(importer, imported) for every import of the project's own, wherever in the file it stands.

    That a module's packages are imported with it is no arrow of its own, nor is what a function of
    another ring imports of extras/.
    """
    arrows = set()
    for name, source in sources.items():
        tree = ast.parse(source)
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            targets = set()
            if isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: relative imports are not followed"
                targets = {f"{node.module}.{alias.name}" for alias in node.names}
                if targets - sources.keys():  # what is no module stands in the file of its package
                    targets.add(node.module)
            of_extras = {target for target in targets if target.split(".")[0] == "extras"}
            if id(node) in inside and not name.startswith("extras"):
                targets -= of_extras
            arrows |= {(name, target) for target in targets & sources.keys()}
    return arrows


def room_of(module: str) -> str:
    """Return the package that it stands in; itself, if that is the top level or one of these."""
    package = module.rpartition(".")[0]
    return module if package in ("", "runtime", "launch", "extras") else package


def layer_of(module: str) -> int:
    """Its own entry, or that of its package. A KeyError: it has no layer, give it one."""
    return HEIGHTS[module if module in HEIGHTS else module.split(".")[0]]


def find_upward(arrows: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Arrows that go up, and those from one module of the ground to another."""
    return sorted(
        (importer, imported)
        for importer, imported in arrows
        if layer_of(imported) > layer_of(importer) or {importer, imported} <= set(LAYERS[0])
    )


def refuse_circle(arrows: set[tuple[str, str]]) -> None:
    """Raise CycleError, which names the modules on it, if there is a circle."""
    imports = defaultdict(set)
    for importer, imported in arrows:
        imports[importer].add(imported)
    TopologicalSorter(imports).prepare()


def test_no_import_goes_up_and_the_ground_imports_nothing():
    assert find_upward(find_imports(SOURCES)) == []


def test_there_is_no_circle_of_modules_nor_of_packages():
    arrows = find_imports(SOURCES)
    assert len(arrows) > 100, "they were read"
    refuse_circle(arrows)
    rooms = {(room_of(importer), room_of(imported)) for importer, imported in arrows}
    assert ("runtime.record", "runtime.transport") in rooms, "they were read"
    inner = "runtime", "launch", "extras"
    refuse_circle({(a, b) for a, b in rooms if a != b and b.startswith(inner)})


def test_a_folder_holds_at_most_twelve_files_with_more_than_the_docstring_of_a_package():
    files = [file for file in FILES if len(ast.parse(SOURCES[name_of(file)]).body) > 1]
    folders = Counter(file.parent for file in files)
    assert {folder: count for folder, count in folders.items() if count > 12} == {}


def test_a_module_is_imported_by_a_name_in_two_places_only():
    by_name = re.compile(r"import_module|__import__")
    found = {
        (name, function.name)
        for name, source in SOURCES.items()
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and by_name.search(ast.unparse(function))
    }
    # A task by its name, and the target of a process.
    assert found == {("tasks", "import_task"), ("runtime.child", "enter")}


def test_only_the_engine_imports_vllm():
    importers = [name for name in SOURCES if re.search("(import|from) vllm", SOURCES[name])]
    assert importers == ["models.engine"]


def test_planted_upward_imports_are_found_also_inside_a_function():
    planted = {
        "buffer": "import trainer",
        "loss": "import buffer",
        "models.policy": "def f():\n    from launch import checks",
        "models.tokens": "from extras import lora",
        "models.device": "def f():\n    from extras import lora",  # as a flag may want it
    }
    sources = SOURCES | {name: SOURCES[name] + line for name, line in planted.items()}
    up = [("buffer", "trainer"), ("loss", "buffer")]
    up += [("models.policy", "launch.checks"), ("models.tokens", "extras.lora")]
    assert find_upward(find_imports(sources)) == up
