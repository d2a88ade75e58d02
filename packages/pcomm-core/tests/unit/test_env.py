"""The PCOMM_* variables: strict, read when asked, and all in the table."""

from __future__ import annotations

import pytest

from pcomm.core import environment
from pcomm.core.errors import ConfigError


def test_values_are_those_of_now_and_of_the_environment_that_is_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"PCOMM_TIMEOUT_S": "2.5", "PCOMM_LOG": "debug"}
    assert environment.timeout_s(environ) == 2.5
    assert environment.log_level(environ) == "debug"
    assert environment.ranks_timeout_s(environ) == 60.0
    for value in ("7", "8"):
        monkeypatch.setenv("PCOMM_TIMEOUT_S", value)
        assert environment.timeout_s() == float(value)


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "a minute", "60s"])
def test_a_time_that_is_no_time_is_an_error_and_not_the_default(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment.timeout_s({"PCOMM_TIMEOUT_S": value})
    assert caught.value.asked == "environment variable PCOMM_TIMEOUT_S"
    assert repr(value) in caught.value.found
    assert "seconds above 0" in caught.value.why
    assert "for the default, 60." in caught.value.fix


@pytest.mark.parametrize("value", ["loud", "INFO", ""])
def test_an_unknown_level_is_an_error_that_lists_the_levels(value: str) -> None:
    with pytest.raises(ConfigError, match="`debug`, `info`, `warning`, `error`"):
        environment.log_level({"PCOMM_LOG": value})


@pytest.mark.parametrize("variable", environment.VARIABLES, ids=lambda variable: variable.name)
def test_check_parses_every_declared_variable(variable: environment.Variable[object]) -> None:
    with pytest.raises(ConfigError, match=variable.name):
        environment.check({variable.name: "no value of any variable"})


def test_declared_defaults_are_values_that_the_variable_takes() -> None:
    for variable in environment.VARIABLES:
        if variable.default is not None:
            assert variable.parse(str(variable.default)) == variable.default


def test_check_leaves_others_alone_and_names_the_near_miss_of_an_unknown_variable() -> None:
    environment.check({"PCOMM_TIMEOUT_S": "1", "PCOMMAND": "x", "NCCL_DEBUG": "INFO", "pcomm": ""})
    with pytest.raises(ConfigError, match="Did you mean 'PCOMM_TIMEOUT_S'") as caught:
        environment.check({"PCOMM_TIMOUT_S": "1"})
    assert "PCOMM_TIMOUT_S" in caught.value.asked
