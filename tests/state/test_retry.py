"""The retry policy, with a clock of our own."""

import asyncio

import pytest

from planaria.state.retry import GaveUp, RetryPolicy, retried


class Flaky:
    """Fails as told, then answers; and the time that passes meanwhile."""

    def __init__(self, *failures: Exception, takes_s: float = 0.0) -> None:
        self.left, self.takes_s = list(failures), takes_s
        self.now, self.pauses, self.tries = 0.0, [], 0

    async def attempt(self) -> str:
        self.tries += 1
        self.now += self.takes_s
        if self.left:
            raise self.left.pop(0)
        return "done"

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def run(self, policy: RetryPolicy, chance: float = 0.0) -> str:
        passing = lambda error: isinstance(error, ConnectionError)  # noqa: E731
        return asyncio.run(
            retried(policy, self.attempt, passing, clock=lambda: self.now, sleep=self.sleep, chance=lambda: chance)
        )


def test_pauses_grow_up_to_the_longest():
    flaky = Flaky(*[ConnectionResetError()] * 5)
    assert flaky.run(RetryPolicy(attempts=6, first_s=1, factor=2, longest_s=5, jitter=0.5)) == "done"
    assert flaky.pauses == [1, 2, 4, 5, 5]


def test_jitter_takes_a_share_off():
    flaky = Flaky(*[ConnectionResetError()] * 2)
    flaky.run(RetryPolicy(first_s=1, jitter=0.5), chance=1.0)
    assert flaky.pauses == [0.5, 1.0]


def test_gives_up_after_so_many_tries():
    flaky = Flaky(*[ConnectionResetError("peer")] * 9)
    with pytest.raises(GaveUp, match=r"3 tries in 3\.0 s") as caught:
        flaky.run(RetryPolicy(attempts=3, first_s=1))
    assert flaky.tries == 3 and isinstance(caught.value.__cause__, ConnectionResetError)


def test_gives_up_after_so_long():
    flaky = Flaky(*[ConnectionResetError()] * 99, takes_s=10)
    with pytest.raises(GaveUp):
        flaky.run(RetryPolicy(attempts=99, first_s=1, factor=1, give_up_s=32))
    assert flaky.tries == 3 and flaky.now <= 32


def test_what_does_not_pass_is_raised_at_once():
    flaky = Flaky(ConnectionResetError(), ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        flaky.run(RetryPolicy())
    assert flaky.tries == 2


def test_many_failures_overflow_nothing():
    assert RetryPolicy(attempts=10**6, give_up_s=1e9).pause(99_999, 0, 0) == 10


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first_s": -1}, {"factor": 0.5}, {"jitter": 2}])
def test_wrong_policies(wrong):
    with pytest.raises(ValueError, match="must"):
        RetryPolicy(**wrong)
    assert RetryPolicy(attempts=1).brief().attempts == 1 and RetryPolicy().brief().attempts == 2
