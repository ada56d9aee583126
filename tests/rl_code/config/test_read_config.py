"""Properties of reading configs: strict, and every complaint names the key, the value and what
would be right.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.config import read_config


@dataclasses.dataclass(frozen=True)
class Loss:
    kind: Literal["ppo", "gspo"]
    clip_low: float
    clip_high: float | None

    def __post_init__(self):
        if self.clip_low < 0:
            raise ValueError(f"clip_low={self.clip_low} must not be negative")


@dataclasses.dataclass(frozen=True)
class Files:
    path: str


@dataclasses.dataclass(frozen=True)
class Generated:
    levels: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Run:
    steps: int
    resume: bool
    loss: Loss
    tasks: Files | Generated
    betas: tuple[float, ...]
    suites: tuple[Files, ...]
    weights: Mapping[str, float]
    extra: Any
    note: str = "none"


def good() -> dict:
    return {
        "steps": 3,
        "resume": True,
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": None},
        "tasks": {"levels": (1, 2)},
        "betas": [0.9, 1],
        "suites": ({"path": "a"}, {"path": "b"}),
        "weights": {"tests": 1},
        "extra": {"anything": (1,)},
    }


def changed(key: str, value: Any) -> ml_collections.ConfigDict:
    """The good config with one key set, or deleted where the value is KeyError."""
    config = good()
    *sections, last = key.split(".")
    section = config
    for name in sections:
        section = section[name]
    if value is KeyError:
        del section[last]
    else:
        section[last] = value
    return ml_collections.ConfigDict(config)


def test_a_config_becomes_the_dataclass_it_describes():
    expected = Run(
        steps=3,
        resume=True,
        loss=Loss("ppo", 0.2, None),
        tasks=Generated((1, 2)),
        betas=(0.9, 1.0),
        suites=(Files("a"), Files("b")),
        weights={"tests": 1.0},
        extra={"anything": (1,)},
    )
    for config in (good(), ml_collections.ConfigDict(good())):
        built = read_config.build(Run, config)
        assert built == expected
        assert [type(x) for x in built.betas] == [float, float]


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("setps", 4, r"config\.setps: no such key\. Did you mean 'steps'\?"),
        ("loss.clip_hihg", 4, r"config\.loss\.clip_hihg: no such key\. Did you mean 'clip_high'\?"),
        (
            "loss.zzz",
            4,
            r"config\.loss\.zzz: no such key\. config\.loss has: kind, clip_low, clip_high",
        ),
        ("steps", KeyError, r"config\.steps: missing; expected int"),
        (
            "loss",
            KeyError,
            r"config\.loss: missing; expected a section with the keys kind, clip_low, clip_high",
        ),
        (
            "steps",
            ml_collections.config_dict.placeholder(int, required=True),
            r"config\.steps: missing",
        ),
        ("steps", 1.0, r"config\.steps = 1\.0: expected int"),
        ("steps", True, r"config\.steps = True: expected int"),
        ("steps", "3", r"config\.steps = '3': expected int"),
        ("steps", None, r"config\.steps = None: expected int"),
        ("resume", 1, r"config\.resume = 1: expected bool"),
        ("loss", 3, r"config\.loss = 3: expected a section with the keys kind"),
        (
            "loss.kind",
            "gpso",
            r"config\.loss\.kind = 'gpso': expected one of 'ppo', 'gspo'\. Did you mean 'gspo'\?",
        ),
        ("loss.clip_low", float("nan"), r"config\.loss\.clip_low = nan: expected float"),
        ("loss.clip_high", float("nan"), r"config\.loss\.clip_high = nan: expected"),
        ("betas", [0.5, float("nan")], r"config\.betas\[1\] = nan: expected float"),
        ("weights", {"a": 10**400}, r"config\.weights\.a = 10+: expected float"),
        ("loss.clip_low", False, r"config\.loss\.clip_low = False: expected float"),
        ("loss.clip_low", -1.0, r"config\.loss: clip_low=-1\.0 must not be negative"),
        ("loss.clip_high", "x", r"config\.loss\.clip_high = 'x': expected float or None"),
        ("betas", (0.9, "x"), r"config\.betas\[1\] = 'x': expected float"),
        ("betas", 0.9, r"config\.betas = 0\.9: expected a tuple, each item float"),
        ("suites", ({"path": 3},), r"config\.suites\[0\]\.path = 3: expected str"),
        (
            "tasks.levels",
            (1, 2, 3),
            r"config\.tasks = .*: expected a section .* path or a section .* levels",
        ),
        ("weights", {"tests": "x"}, r"config\.weights\.tests = 'x': expected float"),
        ("note", 3, r"config\.note = 3: expected str"),
    ],
)
def test_a_wrong_config_is_refused_by_name_and_value(key, value, complaint):
    with pytest.raises(read_config.ConfigError, match=complaint):
        read_config.build(Run, changed(key, value))


scalars = st.sampled_from(
    [None, True, False, 0, 1, 1.0, -0.0, float("nan"), float("inf"), "", "1", (), (1, 2.5), [3]]
)
sections = st.dictionaries(st.sampled_from("abc"), scalars, max_size=3)
configs = st.dictionaries(st.sampled_from("xyz"), scalars | sections, max_size=3)


@settings(deadline=None)
@given(configs, configs)
def test_configs_differ_exactly_when_their_json_does(a, b):
    assert (read_config.to_json(a) == read_config.to_json(b)) == (read_config.diff(a, b) == [])


@settings(deadline=None)
@given(configs)
def test_a_config_equals_what_its_json_says(config):
    assert read_config.diff(config, json.loads(read_config.to_json(config))) == []


def test_a_difference_is_named_where_it_is():
    a = read_config.build(Run, good())
    b = dataclasses.replace(a, steps=4, loss=Loss("ppo", 0.3, None), tasks=Files("x"), betas=(0.9,))
    assert read_config.diff(a, a) == []
    assert read_config.diff(a, b) == [
        "betas",
        "loss.clip_low",
        "steps",
        "tasks.levels",
        "tasks.path",
    ]
    assert (
        read_config.lookup(b, "loss.clip_low") == 0.3 and read_config.lookup(b, "loss.x.y") is None
    )


def test_one_one_point_zero_and_true_are_three_values():
    assert read_config.diff({"a": 1, "b": 1, "c": 1}, {"a": True, "b": 1.0, "c": 1}) == ["a", "b"]


def test_a_key_that_is_newer_than_a_folder_and_none_is_no_difference():
    there = {"rollout": {"workers": 4}, "seed": 0}
    here = {"rollout": {"workers": 4, "picks": None}, "seed": 0, "documents": None}
    read_config.check_same(there, here, "runs/a")
    here["rollout"]["picks"] = "replay"
    with pytest.raises(
        read_config.ConfigError, match=r"rollout\.picks = None there, 'replay' here"
    ):
        read_config.check_same(there, here, "runs/a")


@dataclasses.dataclass(frozen=True)
class Newer:
    """A section with keys that a folder of before does not have."""

    old: int
    rate: float = 0.0
    parts: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class Holder:
    """A config with such a section."""

    section: Newer
    whole: Newer = Newer(3)


def test_a_key_that_is_newer_than_a_folder_and_has_its_default_is_no_difference():
    there = {"section": {"old": 1}}
    read_config.check_same(there, Holder(Newer(1)), "runs/a")
    differs = {
        r"section\.rate = None there, 0\.5 here": Holder(Newer(1, rate=0.5)),
        r"section\.parts = None there, \[1\] here": Holder(Newer(1, parts=(1,))),
        r"section\.old = 1 there, 2 here": Holder(Newer(2)),
        r"whole = None there, \{'old': 4": Holder(Newer(1), whole=Newer(4)),
    }
    for message, here in differs.items():
        with pytest.raises(read_config.ConfigError, match=message):
            read_config.check_same(there, here, "runs/a")
    # a key without a default
    with pytest.raises(read_config.ConfigError, match=r"section\.old = None there, 1 here"):
        read_config.check_same({"section": {}}, Holder(Newer(1)), "runs/a")
    # what the folder says is no default
    with pytest.raises(read_config.ConfigError, match=r"section\.rate = 0\.5 there, 0\.0 here"):
        read_config.check_same({"section": {"old": 1, "rate": 0.5}}, Holder(Newer(1)), "runs/a")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """A section with a key that had another name before."""

    tools_s: float = 1.0


def test_a_renamed_key_is_refused_by_its_new_name():
    with pytest.raises(
        read_config.ConfigError,
        match=r"config\.episode_s: no such key\. It is called 'tools_s' now",
    ):
        read_config.build(Bounds, {"episode_s": 3.0})
    with pytest.raises(
        read_config.ConfigError, match=r"episode_s = 3\.0 there, None here \(tools_s now\)"
    ):
        read_config.check_same({"episode_s": 3.0}, Bounds(), "runs/a")
