"""What every test may use; the data folder beside the project is optional."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import TypeVar

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


# CI runs every n-th case of a parametrized test in these files or folders, but all of refusals.
# The rest is marked release: pytest -m release, or ALL_CASES=1 for all at once.
ONE_CASE_OF = {
    "chat/test_dataset.py": 5,
    "chat/test_real_conversations.py": 6,
    "chat/test_templates.py": 4,
    "chat_images": 5,
    "kernels": 2,
    "loading": 4,
    "loading/streaming": 6,
    "loading/prefetch": 6,
    "packing/test_image_plans.py": 3,
    "reporting": 3,
    "rl/test_micro_batches.py": 3,
    "test_batch_counts.py": 3,
    "test_batch_derivations.py": 3,
    "test_block_masks.py": 2,
    "test_context_ranks.py": 3,
    "test_context_shards.py": 3,
    "test_isolate_mixers.py": 3,
    "test_isolation_models.py": 2,
    "vision": 4,
}
OF_REFUSALS = re.compile(
    "refus|error|_named|wrong|bad|cannot|too_many|noticed|cut_off|do_not_write"
)
# Of these files and folders CI runs no other test: a run of each script, and of each way to ship.
SMOKE = {
    "docs/test_site.py": set(),  # make docs
    "dropin": {
        "test_the_first_loss_by_hand_and_another_is_refused",
        "test_trainer_and_a_loop_train_the_same_rows_to_the_same_losses",
        "test_dispatch_batches_that_cut_the_boundaries_are_refused",
    },
    "examples": {
        "test_it_learns_answers_and_saves",
        "test_it_plays_trains_and_saves",
        "test_it_trains_and_prints_how_often_it_is_right",
        "test_it_trains_and_saves[dpo]",
        "test_it_trains_answers_and_saves",
        "test_it_trains_evaluates_and_saves",
        "test_options_that_are_refused[--batch-size 0]",
        "test_questions_and_answers",
        "test_a_resumed_run_is_exact",
        "test_what_it_starts[eight_gpus_fsdp2]",
    },
    "test_notebooks.py": {"test_a_notebook_shows_what_is_committed[01_batches]"},
    "test_packaging.py": {
        "test_a_package_that_is_installed_and_broken_is_not_called_absent",
        "test_all_but_what_names_its_package_works_with_torch_and_numpy_alone",
        "test_the_wheel_has_the_package_and_nothing_else",
    },
    "test_readme.py": {"test_its_code_prints_what_it_shows"},
}
ALONE = {  # several seconds each
    "test_keys_are_the_same_in_another_process",
    "test_a_rank_without_an_image_trains_on_with_the_others",
    "test_without_a_capacity_it_is",
    "test_a_run_goes_on_with_other_context_ranks",
    "test_compiled_training_is_the_same_and_breaks_no_graph",
    "test_a_chain_with_workers",
    "test_a_pipe_that_is_closed_early",
    "test_a_process_ends_at_once_and_says_why",
    "test_a_process_of_its_own_says_nothing_beside_its_result",
    "test_resume_is_exact",
    "test_an_interrupt",
    "test_chains_see_a_keyed_order_that_is_off_by_one",
    "test_equals_the_examples_one_by_one",
    "test_every_family_does_with_its_inputs_what_the_table_says",
    "test_every_two_way_type_of_the_table_has_a_case",
    "test_streams_cut_trees_and_resume_within_one",
    "test_the_path_of_flash_attention_equals_each_text_alone",
    "test_under_accelerate_on_two_ranks",
}
Setting = TypeVar("Setting")


def setting_of(path: str, settings: dict[str, Setting]) -> Setting | None:
    """Return what is set for a file, or for the nearest folder around it."""
    while path and path not in settings:
        path = path.rpartition("/")[0]
    return settings.get(path)


def is_of_refusals(item: pytest.Item) -> bool:
    """Tell whether a case is a row of a table of errors: by its name, or by what it is given."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    has_words = bool({"message", "words", "error"} & {*given})
    return has_words or OF_REFUSALS.search(item.name) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Let tests of Ctrl-C work where it is ignored: in a job in the background, as of nohup."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    numbers: Counter[tuple[Path, str]] = Counter()
    for item in items:
        name = getattr(item, "originalname", item.name)
        path = item.path.as_posix().rpartition("/tests/")[2]
        number = numbers[item.path, name]
        numbers[item.path, name] += 1
        smoke, share = setting_of(path, SMOKE), setting_of(path, ONE_CASE_OF) or 1
        is_left_out = number % share and not is_of_refusals(item)
        if smoke is not None:
            is_left_out = item.name not in smoke
        if (is_left_out or name in ALONE) and "ALL_CASES" not in os.environ:
            item.add_marker(pytest.mark.release)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, found none"))
