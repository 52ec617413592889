"""Keys, and rate limits shared by processes."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.server.args import ServerArgs
from quire.server.context.api_keys import ApiKey, ApiKeys
from quire.server.context.rate_limits import RateLimiter
from quire.server.context.request_context import duration, is_id
from tests import fork_server


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_is_used_up_and_fills_again() -> None:
    clock = Clock()
    buckets, key = RateLimiter(clock=clock), ApiKey("a", requests_per_minute=3)
    assert [buckets.take_request(key)[0] for _ in range(4)] == [True, True, True, False]
    _, levels = buckets.take_request(key)
    assert levels.tokens is None
    assert levels.requests is not None
    assert (levels.requests.limit, levels.requests.remaining) == (3, 0)
    assert levels.requests.until(1) == pytest.approx(20)
    assert levels.requests.refill == pytest.approx(60)
    clock.now += 20
    assert [buckets.take_request(key)[0] for _ in range(2)] == [True, False]
    clock.now += 1000
    assert [buckets.take_request(key)[0] for _ in range(4)] == [True, True, True, False]
    assert buckets.take_request(ApiKey("b", requests_per_minute=3))[0]


def test_tokens_are_given_back_or_owed() -> None:
    clock = Clock()
    buckets, key = RateLimiter(clock=clock), ApiKey("a", tokens_per_minute=600)
    assert buckets.take_tokens(key, 500)[0]
    assert not buckets.take_tokens(key, 101)[0]
    buckets.give_back(key, 450)
    taken, levels = buckets.take_tokens(key, 550)
    assert taken
    assert levels.tokens is not None
    assert levels.tokens.remaining == pytest.approx(0)
    buckets.give_back(key, -100)
    assert not buckets.take_request(key)[0]
    clock.now += 9.9
    assert not buckets.take_request(key)[0]
    clock.now += 0.3
    assert buckets.take_request(key)[0]
    buckets.give_back(key, 10**9)
    assert buckets.take_tokens(key, 600)[0]
    assert not buckets.take_tokens(key, 1)[0]


def test_a_limit_that_comes_later_begins_full() -> None:
    buckets = RateLimiter(clock=Clock())
    for _ in range(50):
        assert buckets.take_request(ApiKey("a"))[0]
    limited = ApiKey("a", requests_per_minute=2)
    assert [buckets.take_request(limited)[0] for _ in range(3)] == [True, True, False]


def test_a_full_table_forgets_someone() -> None:
    buckets = RateLimiter(clock=Clock())
    for i in range(4200):
        assert buckets.take_request(ApiKey(f"k{i}", requests_per_minute=1))[0]
    assert not buckets.take_request(ApiKey("k4199", requests_per_minute=1))[0]


def _take(file: Path, count: int, taken: multiprocessing.Queue[int]) -> None:
    buckets, key = (
        RateLimiter(file),
        ApiKey("shared", requests_per_minute=500, tokens_per_minute=10**9),
    )
    taken.put(sum(buckets.take_request(key)[0] for _ in range(count)))


def test_processes_share_one_bucket(tmp_path: Path) -> None:
    context = fork_server.context()
    taken = context.Queue()
    file = tmp_path / "limits"
    workers = [context.Process(target=_take, args=(file, 400, taken)) for _ in range(3)]
    for worker in workers:
        worker.start()
    total = sum(taken.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    # Without a lock, workers would take many more than the tokens that refill meanwhile.
    assert 500 <= total <= 620
    assert (file.stat().st_mode & 0o777) == 0o600


# -- keys ------------------------------------------------------------------------------------------


def ring(tmp_path: Path, text: str, **settings: object) -> ApiKeys:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    file.chmod(0o600)
    return ApiKeys(ServerArgs(api_key_file=str(file), **settings))  # type: ignore[arg-type]


def test_keys_of_a_file_have_limits_of_their_own(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-bob").hexdigest()
    keys = ring(
        tmp_path,
        f"""
        [alice]
        key = "sk-alice"
        requests_per_minute = 7
        share = 2
        [bob]
        key_sha256 = "{digest}"
        tokens_per_minute = 0
        """,
        tokens_per_minute=1000,
        api_key=("sk-flag",),
    )
    alice, bob, flag = (keys.find(s) for s in (b"sk-alice", b"sk-bob", b"sk-flag"))
    assert alice is not None
    assert (alice.name, alice.requests_per_minute, alice.tokens_per_minute) == ("alice", 7, 1000)
    assert alice.share == 2.0
    assert bob is not None
    assert (bob.name, bob.requests_per_minute, bob.tokens_per_minute) == ("bob", None, None)
    assert flag is not None
    assert (flag.name, flag.tokens_per_minute) == ("api-key-1", 1000)
    assert keys.find(b"sk-alic") is None
    assert keys.find(b"") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "not valid TOML"),
        ('x = "y"', "must be a table"),
        ("[a]", "one of key and key_sha256"),
        ('[a]\nkey = "x"\nkey_sha256 = "00"', "one of key and key_sha256"),
        ('[a]\nkey_sha256 = "00"', "64 hexadecimal digits"),
        ('[a]\nkey = "two words"', "printable ASCII"),
        ("[a]\nkey = 5", "printable ASCII"),
        ('[a]\nkey = "x"\nrpm = 5', "unknown 'rpm'"),
        ('[a]\nkey = "x"\nrequests_per_minute = -1', "integer >= 0"),
        ('[a]\nkey = "x"\nrequests_per_minute = true', "integer >= 0"),
        ('[a]\nkey = "x"\nshare = 0', "share must be"),
        ('[a]\nkey = "x"\nshare = nan', "share must be"),
        ('["a b"]\nkey = "x"', "a name is"),
        ('[a]\nkey = "x"\n[b]\nkey = "x"', "a and b have the same key"),
        ('[api-key-1]\nkey = "x"', "two keys of the name"),
    ],
)
def test_an_error_in_a_key_file_is_explained(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ring(tmp_path, text, api_key=("flag",))


def test_a_reload_that_fails_changes_nothing(tmp_path: Path) -> None:
    keys = ring(tmp_path, '[a]\nkey = "first"')
    (tmp_path / "keys.toml").write_text('[a]\nkey = "second"')
    keys.reload()
    assert keys.find(b"first") is None
    assert keys.find(b"second") is not None
    (tmp_path / "keys.toml").write_text("[a")
    keys.reload()
    assert keys.find(b"second") is not None
    (tmp_path / "keys.toml").unlink()
    keys.reload()
    assert keys.find(b"second") is not None


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys(ServerArgs(api_key_file="/nowhere/keys"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0201, "21ms"),
        (1, "1s"),
        (7.66, "7.66s"),
        (360, "6m0s"),
        (90.5, "1m30.5s"),
        (3600, "1h0m0s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_request_ids() -> None:
    assert is_id("abc-DEF_1.2:3/4")
    assert not any(map(is_id, ["", "a b", "a\nb", "é", "x" * 129, "-a", '"']))
