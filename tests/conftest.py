"""What every test may use; the data folder beside the project is optional."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.batch_samples import examples
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator

DATA_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # tests/gpu needs none
    pass
else:
    PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("default", PATIENT, derandomize=True, max_examples=40)
    settings.register_profile("thorough", PATIENT, max_examples=2000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # datasets: no request for each file that is read
torch.set_num_threads(1)  # two pytest workers on two cores


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Where real data lies, if it does: TORCH_COLLATE_KIT_DATA, else ../shared/data."""
    return Path(os.environ.get("TORCH_COLLATE_KIT_DATA", DATA_FOLDER))


@pytest.fixture(scope="session")
def shared_data(data_folder: Path) -> Path:
    """The folder with real data; without it the test is skipped."""
    if not data_folder.is_dir():
        pytest.skip(f"no real data: {data_folder} not found (set TORCH_COLLATE_KIT_DATA)")
    return data_folder


@pytest.fixture
def packed() -> Batch:
    """Rows [7 | 1 pad], [5 + 3], [4 + 2 | 2 pads]."""
    return PackedCollator(0, max_tokens=8, strategy="best_fit_decreasing")(examples())


@pytest.fixture
def padded() -> Batch:
    return PaddedCollator(0)(examples())


@pytest.fixture(params=["packed", "padded"])
def collated(request: pytest.FixtureRequest) -> Batch:
    return request.getfixturevalue(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, found none"))
