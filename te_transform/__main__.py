"""Run the command line by `python -m te_transform`."""

from te_transform.cli import main

raise SystemExit(main())
