"""Home shares as a value: text, YAML, what fits the ranks and the nodes, and what is refused in which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.spec.home import Rule, home_of
from hydragraph.spec.record import from_record, to_record

NUMBERS = st.just(0.0) | st.integers(0, 99).map(float) | st.floats(0, 1e6)


@st.composite
def homes(draw: st.DrawFn) -> hg.Home:
    n = draw(st.integers(1, 20))
    lists = st.lists(NUMBERS, min_size=n, max_size=n).filter(any)
    nodes = draw(st.none() | st.lists(st.integers(0, 5), min_size=n, max_size=n))
    names = st.sampled_from(["embed", "layer.0", "layer.1", "lm_head.weight"])
    buckets = draw(st.dictionaries(names, lists, max_size=3))
    rules: tuple[Rule | None, ...] = (None, "auto", "stages")
    rule = draw(st.sampled_from(rules))
    return hg.Home(draw(st.none() | lists), draw(st.sampled_from((1, 2))), buckets, nodes, rule)


@given(homes())
def test_its_text_and_its_record_read_back_as_its_equal(home: hg.Home) -> None:
    assert hg.Home.parse(str(home)) == home
    assert from_record(hg.Home, to_record(home)) == home
    assert hash(hg.Home.parse(str(home))) == hash(home)


def test_a_home_may_be_given_as_its_text() -> None:
    home = hg.Home(shares=[3, 1], copies=2)
    assert home_of("3,1 copies=2") == home_of(home) == home
    assert home_of(None) is None
    given: Any = [3, 1]
    with pytest.raises(ValueError, match=r"'home' is \[3, 1\]: give hg\.Home"):
        home_of(given)


def test_it_follows_its_ranks_into_another_order() -> None:
    home = hg.Home([3, 1, 0], 2, {"embed": [0, 1, 2]}, [0, 0, 1])
    assert home.reordered([2, 0, 1]) == hg.Home([0, 3, 1], 2, {"embed": [2, 0, 1]}, [1, 0, 0])
    assert home.reordered([2, 0, 1]).reordered([1, 2, 0]) == home
    assert hg.Home().reordered([1, 0]) == hg.Home()


def test_texts_by_hand() -> None:
    assert hg.Home.parse("equal") == hg.Home()
    assert hg.Home.parse("auto") == hg.Home(rule="auto")
    assert str(hg.Home([2, 1], 2, rule="stages")) == "stages shares=2,1 copies=2"
    assert hg.Home.parse("3,3,1,0 copies=2") == hg.Home(shares=[3, 3, 1, 0], copies=2)
    assert hg.Home.parse("8*1,8*0.5").shares == (1.0,) * 8 + (0.5,) * 8
    mixed = hg.Home([1, 1, 1, 1], 2, {"embed": [1, 0, 0, 1]}, [0, 0, 0, 1])
    assert str(mixed) == "4*1 copies=2 nodes=0,0,0,1 embed=1,0,0,1"
    assert mixed.shares_of("embed") == (1, 0, 0, 1)
    assert mixed.shares_of("layer.0") == (1, 1, 1, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixed.copies = 1  # pyrefly: ignore[read-only]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3,x", "'x' is not a share"),
        ("", "'' is not a share"),
        ("0,0", "whose sum is 0: give at least one rank a share above 0"),
        ("1,-1", "shares: rank 1 has -1.0"),
        ("1,nan", "shares: rank 1 has nan"),
        ("1e308,1e308", "sum is inf"),
        ("1,1 copies=3", "'copies' is 3: use 1, or 2"),
        ("1,1 copies=two", "'copies' is 'two'"),
        ("1,1 embed=1", "'shares' is for 2 ranks, 'buckets.embed' is for 1 ranks"),
        ("1,1 embed=0,0", "'buckets.embed' is"),
        ("1,1 nodes=0", "'nodes' is for 1 ranks"),
        ("1,1 nodes=0,0.5", "nodes: rank 1 is on node 0.5"),
        ("1,1 twice", "write copies=2"),
        ("1,1 copies=1 copies=2", "write copies=2"),
        ("1,1 shares=1,1", "write copies=2"),
    ],
)
def test_unusable_texts_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"home {text!r}") as caught:
        hg.Home.parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("shares", ["3,1", 3, [], [True, 1], ["1"], {0: 1}])
def test_shares_are_a_list_of_numbers(shares: Any) -> None:
    with pytest.raises(ValueError, match="shares"):
        hg.Home(shares)


@pytest.mark.parametrize(
    ("home", "ranks", "said"),
    [
        (hg.Home([1, 2, 3]), 2, "has 3 numbers, but the run has 2 ranks: give one number for each rank"),
        (hg.Home([1, 2]), 3, "has 2 numbers, but the run has 3 ranks: give one number for each rank"),
        (hg.Home(copies=2), 1, "two copies on 1 rank: start more ranks"),
        (hg.Home(nodes=[0, 1]), 3, "'nodes' has 2 numbers"),
        (hg.Home(buckets={"layer.7": [1, 1]}), 2, "no parameter bucket 'layer.7': use one of embed, layer.0"),
    ],
)
def test_what_does_not_fit_the_world_or_the_model_is_refused(home: hg.Home, ranks: int, said: str) -> None:
    with pytest.raises(ValueError, match="home") as caught:
        home.check(ranks, ["embed", "layer.0"])
    assert said in str(caught.value)


def test_copies_go_by_nodes() -> None:
    twice = hg.Home([3, 1, 1], copies=2)
    assert twice.on([4, 4, 7]).nodes == (4, 4, 7)
    assert twice.on([4, 4, 4]).nodes == (0, 1, 2)  # on one host, what is lost is a process
    assert dataclasses.replace(twice, nodes=(0, 1, 1)).on([4, 4, 4]).nodes == (0, 1, 1)
    assert hg.Home([3, 1, 1]).on([0, 0, 1]).nodes is None
    with pytest.raises(ValueError, match=r"shares: all owners are on node 0, .*give ranks of another node a share"):
        hg.Home([1, 1, 0], copies=2).on([0, 0, 1])
    with pytest.raises(ValueError, match="embed: all owners are on node 1"):
        hg.Home(copies=2, buckets={"embed": [0, 0, 1]}).on([0, 0, 1])
    with pytest.raises(ValueError, match="all owners are on node 0"):
        hg.Home(copies=2, nodes=[0, 0, 0]).on([0, 1, 2])
