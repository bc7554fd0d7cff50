"""Which versions of packages are installed, without importing them."""

import importlib.metadata
import importlib.util


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution by its name on PyPI; None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_importable(module: str) -> bool:
    """Whether there is such a top-level module; it is not imported and may still fail to be."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: imported, by something without a spec
        return True
