"""What every test may use; the data folder beside the project is optional."""

from __future__ import annotations

import os
import re
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
    settings.register_profile("default", PATIENT, derandomize=True, max_examples=25)
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


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test computes: what it asserts must hold on a CUDA device, too."""
    return request.param


# Of the cases of a parametrized test in these files or folders CI runs every n-th one, but of
# tests of refusals all. The rest, and the tests named below, are marked release:
# pytest -m release, or ALL_CASES=1 for all at once.
ONE_CASE_OF = {
    "chat/test_dataset.py": 3,
    "chat/test_other_templates.py": 3,
    "chat/test_real_conversations.py": 3,
    "chat/test_templates.py": 4,
    "chat_images": 3,
    "collators/test_segments.py": 2,
    "kernels": 2,
    "loading": 4,
    "loading/streaming": 6,
    "loading/prefetch": 6,
    "packing/test_image_plans.py": 3,
    "reporting": 3,
    "rl/test_micro_batches.py": 3,
    "test_batch_counts.py": 3,
    "test_saved_fields.py": 3,
    "test_context_frameworks.py": 2,
    "collators/test_rollout_fuzz.py": 2,
    "test_context_ranks.py": 3,
    "test_context_shards.py": 3,
    "test_isolate_mixers.py": 3,
    "test_isolated_models.py": 3,
    "test_isolation_models.py": 2,
    "dropin": 2,
    "vision": 4,
}
OF_REFUSALS = re.compile("refused|_named|what_is_wrong")
ALONE = {  # several seconds each
    "test_a_run_goes_on_with_other_context_ranks",
    "test_the_sdist_has_all_that_its_tests_need",
    "test_a_compiled_model_follows_paths_without_a_graph_break",
    "test_a_chain_with_workers",
    "test_a_pipe_that_is_closed_early",
    "test_a_process_of_its_own_says_nothing_beside_its_result",
    "test_resume_is_exact",
    "test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_with_the_same_rows",
    "test_chains_see_a_keyed_order_that_is_off_by_one",
    "test_equals_the_examples_one_by_one",
    "test_every_family_does_with_its_inputs_what_the_table_says",
    "test_sft_trainer_trains_the_rows_of_trainer_to_the_same_losses",
    "test_streams_cut_trees_and_resume_within_one",
    "test_the_seed_decides_everything",
}


def share_of(path: str) -> int:
    """Every how many cases of a file run: what is said of it, or of the folder around it."""
    while path and path not in ONE_CASE_OF:
        path = path.rpartition("/")[0]
    return ONE_CASE_OF.get(path, 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    numbers: Counter[tuple[Path, str]] = Counter()
    for item in items:
        name = getattr(item, "originalname", item.name)
        share = share_of(item.path.as_posix().rpartition("/tests/")[2])
        number = numbers[item.path, name]
        numbers[item.path, name] += 1
        is_left_out = number % share and not OF_REFUSALS.search(name)
        if (is_left_out or name in ALONE) and "ALL_CASES" not in os.environ:
            item.add_marker(pytest.mark.release)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, found none"))
