"""The packages and which reads which; what is imported is declared."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import resolve_name
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "fusion_bench_nufilt"
NAME = PACKAGE.name
FILES = sorted(PACKAGE.rglob("*.py"))

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
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


@cache
def parsed(file):
    return ast.parse(file.read_text())


@cache
def import_nodes(file, inside_functions):
    nodes = parsed(file).body
    if inside_functions:
        nodes = ast.walk(parsed(file))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(file, *, inside_functions):
    """Yield the modules of the package that a file imports."""
    folder = ".".join(file.relative_to(PACKAGE.parent).parent.parts)
    for node in import_nodes(file, inside_functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), folder)
            for alias in node.names:
                target = f"{source}.{alias.name}"
                if target in MODULES:
                    yield target
                elif source in MODULES:
                    yield source


def package_of(module):
    _, _, inside = module.partition(".")
    return inside.partition(".")[0]


def libraries_of(file):
    """Return the top-level names that a file imports from outside its package."""
    libraries = set()
    for node in import_nodes(file, inside_functions=True):
        if isinstance(node, ast.Import):
            libraries |= {alias.name.partition(".")[0] for alias in node.names}
        elif not node.level:
            libraries.add(node.module.partition(".")[0])
    return libraries


def test_a_package_reads_only_what_it_may():
    for module, file in MODULES.items():
        package = package_of(module)
        if package in READS:
            read = {package_of(other) for other in imports(file, inside_functions=True)}
            foreign = read - READS[package] - {package}
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


def test_a_library_is_imported_only_where_it_is_needed():
    for module, file in MODULES.items():
        for library in libraries_of(file) & USES.keys():
            assert package_of(module) in USES[library], f"{module} imports {library}"


def test_the_mathematics_of_nufilt_imports_torch_alone():
    """These files are read, and can be copied, without the package around them."""
    mathematics = ("config", "blocks", "noise", "eigenvectors", "subspace", "adapter", "step")
    for name in mathematics:
        file = PACKAGE / "nufilt" / f"{name}.py"
        assert libraries_of(file) <= {"torch", *sys.stdlib_module_names}
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.module in mathematics, name


def test_there_is_no_import_circle():
    graph = {}
    for module, file in MODULES.items():
        graph[module] = set(imports(file, inside_functions=False)) - {module}
    while True:  # take away the modules that import none of those left, until there is none
        leaves = [module for module, others in graph.items() if not others & graph.keys()]
        if not leaves:
            break
        for module in leaves:
            del graph[module]
    assert not graph, f"these import each other: {sorted(graph)}"


def test_models_in_memory_and_folders_are_merged_by_the_same_code():
    shared = {
        f"{NAME}.merge.{part}"
        for part in ("plan", "checks", "layer_jobs", "engine", "other_params")
    }
    users = {"continual": ("continual.layerwise",), "merge": ("merge.folders", "merge.planning")}
    for package, modules in users.items():
        read = set()
        for module in modules:
            read |= set(imports(MODULES[f"{NAME}.{module}"], inside_functions=True))
        assert shared <= read, f"{package} lacks {shared - read}"


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["lm-eval"] + extras["mergekit"] + extras["ray"]
    declared = {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in lines}
    # The last comes with the harness that needs it.
    declared |= {"fusion-bench-nufilt", "pycocoevalcap"}
    distributions_of = packages_distributions()
    for file in FILES:
        for name in libraries_of(file) - sys.stdlib_module_names:
            distributions = distributions_of.get(name, [name])
            packages = {package.lower().replace("_", "-") for package in distributions}
            assert packages & declared, (
                f"{file} imports {name}, which pyproject.toml does not declare"
            )


#: The command's function has the name of the command, and so has what it calls.
SHARED_NAMES = {"compare"}


def test_no_two_public_functions_or_classes_have_one_name():
    homes = {}
    for module, file in MODULES.items():
        for node in parsed(file).body:
            is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if is_definition and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    shared = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert shared.keys() == SHARED_NAMES, shared


TESTS = PACKAGE.parent / "tests"


def test_a_file_of_tests_says_in_its_first_line_what_it_tests():
    for file in sorted(TESTS.rglob("test_*.py")):
        assert file.read_text().startswith('"""'), file


def thresholds(file):
    """Yield the line, from 0, of each constant of a module that is a fraction, or two."""
    for statement in parsed(file).body:
        if isinstance(statement, ast.Assign):
            numbers = [node for node in ast.walk(statement) if isinstance(node, ast.Constant)]
            if 1 <= len([number for number in numbers if isinstance(number.value, float)]) <= 2:
                yield statement.lineno - 1


def test_a_threshold_says_in_a_comment_what_it_is_a_multiple_of():
    for file in FILES:
        lines = file.read_text().splitlines()
        for line in thresholds(file):
            block = line  # and the lines right above it
            while lines[block].strip() and "#" not in lines[block]:
                block -= 1
            assert "#" in lines[block], f"{file}: {lines[line]}"
