"""``python -m shrinkpoint``: the command line, where its script is on no path."""

from shrinkpoint.cli.app import main

main()
