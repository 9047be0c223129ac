"""`python -m luce` is the same as `luce`."""

from luce.cli.main import main

raise SystemExit(main())
