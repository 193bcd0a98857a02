"""What every test may use; the data folder beside the project is optional."""

from __future__ import annotations

import os
from collections import Counter
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


# Of the cases of a parametrized test in these files CI runs every n-th one, the rest are marked
# release: pytest -m release, or ALL_CASES=1 for all at once.
ONE_CASE_OF = {
    "benchmarks/test_benchmarks.py": 2,
    "chat/test_dataset.py": 3,
    "chat/test_other_templates.py": 2,
    "chat/test_real_conversations.py": 2,
    "chat/test_templates.py": 3,
    "chat_images/test_dataset.py": 2,
    "chat_images/test_modes.py": 3,
    "examples/test_sft_compile.py": 2,
    "examples/test_sft_ranks.py": 2,
    "loading/prefetch/test_fork.py": 2,
    "loading/prefetch/test_stateful_dataloader.py": 2,
    "loading/prefetch/test_stream_loader.py": 2,
    "loading/sampler/test_mixture.py": 3,
    "loading/sampler/test_rows.py": 2,
    "loading/streaming/test_columns.py": 4,
    "loading/streaming/test_mixed.py": 4,
    "loading/streaming/test_packed.py": 2,
    "loading/streaming/test_resume.py": 3,
    "loading/streaming/test_shards.py": 3,
    "loading/streaming/test_shuffled.py": 3,
    "loading/streaming/test_skipping.py": 3,
    "loading/streaming/test_stages.py": 3,
    "packing/test_image_plans.py": 2,
    "reporting/test_families.py": 3,
    "rl/test_micro_batches.py": 2,
    "test_batch_counts.py": 3,
    "test_context_ranks.py": 2,
    "test_isolate_mixers.py": 2,
    "test_isolated_models.py": 2,
    "vision/test_batch_images.py": 2,
    "vision/test_isolation_images.py": 2,
    "vision/test_parity.py": 2,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    numbers: Counter[tuple[Path, str]] = Counter()
    for item in items:
        name = item.path.as_posix().rpartition("/tests/")[2]
        test = item.path, getattr(item, "originalname", item.name)
        number = numbers[test] % ONE_CASE_OF.get(name, 1)
        numbers[test] += 1
        if number and "ALL_CASES" not in os.environ:
            item.add_marker(pytest.mark.release)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, found none"))
