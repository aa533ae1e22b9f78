import pytest
from kits.fakewheel import METADATA, VERSION, WHEEL, write_wheel

from m8d_build.errors import WheelInvalid
from m8d_build.wheel.relabel import (
    dist_info_name,
    patched_version,
    retag,
    set_metadata_version,
    set_module_version,
    wheel_name,
)
from m8d_build.wheel.wheelfile import open_wheel


def test_names_carry_the_local_label(tmp_path):
    wheel = open_wheel(write_wheel(tmp_path))
    assert patched_version(wheel, "cu124.m8d1") == "2.6.0+cu124.m8d1"
    assert dist_info_name(wheel, "cu124.m8d1") == "torch-2.6.0+cu124.m8d1.dist-info"
    name = wheel_name(wheel, "cu124.m8d1", "manylinux_2_34_x86_64")
    assert name == "torch-2.6.0+cu124.m8d1-cp311-cp311-manylinux_2_34_x86_64.whl"


@pytest.mark.parametrize("label", ["", "a b", "cu124-m8d1", "CU124", "a_b", "a/b"])
def test_a_label_that_is_not_in_normal_form_is_refused(tmp_path, label):
    with pytest.raises(ValueError, match="local"):
        patched_version(open_wheel(write_wheel(tmp_path)), label)


def test_only_the_version_header_changes():
    changed = set_metadata_version(METADATA, "2.6.0+x")
    assert changed == METADATA.replace(b"Version: 2.6.0\n", b"Version: 2.6.0+x\n")
    assert b"Metadata-Version: 2.1" in changed
    assert b"Version: 9.9.9 of the body" in changed


def test_metadata_without_a_version_is_refused():
    with pytest.raises(WheelInvalid, match="no Version"):
        set_metadata_version(b"Name: torch\n\nVersion: 1\n", "2")
    with pytest.raises(WheelInvalid, match="2 Version lines"):
        set_metadata_version(b"Version: 1\nVersion: 1\n\n", "2")


def test_line_endings_stay():
    assert set_metadata_version(b"A: 1\r\nVersion: 1\r\n\r\nVersion: 1\r\n", "2") == (
        b"A: 1\r\nVersion: 2\r\n\r\nVersion: 1\r\n"
    )


def test_only_the_version_string_of_the_module_changes():
    assert set_module_version(VERSION, "2.6.0+x") == VERSION.replace(b"'2.6.0+cu124'", b"'2.6.0+x'")
    assert (
        set_module_version(b'__version__ = "1"  # it\'s \xc3\xa9\n', "2")
        == b"__version__ = '2'  # it's \xc3\xa9\n"
    )


@pytest.mark.parametrize(
    "text", [b"a = 1\n", b"__version__ = 1\n", b"__version__ = '1'\n__version__ = '2'\n"]
)
def test_a_module_without_one_version_is_refused(text):
    with pytest.raises(WheelInvalid, match="__version__"):
        set_module_version(text, "2")


def test_tags_are_replaced_where_they_stood():
    assert retag(WHEEL, {"b", "a"}) == WHEEL.replace(b"Tag: cp311-cp311-linux_x86_64\n", b"Tag: a\nTag: b\n")
    assert retag(b"X: 1\r\nTag: a\r\nTag: b\r\nY: 2\r\n", {"c"}) == b"X: 1\r\nTag: c\r\nY: 2\r\n"
    with pytest.raises(WheelInvalid, match="no Tag"):
        retag(b"X: 1\n", {"a"})
