"""luce/text/gbnf.py: grammars in llama.cpp's notation accept and refuse the texts that they describe."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.text.constraint import GrammarConstraint
from luce.text.gbnf import GbnfError, is_gbnf, lark_of_gbnf
from luce.text.grammar import GrammarCompiler
from luce.text.tokenizer import Tokenizer
from tests.support.vocabulary import byte_level

TOKENIZER = Tokenizer(byte_level(control=("<end>", "<mark>"), eos_token_id=256))
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab)


def accepts(grammar: str, text: str) -> bool:
    constraint = COMPILER.grammar(lark_of_gbnf(grammar))
    assert isinstance(constraint, GrammarConstraint)
    for token in TOKENIZER.encode(text, specials=True):
        if not constraint.allows(token):
            return False
        constraint.push(token)
    return constraint.over or constraint.may_end


LIST = """
# A list of items, each on a line.
root ::= item+
item ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"
"""
ARITHMETIC = """
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""
JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})  # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
MOVES = """
root ::= (
    # the first move needs no number
    "1. " move " " move "\\n"
    ([1-9] [0-9]? ". " move " " move "\\n")+
)
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""


@pytest.mark.parametrize(
    ("grammar", "fits", "others"),
    [
        (LIST, ["- one\n", "- é\n- two words\n"], ["", "- \n", "one\n", "- a", "- a\x85\n"]),
        (ARITHMETIC, ["x+1=y\n", "(a *3)= 2\n1=1\n"], ["x+=1\n", "1=1", "X=1\n"]),
        (JSON, ['{"a": [1, -2.5e3, "x\\"é\\u00e9"], "b": true}', "{}"], ['{"a"}', "[]", '{"a": 01}', '{"a": "\n"}']),
        (MOVES, ["1. e4 e5\n2. Nf3 Nc6\n", "1. d4 exd5\n10. O-O O-O-O+\n"], ["1. e4 e5\n", "1. e9 e5\n2. a1 a1\n"]),
        # Terminals of several characters are no unit: the longest one need not be the right one.
        ('root ::= "ab" "cd" | "abc"', ["abcd", "abc"], ["ab", "abcc"]),
        ('root ::= [a-z]+ "x" "1"', ["abxx1"], ["x1", "abx"]),
        ('root ::= . "."', ["a.", "\n.", "é."], [".", "ab"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2}', ["aab", "aabbbcc"], ["ab", "aa", "aabccc"]),
        ('root ::= ("a" | "b"){2,3}', ["ab", "bbb"], ["a", "abab"]),
        ('root ::= "a"?*', ["", "aaa"], ["b"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\"\\"', ['Aé\U0001f600\t"\\'], ["A"]),
        (r"root ::= [\]\[a^]{4}", ["][a^"], ["][ab"]),
        (r"root ::= [-a] [a-] [^^]", ["-ab", "a-]"], ["ba^", "-a^"]),
        (r"root ::= [\x30-\u0039é]+", ["09é"], ["a"]),
        ("root ::= [^]", ["a", "\n"], ["", "ab"]),
        ('root ::= "a"\n  | "b"\n  | c\nc ::= "c"', ["a", "b", "c"], ["ab", ""]),
        ('root ::= "a" |\n "b"\n\n\nother-rule ::= "x"', ["a", "b"], ["x"]),
        ('root ::=\n  "a" under_score Upper-Case\nunder_score ::= "_"\nUpper-Case ::= "U"', ["a_U"], ["a"]),
        ('root ::= root-2 | \nroot-2 ::= "x" root', ["", "xx"], ["y"]),
        ('root ::= <mark> "a"', ["<mark>a"], ["a"]),
        ("root ::= <[257]>", ["<mark>"], ["a"]),
        ('root ::= "" ("x" "")', ["x"], [""]),
        ('root ::= "a" # | "b"\n', ["a"], ["b"]),
        ('root ::= x0 x1 x0\nx0 ::= "a"\nx1 ::= (x0 | "b")', ["aba", "aaa"], ["ab"]),
    ],
)
def test_texts_of_the_grammar(grammar: str, fits: list[str], others: list[str]) -> None:
    assert [text for text in fits if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= missing", "line 1: there is no rule 'missing'"),
        ('\n\nroot ::= "a"\n  | gone "b"', "line 4: there is no rule 'gone'"),
        ('rule ::= "a"', "line 1: there is no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ('root ::= ("a"\nb ::= "b"', "line 1: this group is not closed"),
        ('root ::= "a" )', "line 1: unexpected ')'"),
        ('root ::= "abc', "line 1: unexpected '\"abc'"),
        ("root ::= [abc", "line 1: unexpected '[abc'"),
        ("root ::= [z-a]", "line 1: [z-a]: a range from the larger to the smaller character"),
        ("root ::= []", "line 1: [] matches no character"),
        (r'root ::= "\q"', r"line 1: unknown escape '\\q'"),
        (r'root ::= "\uD800"', r"line 1: \uD800 is no character"),
        ('root ::= "a"{3,2}', "line 1: {3,2}: the first number is the larger one"),
        ('root ::= "a"{20000}', "line 1: {20000} repeats more than 10,000 times"),
        ('root ::= "a"{' + 5000 * "1" + "}", "line 1: {" + 39 * "1" + " repeats more than 10,000 times"),
        ('root ::= "a" !<mark>', "line 1: !<mark>: all tokens but one have no translation"),
        ("root", "line 1: expected ::="),
        ('root ::= * "a"', "line 1: unexpected '*'"),
        ('::= "a"', "line 1: expected the name of a rule, got '::='"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "line 1: expected at most 100 groups inside each other"),
    ],
)
def test_mistakes_have_their_line(grammar: str, message: str) -> None:
    with pytest.raises(GbnfError, match=f"^{re.escape(message)}$"):
        lark_of_gbnf(grammar)


@pytest.mark.parametrize(
    ("text", "expected"),
    [('root ::= "a"', True), ('start: "::="', False), ("# c\n  a-b::=x", True), ("start: /a/", False)],
)
def test_gbnf_is_told_from_lark(text: str, expected: bool) -> None:
    assert is_gbnf(text) is expected


@given(st.text(alphabet='root:=\n"a[]()-^|*+?{}1,<>.# \\', max_size=60))
def test_any_text_is_translated_or_refused_with_a_line(text: str) -> None:
    try:
        lark_of_gbnf("root ::= " + text)
    except GbnfError as error:
        assert re.match(r"line \d+: ", str(error))


@given(st.text(max_size=20))
def test_a_literal_is_its_text(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    escaped = "".join(f"\\U{ord(char):08x}" for char in text)
    assert accepts(f'root ::= "{escaped}"', text)
