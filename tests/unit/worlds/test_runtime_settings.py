"""The library's settings: argument, environment, default; a wrong value is named."""

from __future__ import annotations

import warnings

import pytest

from multiworld import settings
from multiworld.errors import MultiworldError
from multiworld.settings import Settings, load


def test_nothing_set_gives_the_defaults_and_empty_means_not_set():
    empty = dict.fromkeys(
        [
            "M8D_HANG_TIMEOUT", "M8D_BUSY_TIMEOUT", "M8D_JOIN_TIMEOUT", "M8D_CLOSE_TIMEOUT", "M8D_SHIM", "M8D_REQUIRE_PATCH",
            "M8D_GLOO_THREADS", "M8D_EARLY_CLOSE", "M8D_HOST", "M8D_IFNAME", "M8D_LANE",
        ],
        " ",
    )  # fmt: skip
    assert load({}) == load(empty) == Settings(5.0, 60.0, 30.0, 5.0, "auto", require_patch=False)


def test_every_variable_is_read():
    env = {
        "M8D_HANG_TIMEOUT": "0.3", "M8D_BUSY_TIMEOUT": "9", "M8D_JOIN_TIMEOUT": "7", "M8D_CLOSE_TIMEOUT": "1.5", "M8D_SHIM": " OFF ",
        "M8D_REQUIRE_PATCH": "yes", "M8D_GLOO_THREADS": "3", "M8D_EARLY_CLOSE": "0",
        "M8D_HOST": "10.0.0.7", "M8D_IFNAME": "eth0,eth1", "M8D_LANE": "0",
        "M8D_STUCK_AFTER": "2.5", "M8D_REPORTS": "there",
    }  # fmt: skip
    host = {"host": "10.0.0.7", "ifname": "eth0,eth1", "lane": False}
    assert load(env) == Settings(
        0.3,
        9.0,
        7.0,
        1.5,
        "off",
        require_patch=True,
        gloo_threads=3,
        early_close=False,
        stuck_after=2.5,
        reports="there",
        **host,
    )
    assert all(f"``{name}``" in (settings.__doc__ or "") for name in env)


def test_a_former_name_is_read_with_one_warning_and_loses_to_the_new_one(caplog):
    settings._warn_of.cache_clear()
    for told in (1, 0):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert not load({"M8D_TETHERS": "0", "M8D_EARLY_CLOSE": " "}).early_close
        assert [each.category for each in seen] == [DeprecationWarning] * told
    [record] = caplog.records
    assert "M8D_TETHERS" in record.getMessage()
    assert "M8D_EARLY_CLOSE" in record.getMessage()
    assert load({"M8D_TETHERS": "0", "M8D_EARLY_CLOSE": "1"}).early_close
    with pytest.raises(MultiworldError, match=r"M8D_TETHERS='never'.*0 or 1"):
        load({"M8D_TETHERS": "never"})
    with pytest.warns(DeprecationWarning, match="early_close"):
        assert Settings(early_close=False).tethers is False


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ""),
        ({"M8D_RUN_ID": " a "}, "a"),
        ({"TORCHELASTIC_RUN_ID": "b"}, "b"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"M8D_RUN_ID": "a", "TORCHELASTIC_RUN_ID": "b"}, "a"),
        ({"M8D_RUN_ID": "", "TORCHELASTIC_RUN_ID": "b"}, ""),
    ],
)
def test_the_run_of_a_process(environ, found):
    assert settings.run_id(environ) == found


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("M8D_HANG_TIMEOUT", "0.29", "at least 0.3"),
        ("M8D_HANG_TIMEOUT", "nan", "at least 0.3"),
        ("M8D_JOIN_TIMEOUT", "soon", "number of seconds"),
        ("M8D_JOIN_TIMEOUT", "inf", "number of seconds"),
        ("M8D_JOIN_TIMEOUT", "0", "at least 0.001"),
        ("M8D_CLOSE_TIMEOUT", "-1", "at least 0"),
        ("M8D_SHIM", "maybe", "auto, on, off"),
        ("M8D_REQUIRE_PATCH", "2", "0 or 1"),
        ("M8D_GLOO_THREADS", "65", "0 to 64"),
        ("M8D_EARLY_CLOSE", "never", "0 or 1"),
        ("M8D_GLOO_THREADS", "-1", "0 to 64"),
        ("M8D_GLOO_THREADS", "two", "0 to 64"),
    ],
)
def test_a_wrong_value_is_refused_with_its_rule(name, value, rule):
    with pytest.raises(MultiworldError, match=rule) as caught:
        load({name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_what_a_user_set_is_kept(monkeypatch):
    monkeypatch.setenv("M8D_TEST_A", "mine")
    monkeypatch.delenv("M8D_TEST_B", raising=False)
    assert settings.set_default_environment({"M8D_TEST_A": "x", "M8D_TEST_B": "y"}) == {"M8D_TEST_B": "y"}
    assert (settings.environment("M8D_TEST_A"), settings.environment("M8D_TEST_B")) == ("mine", "y")
    monkeypatch.delenv("M8D_TEST_B")
    assert settings.environment("M8D_TEST_B") is None
