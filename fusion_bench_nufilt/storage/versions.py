"""The versions of the packages that results depend on."""

from importlib.metadata import version

_PACKAGES = ("fusion-bench-nufilt", "fusion-bench", "torch", "transformers", "safetensors")


def package_versions() -> dict[str, str]:
    """Return the versions by the names that the packages are installed under."""
    return {package: version(package) for package in _PACKAGES}


def check_versions(expected: dict[str, str]) -> None:
    """Refuse to work for a process whose packages are of other versions.

    Args:
        expected: that process's :func:`package_versions`.

    Raises:
        ValueError: the versions differ; names the packages.
    """
    mine = package_versions()
    if other := [name for name in expected if mine[name] != expected[name]]:
        told = ", ".join(f"{name} {mine[name]} where the driver has {expected[name]}" for name in other)
        raise ValueError(f"it has {told}: install the same versions on all nodes")
