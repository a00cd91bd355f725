"""Run the command line by `python -m te_transform`."""

from te_transform.command_line.main import main

raise SystemExit(main())
