"""`python -m minillava` is the `minillava` command."""

from minillava.cli import main

main()
