"""The JAX engine on a CPU, beside transformers and the torch engine as its references."""

import pytest

from pippin.engines import load_engine


@pytest.fixture(scope="session")
def jax_engine():
    """JAX on the CPU."""
    pytest.importorskip("jax")
    return load_engine("jax", "cpu")
