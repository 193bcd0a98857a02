"""Tests of images; they need transformers and Pillow."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")
