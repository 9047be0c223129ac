"""Regular expressions of JSON schemas, which are ECMA-262's, in the syntax of the grammar library, which is Rust's."""

from __future__ import annotations

#: what Rust's syntax gives a meaning inside a class, and ECMA-262's does not: nested classes and set operations
_CLASS_SPECIAL = "[&~"
#: escapes that are the character itself in ECMA-262, and a word boundary in Rust
_BOUNDARIES = "<>"


def has_lookaround(pattern: str) -> bool:
    """Whether a pattern has a look-around or a back-reference, which no automaton can match."""
    in_class, at = False, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            if not in_class and pattern[at + 1 : at + 2] in tuple("123456789k"):
                return True
            at += 2
            continue
        if not in_class and pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
            return True
        in_class = char != "]" if in_class else char == "["
        at += 1
    return False


def rust_pattern(pattern: str) -> str:
    """A pattern that matches in Rust's syntax what this one matches in ECMA-262's."""
    found: list[str] = []
    in_class, at = False, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\" and at + 1 < len(pattern):
            escaped = pattern[at + 1]
            found.append(escaped if escaped in _BOUNDARIES else char + escaped)
            at += 2
            continue
        if in_class and char in _CLASS_SPECIAL:
            found.append("\\")
        found.append(char)
        in_class = char != "]" if in_class else char == "["
        at += 1
    return "".join(found)
