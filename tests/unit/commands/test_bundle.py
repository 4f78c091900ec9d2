"""The bundle for a machine without a network has what the package needs there, and fits."""

from __future__ import annotations

import json

import pytest

from bundle import (
    GPU_LOCK,
    IMAGE,
    LEFT_OUT,
    MOST_BYTES,
    REPORT,
    check_size,
    locked,
    missing,
    named,
    names_in,
    needs,
)

HAVE = names_in(IMAGE)


def test_what_is_missing_is_all_that_is_needed_and_nothing_that_is_there():
    found = set(missing(HAVE))
    assert {"megatron-core", "megatron-energon", "datasets", "av", "simplejpeg"} <= found
    assert not found & (HAVE | LEFT_OUT)
    for name in {"megatron-vlm"} | found - set(locked(GPU_LOCK)):
        assert set(needs(name)) <= found | HAVE | LEFT_OUT


def test_kernels_for_gated_delta_nets_are_in_the_bundle_with_all_that_they_need():
    found = set(missing(HAVE))
    assert {"flash-linear-attention", "fla-core"} <= found
    assert set(needs("megatron-vlm", "gpu")) <= found | HAVE | LEFT_OUT
    assert "einops" in HAVE and "einops" in missing(HAVE - {"einops"})


def test_every_wheel_is_of_the_locked_version():
    entries = locked() | locked(GPU_LOCK)
    for name in missing(HAVE):
        assert entries[name].count("--hash=sha256:"), name


def test_the_bundle_that_was_made_has_these_wheels_and_fits():
    """`python tools/bundle.py FOLDER` makes it again when the lock has other packages."""
    report = json.loads(REPORT.read_text())
    wheels = {named(each["wheel"].split("-")[0]) for each in report["wheels"]}
    assert wheels == {*missing(HAVE), "megatron-vlm"}
    assert sum(each["bytes"] for each in report["wheels"]) < report["bytes"] <= MOST_BYTES


def test_a_bundle_that_is_too_large_is_refused():
    check_size({"wheels/small.whl": MOST_BYTES})
    with pytest.raises(ValueError, match="over 62,914,560; the largest files: .*large.whl"):
        check_size({"wheels/large.whl": MOST_BYTES, "wheels/small.whl": 1})
