"""Which requests have a key for an ingress, also behind a change of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.errors import UsageError
from luce.ray.client_keys import ClientKeys
from tests.support.key_files import write_keys

ONE, TWO = {"Authorization": "Bearer one"}, {"x-api-key": "two"}


def test_without_a_file_every_request_may() -> None:
    assert ClientKeys("").may_ask({})


def test_a_request_needs_a_key_of_the_file(tmp_path: Path) -> None:
    keys = ClientKeys(str(write_keys(tmp_path / "keys", "a:one\n")))
    assert [keys.may_ask(each) for each in (ONE, TWO, {}, {"Authorization": "Bearer a:one"})] == [True] + 3 * [False]


def test_a_changed_file_counts_at_once(tmp_path: Path) -> None:
    keys = ClientKeys(str(write_keys(tmp_path / "keys", "one\n")))
    write_keys(tmp_path / "new", "two\nthree\n").replace(tmp_path / "keys")
    assert not keys.may_ask(ONE) and keys.may_ask(TWO)


@pytest.mark.parametrize("content", [None, "# nothing\n"])
def test_a_file_without_keys_lets_nobody_in_and_changes_nothing(tmp_path: Path, content: str | None) -> None:
    file = write_keys(tmp_path / "keys", "one\n")
    keys = ClientKeys(str(file))
    file.unlink()
    if content is not None:
        write_keys(file, content)
    assert keys.may_ask(ONE) and not keys.may_ask(TWO) and not keys.may_ask({})
    with pytest.raises(UsageError, match=f"--api-key-file {file}"):
        ClientKeys(str(file))
