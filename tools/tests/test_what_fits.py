"""The table of models that fit into resilient runs, beside what is counted now."""

import pytest

from pcomm.integration.config.rules import validate_resilient
from pcomm.integration.config.sections import Config
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.forecast.dry_run import parameters_by_kind
from pcomm.integration.forecast.resilient_step import state_bytes
from what_fits import MODELS, PAGE, SPLITS, filled, head, row

LINES = PAGE.read_text().splitlines()


# A row counts six whole models; all but one run with the long tests.
SHORT = ("0.5B", 4)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, tp, marks=[] if (name, tp) == SHORT else [pytest.mark.soak])
        for name in MODELS
        for tp in SPLITS
    ],
)
def test_a_row_is_what_is_counted(name, tp):
    assert row(name, tp) in LINES, "run `python tools/what_fits.py`"


def test_the_table_has_these_rows_and_no_other():
    own = [line for line in LINES if line.startswith(tuple(f"| {name} |" for name in MODELS))]
    assert filled(PAGE.read_text(), [*head(), *own]) == PAGE.read_text()
    assert len(own) == len(MODELS) * len(SPLITS)


def test_state_is_sixteen_bytes_of_a_parameter_of_replicas_and_less_of_owners():
    """An oracle by hand: fp32 weights, gradients and two averages."""
    words = ["model.width=64", "model.heads=4", "train.global_batch_tokens=8192"]
    config = apply_overrides(Config(), words)
    resolved = validate_resilient(config, 8)
    parameters = sum(parameters_by_kind(resolved).values())
    assert state_bytes(resolved) == (4 * parameters, 4 * parameters, 8 * parameters)
    sharded = validate_resilient(apply_overrides(config, ["parallel.data='shard'"]), 8)
    weights, gradients, optimizer = state_bytes(sharded)
    assert (weights, gradients) == (4 * parameters, 4 * parameters)
    # Two of eight, of which what does not lie in one piece is there once more.
    assert 2 * parameters <= optimizer <= 1.01 * 3 * parameters
