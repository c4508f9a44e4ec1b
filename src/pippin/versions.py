"""Versions of pippin and of what computes for it, for manifests and `pippin version`."""

import importlib.metadata
import platform

from pippin import __version__

PACKAGES = (
    "compressed-tensors",
    "coreai-core",
    "coreai-torch",
    "coremltools",
    "executorch",
    "gguf",
    "jax",
    "mlx",
    "mlx-lm",
    "numpy",
    "optax",
    "torch",
    "torchao",
    "transformers",
)


def versions() -> dict[str, str]:
    """By package name; one that is not installed is left out."""
    found = {"pippin": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
