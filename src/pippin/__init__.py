"""pippin: adapt an open language model, shrink it, ship it, and prove that nothing was lost."""

__version__ = "0.1.0"
