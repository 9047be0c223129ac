"""`python -m luce` is the same as `luce`."""

from luce.cli.ending import script

if __name__ == "__main__":
    script()
