"""The packages and which reads which; what is imported is declared."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fusion_bench_nufilt"
NAME = PACKAGE.name
FILES = sorted(PACKAGE.rglob("*.py"))
DISTRIBUTIONS = packages_distributions()

#: What each package may import from the others.
READS = {
    "utils": set(),
    "nufilt": {"utils"},
    "methods": {"nufilt", "utils"},
    "models": {"methods", "nufilt", "utils"},
    "merge": {"methods", "models", "nufilt", "utils"},
    "pages": {"utils"},
    "continual": {"merge", "methods", "models", "nufilt", "pages", "utils"},
    "compare": {"continual", "methods", "models", "nufilt", "pages", "utils"},
    "analysis": {"compare", "continual", "merge", "methods", "models", "nufilt", "pages", "utils"},
}


def module_of(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def imports(file, *, inside_functions):
    """Yield the modules of the package that a file imports."""
    package = module_of(file) if file.name == "__init__.py" else module_of(file).rpartition(".")[0]
    tree = ast.parse(file.read_text())
    nodes = ast.walk(tree) if inside_functions else tree.body
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            parent = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                if node.level
                else ""
            )
            source = ".".join(part for part in (parent, node.module) if part)
            for alias in node.names:
                target = f"{source}.{alias.name}"
                if target in MODULES or source in MODULES:
                    yield target if target in MODULES else source


def package_of(module):
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("name", READS)
def test_a_package_reads_only_what_it_may(name):
    for module, file in MODULES.items():
        if package_of(module) == name:
            read = {package_of(other) for other in imports(file, inside_functions=True)}
            foreign = read - READS[name] - {name}
            assert not foreign, f"{module} imports from {foreign}"


#: Which packages may import a library.
USES = {
    "fusion_bench": {"continual", "compare"},
    "typer": {"cli"},
    "peft": {"models"},
    "huggingface_hub": {"models", "merge"},
    "mergekit": {"cli", "merge"},
    "ray": {"utils"},
    "safetensors": {"analysis", "continual", "merge", "utils"},
}


@pytest.mark.parametrize("library", USES)
def test_a_library_is_imported_only_where_it_is_needed(library):
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            if library in {name.partition(".")[0] for name in names}:
                assert package_of(module) in USES[library], f"{module} imports {library}"


@pytest.mark.parametrize("name", ["config", "subspace", "adapter", "step"])
def test_the_mathematics_of_nufilt_imports_torch_alone(name):
    """These files are read, and can be copied, without the package around them."""
    beside = {"config", "subspace", "adapter", "step"}
    for node in ast.walk(ast.parse((PACKAGE / "nufilt" / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            packages = {alias.name.partition(".")[0] for alias in node.names}
            assert packages <= {"torch", *sys.stdlib_module_names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.module in beside
        elif isinstance(node, ast.ImportFrom):
            assert node.module.partition(".")[0] in {"torch", *sys.stdlib_module_names}


def test_there_is_no_import_circle():
    graph = {
        module: set(imports(file, inside_functions=False)) - {module}
        for module, file in MODULES.items()
    }
    while leaves := {module for module, others in graph.items() if not others & graph.keys()}:
        graph = {module: others for module, others in graph.items() if module not in leaves}
    assert not graph, f"these import each other: {sorted(graph)}"


def test_models_in_memory_and_folders_are_merged_by_the_same_code():
    shared = {
        f"{NAME}.merge.{part}" for part in ("plan", "checks", "planned", "engine", "other_params")
    }
    users = {"continual": ("continual.layerwise",), "merge": ("merge.folders", "merge.planning")}
    for package, modules in users.items():
        read = {
            other
            for module in modules
            for other in imports(MODULES[f"{NAME}.{module}"], inside_functions=True)
        }
        assert shared <= read, f"{package} lacks {shared - read}"


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["lm-eval"] + extras["mergekit"] + extras["ray"]
    declared = {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in lines}
    declared |= {
        "fusion-bench-nufilt",
        "timm",
        "pycocoevalcap",
    }  # the last two come with the models and the harness that need them
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
                packages = {
                    package.lower().replace("_", "-") for package in DISTRIBUTIONS.get(name, [name])
                }
                assert packages & declared, (
                    f"{file} imports {name}, which pyproject.toml does not declare"
                )
