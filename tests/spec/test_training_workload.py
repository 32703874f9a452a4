import pytest

from hydragraph.spec.training_workload import Workload, full_lengths


def test_equal_sequences_are_one_mini_batch() -> None:
    workload = Workload(sequences=3, length=7)
    assert workload.batches == ((7, 7, 7),)
    assert workload.longest == 7
    assert workload.typical is workload
    assert str(workload) == "3 sequences of 7 tokens"


def test_full_sequences_stay_within_the_mini_batch() -> None:
    assert full_lengths(1500, 1024) == [1024, 476]
    assert full_lengths(2048, 1024) == [1024, 1024]
    assert full_lengths(1025, 1024) == [1024]  # a sequence of one token has no target
    assert full_lengths(500, 1024) == [1024]


def test_typical_sequences_are_as_much_work() -> None:
    workload = Workload(lengths=[[100, 300], [200, 200, 200]])
    typical = workload.typical
    tokens = (400 + 600) / 2
    squares = (100**2 + 300**2 + 3 * 200**2) / 2
    assert typical.sequences * typical.length == pytest.approx(tokens, rel=0.2)
    assert typical.length == round(squares / tokens)
    assert str(workload) == "2 sample mini-batches of 2 to 3 sequences, of up to 300 tokens"
    assert str(Workload(lengths=[[16]])) == "1 sample mini-batch of 1 sequence, of up to 16 tokens"
    assert str(Workload(1, 1)) == "1 sequence of 1 token"
    assert str(Workload(2, 3000)) == "2 sequences of 3,000 tokens"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give one of the two"),
        ({"sequences": 2, "length": 3, "lengths": [[1]]}, "give one of the two"),
        ({"sequences": 2}, "whole numbers above 0"),
        ({"sequences": -1, "length": 5}, "whole numbers above 0"),
        ({"sequences": 2.5, "length": 5}, "whole numbers above 0"),
        ({"lengths": [[3], []]}, r"lengths\[1\]"),
        ({"lengths": [[3, 0]]}, "each above 0"),
        ({"lengths": [[1.5]]}, "whole numbers, as in"),
        ({"lengths": [5]}, "whole numbers, as in"),
        ({"lengths": "abc"}, "whole numbers, as in"),
    ],
)
def test_what_is_no_workload_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload(**given)  # pyrefly: ignore[bad-argument-type]
