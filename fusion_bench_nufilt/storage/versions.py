"""The versions of the packages that results depend on."""

from importlib.metadata import version

_PACKAGES = ("fusion-bench-nufilt", "fusion-bench", "torch", "transformers", "safetensors")


def package_versions() -> dict[str, str]:
    """Return the versions by the names that the packages are installed under."""
    return {package: version(package) for package in _PACKAGES}
