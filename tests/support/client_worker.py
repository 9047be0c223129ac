"""Runs functions in the interpreter of a client library: each line of standard input is a JSON object with the source
of a function and its arguments; a line with its result, or with its error, is the answer."""

from __future__ import annotations

import json
import os
import sys
import traceback


def main() -> None:
    """Answer until standard input ends."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        work = json.loads(line)
        names: dict[str, object] = {}
        try:
            exec("from __future__ import annotations\n" + work["source"], names)
            answer = {"result": names[work["name"]](*work["arguments"])}  # type: ignore[operator]
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
