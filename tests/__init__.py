"""Tests mirror src/pippin; helpers that several files share stand beside them."""
